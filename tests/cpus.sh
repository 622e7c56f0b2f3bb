#!/usr/bin/env bash
# Runs tests as other CPUs do, whose kernels add in other orders: tests/cpus.sh [CPU ...] [-- pytest's arguments]
# At the end one line for each CPU; the exit code is 1 if any of them failed.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

played() {  # a CPU's environment; a variable that this CPU cannot follow leaves it at its best
  case $1 in
    own) echo "FALLOW_CPU=own" ;;
    avx512) echo "ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512 MKL_CBWR=AVX512 OMP_NUM_THREADS=1" ;;
    avx2) echo "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 OMP_NUM_THREADS=2" ;;
    sse41) echo "ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1" ;;
    *) return 1 ;;
  esac
}

cpus=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  played "$1" >/dev/null || { echo "there is no CPU '$1' here; there are own, avx512, avx2 and sse41" >&2; exit 2; }
  cpus+=("$1"); shift
done
[ $# -gt 0 ] && shift
[ ${#cpus[@]} -gt 0 ] || cpus=(own avx512 avx2 sse41)

failed=0 lines=()
for cpu in "${cpus[@]}"; do
  log=$(mktemp)
  # shellcheck disable=SC2046
  env $(played "$cpu") "$python" -m pytest -n 2 --dist loadgroup "$@" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || failed=1
  lines+=("$(printf '%-7s exit %s  %s' "$cpu" "$code" "$(grep -E '(passed|failed|error|no tests ran).* in [0-9.]+s' "$log" | tail -1 | tr -d '=')")")
  rm -f "$log"
done
printf '\n'
printf '%s\n' "${lines[@]}"
exit $failed
