#!/usr/bin/env bash
# For the given number of seconds: faults at random moments (kill -9, SIGSTOP, exceptions, Ctrl-C, saves that are cut
# short, flipped bits, full disks, two jobs in one folder) and random training programs. Ends with one line for each
# kind. The exit status is 0 only if nothing hung or was silently wrong, and each error named its cause. Further
# arguments: --seed, --kinds, --replay (python tests/soak --help).
#
#     bash tests/soak.sh 600
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: bash tests/soak.sh SECONDS [--seed S] [--kinds KIND ...]}
shift
more_requirements=() more_programs=()
. bazel/setup.sh
quiet_bazel build //:torch_ext
exec nice -n 10 "$TORCH_EXT_PYTHON" tests/soak --seconds "$seconds" "$@"
