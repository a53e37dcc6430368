#!/usr/bin/env bash
# On a machine with a GPU: the operators' cases and an ordinary training loop on the device against the CPU, bit for bit,
# the benchmark, and compute-sanitizer where it is installed. Ends with the line "N passed, N failed, N skipped"; the
# exit status is 0 where nothing failed. Without a GPU it says so, and everything is skipped and counted.
#
#     bash tests/gpu.sh [FOLDER]
#
# Each file of tests, the benchmark and each tool of the sanitizer is a process of its own with a time limit: what crashes
# or hangs is counted as failed, and the rest still runs. All of it ends within $TORCH_EXT_SECONDS (570 unless given); a
# part for which no time is left is skipped and counted.
#
# FOLDER has libtorch_ext.so, and libtorch_ext_cuda.so there or in its folder cuda; bazel-bin unless given. Builds nothing
# and downloads nothing: Python (python3, or $TORCH_EXT_PYTHON) has torch and pytest. QUICK=1: a small benchmark.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
built=$(cd "${1:-$root/bazel-bin}" 2>/dev/null && pwd) || {
  echo "torch_ext: there is no folder ${1:-$root/bazel-bin}: build with bazel build //:torch_ext, or name another" >&2
  exit 1
}
python=${TORCH_EXT_PYTHON:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/torch_ext.XXXXXX")
trap 'rm -rf "$work"' EXIT
say() { printf 'torch_ext: %s\n' "$*"; }

# The package beside the libraries of that folder, and nothing else on the path.
[ -f "$built/libtorch_ext.so" ] || {
  say "no libtorch_ext.so in $built" >&2
  exit 1
}
mkdir "$work/path"
ln -s "$root/torch_ext" "$work/path/torch_ext"
ln -s "$built/libtorch_ext.so" "$work/path/"
for library in "$built/libtorch_ext_cuda.so" "$built/cuda/libtorch_ext_cuda.so"; do
  [ ! -f "$library" ] || ln -sf "$library" "$work/path/"
done
export PYTHONPATH=$work/path:$root/tests/gpu:$root/tests/torch:$root/tests
cd "$work/path" || exit 1 # python -m looks where it is first
export PYTHONDONTWRITEBYTECODE=1

passed=0 failed=0 skipped=0
# Counts one part that either ran or did not: $1 its exit status, $2 its name.
count() {
  if [ "$1" = 0 ]; then passed=$((passed + 1)); else
    failed=$((failed + 1))
    say "$2 failed"
  fi
}
skip() {
  skipped=$((skipped + 1))
  say "skipped: $1"
}

"$python" -m torch_ext info || exit 1
why=$("$python" -c '
import torch
print("" if torch.cuda.is_available() else "torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch finds none")')
[ -z "$why" ] || say "no GPU ($why): everything is skipped"

# Runs the command in $3... for at most $1 seconds and for no more than is left of all; $2: its name. Status 124: too long.
seconds=${TORCH_EXT_SECONDS:-570}
limited() {
  local left=$((seconds - SECONDS)) most=$1 name=$2
  shift 2
  [ "$left" -lt "$most" ] && most=$left
  [ "$most" -ge 5 ] || return 125
  timeout -k 5 "$most" "$@"
  local status=$?
  [ "$status" != 124 ] || say "$name was ended after $most s"
  return "$status"
}
# The same, and counts it.
part() {
  say "$2"
  limited "$@"
  local status=$?
  if [ "$status" = 125 ]; then skip "$2: no time is left"; else count "$status" "$2"; fi
}

pytest=(-m pytest -q -ra -p no:cacheprovider -c /dev/null --rootdir "$root/tests/gpu" -o faulthandler_timeout=100)
for file in "$root"/tests/gpu/test_*.py; do
  name=$(basename "$file")
  say "tests on the device: $name"
  limited 150 "$name" "$python" "${pytest[@]}" --junitxml="$work/$name.xml" "$file"
  status=$?
  if [ "$status" = 125 ]; then
    skip "$name: no time is left"
    continue
  fi
  counts=
  [ ! -f "$work/$name.xml" ] || counts=$("$python" - "$work/$name.xml" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml

suites = list(xml.parse(sys.argv[1]).getroot().iter("testsuite"))
total, failures, errors, skips = (sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped"))
print(total - failures - errors - skips, failures + errors, skips)
PYTHON
  )
  read -r file_passed file_failed file_skipped <<<"$counts"
  passed=$((passed + ${file_passed:-0})) failed=$((failed + ${file_failed:-0})) skipped=$((skipped + ${file_skipped:-0}))
  # Whatever pytest says beside failed tests (1): it did not get to its end (128 and more: by a signal).
  [ "$status" -le 1 ] && [ -n "$counts" ] || count "$status" "$name ended with status $status and"
done

if [ -n "$why" ]; then
  skip "the benchmark: no GPU"
  skip "compute-sanitizer: no GPU"
else
  part 240 "the benchmark" "$python" "$root/tests/bench" --device cuda ${QUICK:+--quick}
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
      # Without torch's cache every tensor is an allocation of its own, and a step beyond one shows.
      part 120 "compute-sanitizer $tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" \
        --error-exitcode 9 "$python" "${pytest[@]}" "$root/tests/gpu/test_gpu_operators.py" -k "a_call_has_the_cpus_bits"
    done
  else
    skip "compute-sanitizer: not installed"
  fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
