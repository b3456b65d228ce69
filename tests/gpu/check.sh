#!/bin/bash
# Everything that a GPU has to show, in one run of less than 8 minutes without network: builds libpycass_cuda.so for the GPU it
# finds, runs every kernel against the scalar set, small ones under compute-sanitizer, whole models against the CPU and plain
# against speculative decoding, and times products against torch's BF16 ones. Prints a table to keep.
# Usage: tests/gpu/check.sh [FOLDER TO BUILD IN]. Needs cmake, a C compiler, nvcc 12.6 or newer (CUDA_HOME, PATH, or PyPI's packages); python3 with torch for BF16.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:-$(mktemp -d)}
rows=14336 cols=4096 copies=4 repeat=50 # 59 million weights, 30 MB of draft each: four of them pass any L2

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

step "the GPU"
device=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
echo "$device, sm_$arch"

step "building"
options=(-DPYCASS_CUDA=ON -DPYCASS_TESTS=ON "-DPYCASS_CUDA_ARCHS=$arch" -DCMAKE_BUILD_TYPE=Release)
cmake -S "$root" -B "$build" "${options[@]}" >"$build.log" || { cat "$build.log"; exit 1; }
cmake --build "$build" --parallel --target gpu_products gpu_ops gpu_attend gpu_model gpu_time >>"$build.log" 2>&1 ||
  { tail -n 50 "$build.log"; exit 1; }
bin=$build/tests/gpu
export PYCASS_CUDA_LIB=$build/libpycass_cuda.so

step "kernels against the scalar set"
failed=()
check() {
  echo "-- ${*##*/}"
  timeout 120 "$@" || failed+=("${*##*/}")
}
for name in products ops attend; do
  check "$bin/gpu_$name"
done

step "whole models: logits, one order, plain = speculative"
check "$bin/gpu_model"

step "compute-sanitizer"
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
  for tool in memcheck racecheck; do
    check "$sanitizer" --tool "$tool" --error-exitcode 1 "$bin/gpu_products" little
  done
else
  echo "not here"
fi

step "products of $rows x $cols"
bf16=$(timeout 60 python3 "$root/tests/gpu/time_bf16.py" $rows $cols $copies $repeat 2>/dev/null) || bf16=
[[ $bf16 ]] || echo "no torch: BF16 is not measured"
echo "$device: microseconds of a product, and GB/s of the weight bytes it reads"
printf '| M | draft | GB/s | target | GB/s | BF16 | GB/s | BF16 / draft | BF16 / target |\n|---|---|---|---|---|---|---|---|---|\n'
timeout 120 "$bin/gpu_time" $rows $cols $copies $repeat | while read -r m draft draft_gb target target_gb; do
  read -r us gb < <(awk -v m="$m" '$1 == m {print $2, $3}' <<<"$bf16"; echo "- -")
  ratios=$(awk -v b="$us" -v d="$draft" -v t="$target" \
    'BEGIN {if (b == "-") print "- | -"; else printf "%.2f | %.2f", b / d, b / t}')
  echo "| $m | $draft | $draft_gb | $target | $target_gb | $us | $gb | $ratios |"
done

step "done"
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed on $device"
