#!/usr/bin/env bash
# On a machine with a GPU: the operators' cases, training, graphs and the exchange on the device against the CPU, bit for
# bit, the benchmark, the library's build variants, and compute-sanitizer where it works. Ends with the line "N passed,
# N failed, N skipped"; the exit status is 0 where nothing failed. Without a GPU it says so, and everything is skipped
# and counted.
#
#     bash tests/gpu.sh --pack FOLDER     here: what is built, copied into FOLDER, which git is told to ignore
#     bash tests/gpu.sh [PART...] [FOLDER]     there, in a copy of the tree: builds nothing, downloads nothing
#
# PARTs are --tests, --exchange, --benchmark, --variants and --sanitizer; all of them unless given. Files of tests run
# side by side (gpu_files.py). A test that crashes, hangs for $TORCH_EXT_TEST_SECONDS (60 unless given) or leaves the
# device dead is counted as failed, and the tests after it run in a new process. The other parts run one after the
# other, each with a time limit. All of it ends within $TORCH_EXT_SECONDS (570 unless given), tests within two fifths of
# that where another part follows; what no time is left for is skipped and counted. docs/gpu_first_run.md is a plan for
# the first 15 minutes.
#
# FOLDER has libtorch_ext.so, libtorch_ext_cuda.so there or in its folder cuda, and perhaps variants; bazel-bin unless
# given. Python (python3, or $TORCH_EXT_PYTHON) has torch and pytest. QUICK=1: small benchmarks. --json FILE: counts,
# times and failures; with $OUT, a folder, $OUT/gpu.json unless given, and the figures beside it.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
say() { printf 'torch_ext: %s\n' "$*"; }
die() {
  say "$*" >&2
  exit 1
}

# -- what is asked for ---------------------------------------------------------------------------------------------

parts=() folder= pack= json=${OUT:+$OUT/gpu.json}
while [ $# -gt 0 ]; do
  case $1 in
  --tests | --exchange | --benchmark | --variants | --sanitizer) parts+=("${1#--}") ;;
  --pack | --json)
    [ $# -ge 2 ] || die "$1 needs a name after it"
    if [ "$1" = --pack ]; then pack=$2; else json=$2; fi
    shift
    ;;
  -*) die "there is no switch $1; legal are --pack FOLDER, --json FILE, --tests, --exchange, --benchmark, --variants, --sanitizer" ;;
  *)
    [ -z "$folder" ] || die "one FOLDER is legal, and there are $folder and $1"
    folder=$1
    ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=(tests exchange benchmark variants sanitizer)
