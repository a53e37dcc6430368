#!/usr/bin/env bash
# Faults at random moments (kill -9, SIGSTOP, exceptions, Ctrl-C, saves that are cut short, flipped bits, full disks, two
# jobs in one folder) and random training programs, for so many seconds; one line for each kind at the end. Exit status 0
# only where nothing hung, was silently wrong, or failed to say whose fault it was. Further arguments: --seed, --kinds,
# --replay (python tests/soak --help).
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
