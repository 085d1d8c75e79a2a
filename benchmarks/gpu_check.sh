#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that only a GPU can tell, in under 8 minutes:
#   benchmarks/gpu_check.sh OUT          on a machine with a GPU
#   benchmarks/gpu_check.sh --dry OUT    the same without its GPU steps, anywhere
# Uses the prebuilt libraries where they load and hold code for this GPU, and builds otherwise. Writes
# OUT/result.json and OUT/table.txt, and a log per step. Exits 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=0
if [ "${1:-}" = --dry ]; then dry=1 && shift; fi
if [ $# -ne 1 ]; then echo "usage: benchmarks/gpu_check.sh [--dry] OUT" >&2 && exit 2; fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
rm -f "$out"/{steps.tsv,tests.xml,grid.xml,benchmark.json,result.json,table.txt}
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
budget=470 word=ok
if [ "$dry" -eq 1 ]; then budget=1000000 word=rehearsed; fi  # a rehearsal takes its time

# step NAME SECONDS COMMAND...: at most so long, and not beyond the whole budget.
step() {
  local name=$1 cap=$2 status=0
  shift 2
  local left=$((budget - SECONDS))
  [ "$dry" -eq 0 ] || cap=$left
  if [ "$left" -lt 5 ]; then
    printf '%s\tno time left\t0\n' "$name" >>"$out/steps.tsv"
    return 1
  fi
  local begin=$SECONDS
  timeout "$((cap < left ? cap : left))" "$@" >"$out/$name.log" 2>&1 || status=$?
  local verdict=$word
  [ "$status" -eq 0 ] || verdict="failed ($status)"
  [ "$status" -ne 124 ] || verdict="out of time"
  printf '%s\t%s\t%s\n' "$name" "$verdict" "$((SECONDS - begin))" >>"$out/steps.tsv"
  echo "$name: $verdict, $((SECONDS - begin)) s"
  [ "$status" -eq 0 ]
}

skip() {
  printf '%s\tskipped: %s\t0\n' "$1" "$2" >>"$out/steps.tsv"
  echo "$1: skipped: $2"
}

if [ "$dry" -eq 1 ]; then
  device=cpu marker="not gpu" backend=cpu rehearse=(--dry)
  # Says what it would run.
  sanitizer=echo
  skip usable "no GPU in a rehearsal"
else
  device=cuda marker=gpu backend=cuda rehearse=()
  export TRM_REQUIRE_CUDA=1
  sanitizer=$("$python" -m benchmarks gpu-check tool compute-sanitizer)
  if ! step prebuilt 60 "$python" -m benchmarks gpu-check usable; then
    cat "$out/prebuilt.log"
    step build 200 "$python" -m benchmarks gpu-check build
    if ! step usable 60 "$python" -m benchmarks gpu-check usable; then
      cat "$out/usable.log"
      "$python" -m benchmarks gpu-check report "$out"
      exit 1
    fi
  fi
fi

pytest=("$python" -m pytest -q -p no:cacheprovider -o junit_family=xunit1)
step ceilings 60 "$python" -m benchmarks gpu-check prepare
step tests 150 "${pytest[@]}" -m "$marker" tests/gpu --junitxml "$out/tests.xml"
step grid 60 "${pytest[@]}" tests/csrc/test_backends.py -k "$backend" --junitxml "$out/grid.xml"
step benchmark 160 "$python" -m benchmarks divergence --device cuda "${rehearse[@]}" \
  --out "$out/benchmark.json"
step each-kernel 60 "$python" -m benchmarks each-kernel --device "$device"
# The option's name depends on the sanitizer's version.
filter=$("${sanitizer:-true}" --help 2>/dev/null | grep -oE -- '--kernel-(name|regex) ' | head -1)
for tool in memcheck racecheck initcheck synccheck; do
  if [ -z "$sanitizer" ]; then
    skip "$tool" "no compute-sanitizer: install a CUDA toolkit or nvidia-cuda-sanitizer-api"
    continue
  fi
  # initcheck must see who wrote what; the others look at our kernels alone.
  only=("${filter% }" kns=trm7kernels)
  if [ -z "$filter" ] || [ "$tool" = initcheck ]; then only=(); fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 60 "$sanitizer" --tool "$tool" \
    --error-exitcode 9 "${only[@]}" "$python" -m benchmarks each-kernel --device "$device"
done

"$python" -m benchmarks gpu-check report "$out"
