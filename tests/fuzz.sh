#!/usr/bin/env bash
# Runs the fuzzers of C functions that take bytes or numbers from outside, under clang's libFuzzer and sanitizers, for
# the given number of seconds in all. Ends with one line for each target; the exit status is 1 if something was found.
# Further arguments: --targets, --seed, --keep, --mutants (python tests/fuzz --help).
#
#     bash tests/fuzz.sh 600
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: bash tests/fuzz.sh SECONDS [--targets TARGET ...] [--seed S] [--keep | --mutants]}
shift
more_requirements=() more_programs=(clang)
fuzzer='/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a'
wished_packages=("$fuzzer=libclang-rt-dev")
. bazel/setup.sh
exec "$TORCH_EXT_PYTHON" tests/fuzz "$seconds" "$@"
