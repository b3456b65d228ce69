"""The CUDA kernels without a GPU: run on the CPU against the scalar set (tests/simt), compiled, and counted."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nvrtc
import pytest
from test_c import ROOT, absent, run, tool

sys.path.insert(0, str(ROOT / "kernels_cuda"))
import static_table  # noqa: E402
import toolchain  # noqa: E402

EXTRA = "pip install '.[cuda-test]'"
ORDERS = ("forward", "reverse", "random:1", "random:2")
COPIES = ("late", "early")


def need(what, found, how):
    if not found:
        absent(f"no {what}: {how}")
    return found


def generator():
    ninja = tool("ninja")
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """The folder of the shim's test programs."""
    need("C++ compiler", shutil.which("g++"), "apt-get install g++")
    need("Boost.Context", Path("/usr/include/boost/context/fiber.hpp").exists(), "apt-get install libboost-context-dev")
    include = need("CUDA headers", toolchain.find_include(), EXTRA)
    folder = tmp_path_factory.mktemp("simt")
    options = ["-DPYCASS_SIMT=ON", "-DPYCASS_WERROR=ON", "-DCMAKE_BUILD_TYPE=Release", f"-DPYCASS_CUDA_INCLUDE={include}"]
    run(tool("cmake"), "-S", ROOT, "-B", folder, *generator(), *options)
    run(tool("cmake"), "--build", folder, "--parallel")
    return folder / "tests" / "simt"


def simt(build, program, *args, order="forward", copy="late"):
    """Exit status and output of a test program."""
    env = {**os.environ, "SIMT_ORDER": order, "SIMT_COPY": copy, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = subprocess.run([str(build / program), *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_products(build, order, copy):
    assert simt(build, "simt_products_plain_0", order=order, copy=copy) == (0, "ok\n")


@pytest.mark.parametrize("mode,order,copy", [("asan", "forward", "late"), ("asan", "reverse", "early"),
                                             ("tsan", "forward", "early"), ("tsan", "reverse", "late")])
def test_products_sanitized(build, mode, order, copy):
    args = ["little"] if mode == "tsan" else []
    assert simt(build, f"simt_products_{mode}_0", *args, order=order, copy=copy) == (0, "ok\n")


@pytest.mark.parametrize("mode", ["plain", "asan", "tsan"])
@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
@pytest.mark.parametrize("name", ["ops", "attend"])
def test_other_kernels(build, name, mode, order):
    args = ["little"] if mode == "tsan" else []
    assert simt(build, f"simt_{name}_{mode}_0", *args, order=order) == (0, "ok\n")


# The bug, the mode that has to find it, and what is then said (kernels_cuda/ptx.cuh has the list).
SEEDED = [
    (1, "plain", "other words in tile"),            # a wrong lane map
    (2, "tsan", "data race"),                       # a missing barrier
    (3, "plain", "token 0, row"),                   # no wait for cp.async: a wrong sum
    (4, "asan", "heap-buffer-overflow"),            # a read past the last tile
    (5, "tsan", "data race"),                       # a missing __syncwarp
]


@pytest.mark.parametrize("bug,mode,said", SEEDED)
def test_seeded_bugs_are_found(build, bug, mode, said):
    status, out = simt(build, f"simt_products_{mode}_{bug}", "little")
    assert status != 0
    assert said in out


def test_static_table():
    need("nvcc", toolchain.find_tool("nvcc"), EXTRA)
    need("nvdisasm", toolchain.find_tool("nvdisasm"), EXTRA)
    need("nvcc 13.0, which the table is of", "release 13.0" in run(toolchain.find_tool("nvcc"), "--version"), EXTRA)
    out = run(sys.executable, ROOT / "kernels_cuda" / "static_table.py", "--check")
    assert out.count("\n| ") >= len(static_table.KERNELS) * len(static_table.GPUS)


def test_cuda_12_6_compiles_the_kernels():
    library = need("NVRTC 12.6", nvrtc.library(), EXTRA)
    version, cubin = nvrtc.compile_kernels(library, "sm_87")
    assert version == (12, 6)
    assert cubin[:4] == b"\x7fELF" and b"matmul_nest" in cubin


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory):
    need("nvcc", toolchain.find_tool("nvcc"), EXTRA)
    folder = tmp_path_factory.mktemp("cuda")
    options = ["-DPYCASS_CUDA=ON", f"-DPYCASS_NVCC={toolchain.find_tool('nvcc')}"]
    run(tool("cmake"), "-S", ROOT, "-B", folder, *generator(), *options)
    run(tool("cmake"), "--build", folder, "--target", "pycass_cuda_library")
    return folder / "libpycass_cuda.so"


def test_library_has_code_for_all(cuda_library):
    text = cuda_library.read_bytes()
    assert all(arch in text for arch in (b"sm_87", b"sm_89", b"sm_90"))


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")
def test_library_says_that_there_is_no_driver(cuda_library):
    library = ctypes.CDLL(str(cuda_library))
    library.pycass_cuda.restype = ctypes.POINTER(ctypes.c_void_p)
    table = library.pycass_cuda()
    alloc = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)(table[1])
    error_text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(table[7])
    error = alloc(ctypes.byref(ctypes.c_void_p()), 16)
    assert error != 0
    assert b"driver" in error_text(error)
