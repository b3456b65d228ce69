"""Finds the CUDA toolchain: a toolkit on the system, else the pinned packages of PyPI (`pip install '.[cuda-test]'`)."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

# One order of float operations, as on the CPU: multiply-adds only where the code says so, denormals count as zero.
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-ftz=true"]
RUNTIME = "nvidia-cuda-runtime==13.0.96"


def package_roots():
    """Folders in which PyPI's packages of CUDA 13 put bin/, include/, lib/."""
    for key in ("purelib", "platlib"):
        root = Path(sysconfig.get_paths()[key]) / "nvidia" / "cu13"
        if root.is_dir():
            yield root


def find_tool(name):
    """Path of nvcc, ptxas or nvdisasm, or None. The packages' tools are of one version together, so they come first."""
    places = [root / "bin" for root in package_roots()]
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home) / "bin")
    places.append(Path("/usr/local/cuda/bin"))
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    return shutil.which(name)


def find_include():
    """Folder of cuda_runtime_api.h and the types' headers, or None."""
    places = [root / "include" for root in package_roots()]
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home) / "include")
    places += [Path("/usr/local/cuda/include"), Path("/usr/include")]
    return next((str(p) for p in places if (p / "cuda_runtime_api.h").is_file()), None)


def fetch_runtime(folder):
    """For a cross build: the static runtime for 64-bit Arm from PyPI's package, without installing it. Its folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", folder,
               "--platform", "manylinux2014_aarch64", "--only-binary=:all:", RUNTIME]  # fmt: skip
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("/libcudart_static.a"))
        return str(Path(wheel.extract(name, folder)).parent)


def nvcc():
    """The compiler as a command's beginning."""
    found = find_tool("nvcc")
    if not found:
        raise SystemExit("no nvcc: install a CUDA toolkit, or pip install '.[cuda-test]'")
    return [found]
