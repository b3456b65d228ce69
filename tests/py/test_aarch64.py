"""64-bit Arm on x86: the jetson preset's C tests under qemu as a CPU without bf16, i8mm or SVE; then the wheel of
jetson/wheel.sh in a Python for Arm, with tests of this folder that compare neon with scalar."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_c import absent, names, run, tool
from test_cuda_simt import toolchain

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
         "qemu-aarch64": "qemu-user"}  # fmt: skip
PYTHON_NEEDS = {"apt-get": "a Debian system", "dpkg-deb": "a Debian system"}
EMULATOR = ["qemu-aarch64", "-cpu", "cortex-a76", "-L", "/usr/aarch64-linux-gnu"]
GENERATOR = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"] if tool("ninja") else []
SLOW = {"session"}  # three minutes under qemu; what it tests of kernels, the tests in Python below do, too
PYTHON_TESTS = {  # with what they are cut down to, since qemu takes twenty times as long
    "test_model_golden.py": "nest",
    "test_lossless.py": "kernel_sets_agree and (llama_tied or qwen3_untied) or batches_of_a_long_prompt and nest and neon",
    "test_kv.py": "trimming_into_a_block and nest or states_do_not_depend and nest",
}


def need(programs):
    missing = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if missing:
        absent(f"to test 64-bit Arm, install {' '.join(missing)}")


if platform.machine() == "aarch64":
    pytest.skip("this is a 64-bit Arm machine: the other tests are its own", allow_module_level=True)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    need(NEEDS)
    folder = tmp_path_factory.mktemp("aarch64")
    run(tool("cmake"), "--preset", "jetson", "-S", ROOT, "-B", folder, "-DPYCASS_FUZZ_SECONDS=1", *GENERATOR)
    run(tool("cmake"), "--build", folder, "--parallel")
    return folder


def test_the_library_is_for_arm(build):
    for binary in ("libpycass.so", "tests/c/generate"):
        assert re.search(r"Machine: +AArch64", run("aarch64-linux-gnu-readelf", "-h", build / binary))


def test_c(build):
    """All at once, on all cores."""
    out = run(tool("ctest"), "--test-dir", build, "-j", os.cpu_count(), "-E", f"^({'|'.join(SLOW)})$", "--output-on-failure")
    passed = set(re.findall(r"Test +#\d+: (\w+) \.+ +Passed", out))
    assert passed == set(names()) - SLOW - {"amx"}


def test_kernels_under_sanitizers(tmp_path):
    """neon against scalar with address and undefined behaviour sanitizers."""
    need(NEEDS)
    run(tool("cmake"), "--preset", "jetson", "-S", ROOT, "-B", tmp_path, "-DPYCASS_SANITIZE=address,undefined", *GENERATOR)
    run(tool("cmake"), "--build", tmp_path, "--parallel", "--target", "test_kernels")
    command = ["env", "ASAN_OPTIONS=detect_leaks=0", *EMULATOR, tmp_path / "tests/c/test_kernels"]  # qemu has no ptrace
    assert re.search(r"^neon: runs$.*^scalar: runs$.*^ok$", run(*command), re.M | re.S)


def test_a_cpu_without_dot_products_takes_scalar(build):
    """Cortex-A72 (Armv8.0) cannot run neon: it is neither chosen nor forced."""
    command = ["cortex-a72" if word == "cortex-a76" else word for word in EMULATOR]
    assert re.search(r"^neon: this machine cannot run it$", run(*command, build / "tests/c/test_kernels"), re.M)


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory):
    need(NEEDS)
    if not toolchain.find_tool("nvcc"):
        absent("no nvcc: pip install '.[cuda-test]'")
    folder = tmp_path_factory.mktemp("aarch64_cuda")
    options = ["-DPYCASS_CUDA=ON", "-DPYCASS_TESTS=OFF", f"-DPYCASS_NVCC={toolchain.find_tool('nvcc')}"]
    run(tool("cmake"), "--preset", "jetson", "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *options, *GENERATOR)
    run(tool("cmake"), "--build", folder, "--target", "pycass_cuda_library")
    return folder / "libpycass_cuda.so"


def test_the_cuda_library_is_for_orin(cuda_library):
    assert re.search(r"Machine: +AArch64", run("aarch64-linux-gnu-readelf", "-h", cuda_library))
    text = cuda_library.read_bytes()
    assert b"sm_87" in text and b"sm_89" not in text


# ---- Python ----


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The command of a Python for Arm in which pycass is installed from a cross-built wheel."""
    need(NEEDS | PYTHON_NEEDS)
    folder = tmp_path_factory.mktemp("aarch64_python")
    wheel = last_line(ROOT / "jetson" / "wheel.sh", folder)
    assert re.fullmatch(r"pycass-[\d.]+-cp310-abi3-linux_aarch64\.whl", Path(wheel).name)
    return last_line(ROOT / "tests" / "aarch64" / "root.sh", folder / "root", wheel).split()


