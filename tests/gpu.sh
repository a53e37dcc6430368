#!/usr/bin/env bash
# Tests on a machine with a GPU: compares the operators, training, graphs and the exchange on the device with the CPU,
# bit for bit; runs the benchmark, the library's build variants, and compute-sanitizer if it works. Ends with the line
# "N passed, N failed, N skipped"; the exit status is 0 if nothing failed. Without a GPU it says so, and all is
# counted as skipped.
#
#     bash tests/gpu.sh --pack FOLDER     where it is built: copies the libraries to FOLDER, and tells git to ignore it
#     bash tests/gpu.sh [PART...] [FOLDER]     with the GPU, in a copy of the tree: builds nothing, downloads nothing
#
# PARTs are --tests, --exchange, --benchmark, --variants and --sanitizer; without one, all of them. Test files run
# side by side (gpu_files.py). A test that crashes, hangs for $TORCH_EXT_TEST_SECONDS (default 60) or leaves the
# device unusable is counted as failed, and the tests after it run in a new process. The other parts run one after the
# other, each with a time limit. Everything ends within $TORCH_EXT_SECONDS (default 570); if other parts follow, the
# tests end within two fifths of that. What there is no time for is counted as skipped. docs/gpu_first_run.md is a
# plan for the first 15 minutes.
#
# FOLDER (default bazel-bin) has libtorch_ext.so, libtorch_ext_cuda.so (there or in its folder cuda), and maybe the
# folders variants, and peers: Python packages of optimizers that the benchmark compares with. Python (python3, or
# $TORCH_EXT_PYTHON) has torch and pytest. QUICK=1: small benchmarks. TORCH_EXT_ROWS: the rows of the benchmark, all
# unless this is set. --json FILE: writes counts, times and failures (default: $OUT/gpu.json if $OUT is set), and the
# benchmarks' figures to the same folder.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
say() { printf 'torch_ext: %s\n' "$*"; }
die() {
  say "$*" >&2
  exit 1
}

# -- arguments -----------------------------------------------------------------------------------------------------

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

# Copies the file $1 to $2. Follows links: a link would end at this checkout.
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
  [ "$size" -le 40 ] || die "$pack has $size MB; at most 40 are legal"
  # A folder inside the checkout must not be committed, so git ignores it; it is copied only where it is named.
  if inside=$(git -C "$pack" rev-parse --show-toplevel 2>/dev/null) && ! git -C "$pack" check-ignore -q .; then
    exclude=$(git -C "$inside" rev-parse --path-format=absolute --git-path info/exclude)
    mkdir -p "$(dirname "$exclude")"
    echo "/$(realpath --relative-to="$inside" "$pack")/" >>"$exclude"
  fi
  say "$pack has $size MB: $(cd "$pack" && find . -name '*.so' | sort | tr '\n' ' ')"
  exit 0
fi

# -- a folder with the package and the libraries, and nothing else of the checkout on PYTHONPATH --------------------

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
[ ! -d "$built/peers" ] || PYTHONPATH=$PYTHONPATH:$built/peers
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # a failure then has its reason in the output
unset PYTEST_ADDOPTS
ulimit -c 0 # no core files: a process on a GPU has much memory
cd "$work/path" || exit 1 # python -m searches the current folder first

# -- counting ------------------------------------------------------------------------------------------------------

passed=0 failed=0 skipped=0
# Notes for --json that part $1 ended with status $2 after $3 seconds.
note() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$work/parts"; }
# Counts one part as passed or failed: $1 is its exit status, $2 its name.
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
# Runs the command $3... for at most $1 seconds, and at most for the time that is left; $2: its name. Status 124: it
# took too long; 125: it was not started.
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
# Runs a command as `limited` does, and counts it.
part() {
  say "$2"
  limited "$@"
  local status=$?
  if [ "$status" = 125 ]; then skip "$2: no time is left"; else count "$status" "$2"; fi
}
# Writes counts, times and failures so far to the file of --json, if there is one.
write_report() { [ -z "$json" ] || "$python" "$root/tests/gpu_report.py" report "$json" "$work" "$passed" "$failed" "$skipped"; }
# Prints the benchmark's arguments that write the figures of $1, if --json was given.
figures() { [ -z "$json" ] || printf -- '--json\n%s\n' "$(dirname "$json")/$1.json"; }

# -- the parts -----------------------------------------------------------------------------------------------------

# Output of C libraries is not captured: if they abort the process, it is the end of the process' output.
pytest=("$python" -m pytest -q -ra --capture=sys -p no:cacheprovider -c /dev/null --rootdir "$root/tests/gpu")
# Runs the tests in the files $@, side by side.
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
    --processors "$processors" ${json:+--json "$json"} "$@" -- "${pytest[@]}"
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
  # It may be installed and not work: under gVisor it rejects the device.
  why=$(limited 60 "a look at compute-sanitizer" "$sanitizer" "$python" -c 'import torch; torch.zeros(1, device="cuda").item()' 2>&1)
  if [[ "$why" == *"Device not supported"* ]]; then
    skip "compute-sanitizer: it says that the device is not supported here"
    return
  fi
  for tool in memcheck racecheck synccheck; do
    # Without torch's cache every tensor is a separate allocation, so an access beyond a tensor is found.
    part 180 "compute-sanitizer $tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" \
      --error-exitcode 9 "${pytest[@]}" -o faulthandler_timeout=100 "$root/tests/gpu/test_gpu_operators.py" -k "a_call_has_the_cpus_bits"
  done
}

# On a new machine torch is read from a cold disk.
timeout 200 "$python" -m torch_ext info || die "python -m torch_ext info ended with status $? (124: after 200 s)"
why=$(timeout 200 "$python" -c '
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
  ! wanted benchmark || { mapfile -t to < <(figures bench) && part 300 "the benchmark" "$python" "$root/tests/bench" --device cuda ${TORCH_EXT_ROWS:+--rows $TORCH_EXT_ROWS} ${QUICK:+--quick} "${to[@]}"; }
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
