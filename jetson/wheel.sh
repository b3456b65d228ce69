#!/bin/bash
# Makes a wheel for 64-bit Arm Linux on x86: jetson/wheel.sh [FOLDER] [pip options, such as -Ccmake.define.PYCASS_CUDA=ON].
# Prints the wheel's path. It runs with any CPython from 3.10 on (limited API) and glibc 2.35 or newer (JetPack 6 and 7).
# Needs gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu, and a python3 with headers and venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/dist}
(($#)) && shift
glibc=2.35

command -v aarch64-linux-gnu-gcc >/dev/null || {
  echo "jetson/wheel.sh: there is no aarch64-linux-gnu-gcc; apt install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The limited API needs of pyconfig.h only what all 64-bit Linux has in common, so this Python's headers do. Debian's
# pyconfig.h asks for another one by the target's name; the one behind it is taken instead.
python3 - "$work/include" <<'PY'
import pathlib, shutil, sys, sysconfig
source, to = pathlib.Path(sysconfig.get_path("include")), pathlib.Path(sys.argv[1])
shutil.copytree(source, to)
behind = source.parent / (sysconfig.get_config_var("MULTIARCH") or "") / source.name / "pyconfig.h"
shutil.copyfile(behind if behind.exists() else sysconfig.get_config_h_filename(), to / "pyconfig.h")
PY

# Tools in an environment of this machine's; then sysconfig, and so the wheel's tag, gets the other platform.
python3 -m venv "$work/tools"
export PATH=$work/tools/bin:$PATH
pip install --quiet "pip>=23.1" "scikit-build-core>=0.10" "cffi>=1.17" "cmake>=3.21" "ninja>=1.10" >&2
_PYTHON_HOST_PLATFORM=linux-aarch64 pip wheel "$root" --no-deps --no-build-isolation --wheel-dir "$work/wheel" \
  "-Ccmake.define.CMAKE_TOOLCHAIN_FILE=$root/jetson/toolchain-aarch64.cmake" \
  "-Ccmake.define.Python_INCLUDE_DIR=$work/include" \
  "$@" >&2

wheel=$(echo "$work"/wheel/*.whl)
python3 -m zipfile -e "$wheel" "$work/files"
for library in "$work"/files/pycass/*.so; do
  aarch64-linux-gnu-readelf -h "$library" | grep -q 'Machine: *AArch64' || { echo "$library is not for Arm" >&2; exit 1; }
  newest=$(aarch64-linux-gnu-readelf -V "$library" | grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 | sort -V | tail -n 1)
  [[ $(printf '%s\n' "$newest" "$glibc" | sort -V | tail -n 1) == "$glibc" ]] || {
    echo "${library##*/} needs glibc $newest; JetPack 6 has $glibc: use a cross compiler of an older system" >&2
    exit 1
  }
done
mkdir -p "$out"
mv "$wheel" "$out"
echo "$out/${wheel##*/}"
