#!/bin/bash
# Makes a folder in which Python for 64-bit Arm lives, with pycass from a wheel and what its tests need:
# tests/aarch64/root.sh FOLDER WHEEL. Prints the command that runs it under qemu. Packages come from the Debian that this
# machine is set up for and from PyPI; nothing is installed on the machine itself, and no root is needed.
set -euo pipefail
root=$1 wheel=$2
state=$root/apt
mkdir -p "$root" "$state/lists/partial" "$state/cache/archives/partial"
: >"$state/status"

# An apt of its own that knows arm64 only and thinks that nothing is installed.
apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Acquire::Languages=none
  -o Dir::State="$state" -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache" -o APT::Sandbox::User="$(id -un)")
"${apt[@]}" update >&2
"${apt[@]}" install --no-install-recommends --yes --download-only python3-minimal libpython3-stdlib libstdc++6 >&2
for package in "$state"/cache/archives/*.deb; do
  dpkg-deb -x "$package" "$root"
done
rm -r "$state"

python=$(basename "$(echo "$root"/usr/bin/python3.[0-9]*)")
version=${python#python}
python3 -m pip install --quiet --target "$root/site" --only-binary=:all: --python-version "$version" --implementation cp \
  --abi "cp${version/./}" --abi abi3 --abi none --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
  --platform linux_aarch64 "$wheel" pytest hypothesis >&2
echo "env PYTHONPATH=$root/site qemu-aarch64 -cpu cortex-a76 -L $root $root/usr/bin/$python"
