#!/usr/bin/env bash
# Sets the machine up, runs every test, and ends with the line "N passed, N failed, N skipped". Exit status 0 only where
# something ran and nothing failed.
#
#     bash tests/run.sh
set -euo pipefail
cd "$(dirname "$0")/.."
more_requirements=(tests/requirements.txt) # frameworks, documentation
more_programs=(clang)                      # the C sources are for gcc and clang
. bazel/setup.sh

logs=$(mktemp -d "${TMPDIR:-/tmp}/torch_ext.XXXXXX")
trap 'rm -rf "$logs"' EXIT

# Runs `bazel test` in folder $1 and leaves, for the tally, what happened in $logs/$2.json and the exit status in
# $logs/$2.status.
run_tests() {
  local folder=$1 name=$2 status=0
  shift 2
  (cd "$folder" && quiet_bazel test --keep_going --build_event_json_file="$logs/$name.json" "$@") || status=$?
  echo "$status" >"$logs/$name.status"
}

bazel query @cuda_toolkit//:nvcc >/dev/null 2>&1 || say "CUDA targets skipped: nvcc not found."
say "building and testing; the first time takes minutes"
run_tests . tests //...
say "the tests of C and CUDA sources again, under the address and undefined-behaviour sanitizers"
run_tests . sanitizers --config=asan //tests/core/... //tests/cuda/...
say "the C example again, from a workspace that depends on @torch_ext"
# It compiles the library anew, and the loops, four times over, are most of that: here it is linking that counts.
run_tests examples/c consumer --per_file_copt=/kernels_isa@-O1 //...
(cd examples/c && bazel shutdown)
"$TORCH_EXT_PYTHON" tests/tally.py "$logs"
