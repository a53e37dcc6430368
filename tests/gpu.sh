#!/usr/bin/env bash
# On a machine with a GPU: the operators' cases and an ordinary training loop on the device against the CPU, bit for bit,
# the benchmark, and compute-sanitizer where it is installed. Ends with the line "N passed, N failed, N skipped"; the
# exit status is 0 where nothing failed. Without a GPU it says so, and everything is skipped and counted.
#
#     bash tests/gpu.sh [FOLDER]
#
# FOLDER has libtorch_ext.so, and libtorch_ext_cuda.so there or in its folder cuda; bazel-bin unless given. Builds nothing
# and downloads nothing: Python (python3, or $TORCH_EXT_PYTHON) has torch and pytest. QUICK=1: a small benchmark.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
built=$(cd "${1:-$root/bazel-bin}" 2>/dev/null && pwd) || {
  echo "torch_ext: there is no folder ${1:-$root/bazel-bin}: build with bazel build //:torch_ext, or name another" >&2
  exit 1
}
cd "$root"
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

say "the tests on the device"
"$python" -m pytest -q -ra -p no:cacheprovider -c /dev/null --rootdir "$root/tests/gpu" --junitxml="$work/tests.xml" \
  "$root/tests/gpu"
status=$?
read -r tests_passed tests_failed tests_skipped < <("$python" - "$work/tests.xml" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml

suites = list(xml.parse(sys.argv[1]).getroot().iter("testsuite"))
total, failures, errors, skips = (sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped"))
print(total - failures - errors - skips, failures + errors, skips)
PYTHON
)
passed=$((passed + ${tests_passed:-0})) failed=$((failed + ${tests_failed:-0})) skipped=$((skipped + ${tests_skipped:-0}))
# Whatever pytest says beside failed tests (1) and no tests: it did not get that far.
[ "$status" -le 1 ] || count "$status" "pytest"

if [ -n "$why" ]; then
  skip "the benchmark: no GPU"
  skip "compute-sanitizer: no GPU"
else
  say "the benchmark"
  "$python" -m torch_ext bench --device cuda ${QUICK:+--quick}
  count $? "the benchmark"
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
      say "compute-sanitizer $tool"
      # Without torch's cache every tensor is an allocation of its own, and a step beyond one shows.
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 \
        "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$root/tests/gpu" \
        "$root/tests/gpu/test_gpu_operators.py" -k "a_call_has_the_cpus_bits"
      count $? "compute-sanitizer $tool"
    done
  else
    skip "compute-sanitizer: not installed"
  fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
