"""The C tests: cmake builds them in a folder of their own, and each of ctest's tests is one test here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTS = [ROOT / "tests" / "c" / "CMakeLists.txt", ROOT / "tests" / "fuzz" / "CMakeLists.txt"]


def names():
    """What the CMake files name, so that tests can be told apart before anything is built."""
    text = "".join(path.read_text(encoding="utf-8") for path in LISTS)
    found = re.findall(r"^ *(?:c_test\(|add_test\(NAME )(\w+)[ )]", text, flags=re.M)
    fuzz = [f"fuzz_{name}" for name in re.search(r"foreach\(name ([\w ]+)\)", text)[1].split()]
    return sorted({*found, *fuzz})


def absent(reason):
    """Skips for want of something that can be installed; PYCASS_NO_SKIP makes it a failure."""
    (pytest.fail if os.environ.get("PYCASS_NO_SKIP") else pytest.skip)(reason)


def tool(name):
    """A program of this Python environment, else of the machine."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def run(*command):
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-20000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ctest")
    ninja = tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    options = ["-DPYCASS_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    run(tool("cmake"), "-S", ROOT, "-B", folder, *generator, *options)
    run(tool("cmake"), "--build", folder, "--parallel")
    return folder


def test_every_test_is_listed(build):
    listed = re.findall(r"Test +#\d+: (\w+)", run(tool("ctest"), "--test-dir", build, "-N"))
    assert set(listed) <= set(names())


@pytest.mark.parametrize("name", names())
def test_c(build, name):
    out = run(tool("ctest"), "--test-dir", build, "-R", f"^{name}$", "--output-on-failure")
    if "No tests were found" in out or "***Skipped" in out:
        pytest.skip("not built or cannot run on this machine")