def last_line(*command):
    """Of a program's stdout; its stderr is shown if it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]}:\n{done.stdout}\n{done.stderr[-20000:]}"
    return done.stdout.splitlines()[-1]


def test_the_wheel_has_neon(python, tmp_path):
    code = "import pycass; from pycass.model import kernels; print(pycass.__file__, kernels())"
    out = subprocess.run([*python, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert "/site/pycass/" in out and "('neon', True), ('scalar', True)" in out


def test_in_python(python, tmp_path):
    def tests(file):
        command = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "py" / file)]
        return subprocess.run([*command, "-k", PYTHON_TESTS[file]], capture_output=True, text=True, cwd=tmp_path,
                              env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(tests, PYTHON_TESTS):
            assert done.returncode == 0, done.stdout[-20000:] + done.stderr
            assert re.match(r"[1-9]\d* passed", done.stdout.splitlines()[-1]) and "skipped" not in done.stdout


def test_cuda_says_that_there_is_no_driver(python, cuda_library, tmp_path):
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "library.pycass_cuda.restype = ctypes.POINTER(ctypes.c_void_p)\n"
        "table = library.pycass_cuda()\n"
        "alloc = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)(table[1])\n"
        "text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(table[7])\n"
        "print(text(alloc(ctypes.byref(ctypes.c_void_p()), 16)))\n"
    )
    assert "driver" in last_line(*python, "-c", code, cuda_library)


def test_it_answers_a_prompt(python, tiny_cass, tmp_path):
    """The command line under qemu: the same words from neon, scalar and this machine's own kernels."""
    args = ["-m", "pycass", "run", str(tiny_cass("qwen3")), "--temp", "0", "-n", "24", "--raw", "-p", "abc", "--json"]
    answers = [last_line(*python, *args, "--kernel", k) for k in ("neon", "scalar")]
    answers.append(last_line(sys.executable, *args))
    ids = [json.loads(a)["token_ids"] for a in answers]
    assert len(ids[0]) == 24 and ids[0] == ids[1] == ids[2]


def test_the_bits_of_this_machine(python, tiny_cass, tmp_path):
    """Logits of neon and of scalar code on Arm are those of this machine's scalar code."""
    code = (
        "import sys; from pycass import Model\n"
        "for path in sys.argv[2:]:\n"
        "  with Model.load(path, threads=1, kernel=sys.argv[1]) as m:\n"
        "    c = m.generate(list(range(3, 40)), 30, ignore_eos=True, spec='off')\n"
        "    print(c.logits_hash, c.token_ids)\n"
    )
    paths = [str(tiny_cass(n, c)) for n in ("llama_tied", "mistral", "qwen2_yarn", "qwen3_untied") for c in ("nest", "raw", "cass1")]
    found = [
        subprocess.run([*command, "-c", code, kernel, *paths], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
        for command, kernel in (([sys.executable], "scalar"), (python, "neon"), (python, "scalar"))
    ]
    assert len(found[0].splitlines()) == len(paths) and found[0] == found[1] == found[2]
