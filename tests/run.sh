#!/usr/bin/env bash
# Sets the machine up, runs every test, and ends with the line "N passed, N failed, N skipped". The exit status is 0
# only if something ran and nothing failed.
#
#     bash tests/run.sh
set -euo pipefail
cd "$(dirname "$0")/.."
more_requirements=(tests/requirements.txt) # frameworks, documentation
more_programs=(clang)                      # the C sources are compiled with gcc and with clang
fuzzer='/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a'
# libFuzzer; the cross compiler for aarch64, and the emulator that runs its tests
wished_packages=("$fuzzer=libclang-rt-dev" aarch64-linux-gnu-g++=g++-aarch64-linux-gnu aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu qemu-aarch64=qemu-user)
. bazel/setup.sh

logs=$(mktemp -d "${TMPDIR:-/tmp}/torch_ext.XXXXXX")
trap 'rm -rf "$logs"' EXIT

# Runs `bazel test $3...` in folder $1. Writes for the tally Bazel's events to $logs/$2.json and its exit status to
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
say "the tests of C and CUDA sources again, and some under torch, under the address and undefined-behaviour sanitizers"
run_tests . sanitizers --config=asan //tests/core/... //tests/cuda/... //tests/torch:sanitized
say "several callers and threads, under the thread sanitizer"
run_tests . threads --config=tsan //tests/core:threads
if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then
  say "the arithmetic again for aarch64, in an emulator, and its wheel"
  run_tests . aarch64 --config=aarch64 //tests/core:portable //tests/package:test_release
else
  say "aarch64 SKIPPED: its compiler (g++-aarch64-linux-gnu) or emulator (qemu-user) is not installed"
  echo "no aarch64-linux-gnu-g++ or no qemu-aarch64: nothing was built or run for aarch64" >"$logs/aarch64.skipped"
fi
say "the C example again, from a workspace that depends on @torch_ext"
# The library is compiled again there. Its loops, compiled four times, take most of the time. The test is about
# linking, so -Og is enough for them.
run_tests examples/c consumer --per_file_copt=kernels_isa@-Og //...
(cd examples/c && bazel shutdown)
"$TORCH_EXT_PYTHON" tests/tally.py "$logs"