wanted() { [[ " ${parts[*]} " == *" $1 "* ]]; }
case $json in "" | /*) ;; *) json=$PWD/$json ;; esac

# -- packing -------------------------------------------------------------------------------------------------------

# Copies $1 to $2 unless it is there already; not the links, which end at the checkout.
copy() {
  mkdir -p "$(dirname "$2")" && cp -fL "$1" "$2" && chmod u+w "$2" || die "could not copy $1 to $2"
}
if [ -n "$pack" ]; then
  built=${folder:-$root/bazel-bin}
  [ -f "$built/libtorch_ext.so" ] || die "no libtorch_ext.so in $built: build with bazel build //:torch_ext, or name another folder"
  copy "$built/libtorch_ext.so" "$pack/libtorch_ext.so"
  cuda=$built/cuda/libtorch_ext_cuda.so
  [ -f "$cuda" ] || cuda=$built/libtorch_ext_cuda.so
  if [ -f "$cuda" ]; then copy "$cuda" "$pack/libtorch_ext_cuda.so"; else say "without libtorch_ext_cuda.so: it is not built (bazel build //:torch_ext, where nvcc is)"; fi
  for variant in "$built"/cuda/variants/*.so "$built"/variants/*.so; do
    [ ! -f "$variant" ] || copy "$variant" "$pack/variants/$(basename "$variant")"
  done
  [ -d "$pack/variants" ] || say "without variants: they are not built (bazel build //cuda:variants)"
  size=$(du -sm "$pack" | cut -f1)
  [ "$size" -le 40 ] || die "$pack has $size MB; 40 may travel"
  # A folder of the checkout is not to be committed, and travels only where it is named.
  if inside=$(git -C "$pack" rev-parse --show-toplevel 2>/dev/null) && ! git -C "$pack" check-ignore -q .; then
    exclude=$(git -C "$inside" rev-parse --path-format=absolute --git-path info/exclude)
    mkdir -p "$(dirname "$exclude")"
    echo "/$(realpath --relative-to="$inside" "$pack")/" >>"$exclude"
  fi
  say "$pack has $size MB: $(cd "$pack" && find . -name '*.so' | sort | tr '\n' ' ')"
  exit 0
fi

# -- the package beside the libraries of that folder, and nothing else on the path ----------------------------------

named=${folder:-$root/bazel-bin}
built=$(cd "$named" 2>/dev/null && pwd) || die "there is no folder $named: build with bazel build //:torch_ext, or name another"
[ -f "$built/libtorch_ext.so" ] || die "no libtorch_ext.so in $built"
python=${TORCH_EXT_PYTHON:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/torch_ext.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/path"
ln -s "$root/torch_ext" "$work/path/torch_ext"
ln -s "$built/libtorch_ext.so" "$work/path/"
for library in "$built/libtorch_ext_cuda.so" "$built/cuda/libtorch_ext_cuda.so"; do
  [ ! -f "$library" ] || ln -sf "$library" "$work/path/"
done
export PYTHONPATH=$work/path:$root/tests/gpu:$root/tests/torch:$root/tests/distributed:$root/tests
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
unset PYTEST_ADDOPTS
ulimit -c 0 # a process on a GPU has much memory to write down
cd "$work/path" || exit 1 # python -m looks where it is first

# -- counting ------------------------------------------------------------------------------------------------------

passed=0 failed=0 skipped=0
# What became of part $1: its status $2, its seconds $3 (for --json).
note() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$work/parts"; }
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
# Runs the command in $3... for at most $1 seconds and for no more than is left of all; $2: its name. Status 124: too
# long; 125: not begun.
seconds=${TORCH_EXT_SECONDS:-570}
limited() {
  local left=$((seconds - SECONDS)) most=$1 name=$2 begin=$SECONDS
  shift 2
  [ "$left" -lt "$most" ] && most=$left
  [ "$most" -ge 5 ] || return 125
  timeout -k 5 "$most" "$@"
  local status=$?
  [ "$status" != 124 ] || say "$name was ended after $most s"
  note "$name" "$status" $((SECONDS - begin))
  return "$status"
}
# The same, and counts it.
part() {
  say "$2"
  limited "$@"
  local status=$?
  if [ "$status" = 125 ]; then skip "$2: no time is left"; else count "$status" "$2"; fi
}
# Counts, times and failures so far, where they are asked for.
write_report() { [ -z "$json" ] || "$python" "$root/tests/gpu_report.py" report "$json" "$work" "$passed" "$failed" "$skipped"; }
# Where the figures of $1 go, as arguments of the benchmark.
figures() { [ -z "$json" ] || printf -- '--json\n%s\n' "$(dirname "$json")/$1.json"; }

# -- the parts -----------------------------------------------------------------------------------------------------

# What C libraries print is not captured: it is the end of the output of a process that they end.
pytest=("$python" -m pytest -q -ra --capture=sys -p no:cacheprovider -c /dev/null --rootdir "$root/tests/gpu")
# The tests in the files $@, side by side.
test_files() {
  local file most=$((seconds - SECONDS)) processors status
  if wanted benchmark || wanted variants || wanted sanitizer; then
    [ "$most" -lt $((seconds * 2 / 5)) ] || most=$((seconds * 2 / 5))
  fi
  if [ "$most" -lt 5 ]; then
    for file in "$@"; do skip "$(basename "$file"): no time is left"; done
    return
  fi
  say "tests on the device, for at most $most s: $(basename -a "$@" | tr '\n' ' ')"
  processors=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
  "$python" "$root/tests/gpu_files.py" --folder "$work" --seconds "$most" --silence "${TORCH_EXT_TEST_SECONDS:-60}" \
    --processors "$processors" "$@" -- "${pytest[@]}"
  status=$?
  read -r passed failed skipped < <("$python" "$root/tests/gpu_report.py" counts "$work")
  [ "$status" = 0 ] || count "$status" "what runs the files of tests"
}

sanitize() {
  local tool sanitizer why
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$sanitizer" ]; then
    skip "compute-sanitizer: not installed"
    return
  fi
  # Installed where it works is not the same: under gVisor it refuses the device.
  why=$(limited 60 "a look at compute-sanitizer" "$sanitizer" "$python" -c 'import torch; torch.zeros(1, device="cuda").item()' 2>&1)
  if [[ "$why" == *"Device not supported"* ]]; then
    skip "compute-sanitizer: it says that the device is not supported here"
    return
  fi
  for tool in memcheck racecheck synccheck; do
    # Without torch's cache every tensor is an allocation of its own, and a step beyond one shows.
    part 180 "compute-sanitizer $tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" \
      --error-exitcode 9 "${pytest[@]}" -o faulthandler_timeout=100 "$root/tests/gpu/test_gpu_operators.py" -k "a_call_has_the_cpus_bits"
  done
}

timeout 120 "$python" -m torch_ext info || exit 1
why=$(timeout 120 "$python" -c '
import torch
print("" if torch.cuda.is_available() else "torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch finds none")') || die "torch does not say whether there is a GPU"
[ -z "$why" ] || say "no GPU ($why): everything is skipped"
[ -n "$why" ] || nvidia-smi -L 2>/dev/null

files=()
for file in "$root"/tests/gpu/test_*.py; do
  case $(basename "$file") in
  test_gpu_exchange.py) ! wanted exchange || files+=("$file") ;;
  *) ! wanted tests || files+=("$file") ;;
  esac
done
[ ${#files[@]} = 0 ] || test_files "${files[@]}"
write_report # so far
if [ -n "$why" ]; then
  ! wanted benchmark || skip "the benchmark: no GPU"
  ! wanted variants || skip "the variants: no GPU"
  ! wanted sanitizer || skip "compute-sanitizer: no GPU"
else
  ! wanted benchmark || { mapfile -t to < <(figures bench) && part 300 "the benchmark" "$python" "$root/tests/bench" --device cuda ${QUICK:+--quick} "${to[@]}"; }
  if wanted variants; then
    if ls "$built"/variants/*.so >/dev/null 2>&1; then
      mapfile -t to < <(figures variants)
      part 240 "the variants" "$python" "$root/tests/bench" --device cuda --variants "$built/variants" ${QUICK:+--quick} "${to[@]}"
    else
      skip "the variants: none in $built/variants"
    fi
  fi
  ! wanted sanitizer || sanitize
fi
write_report
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
