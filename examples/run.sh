#!/usr/bin/env bash
# The main job from a fresh clone: sets the machine up, builds the library, trains a byte-level GPT in bf16 with torch_ext,
# and beside it with torch's own DDP and AdamW in fp32 and in bf16. Ends with a table and a picture.
#
#     bash examples/run.sh            # a few minutes on two cores
#     bash examples/run.sh --quick    # a tiny model, every path: under a minute once it is built
#
# From the environment: OUT_DIR (out: logs, checkpoints, table.md, gpt.png), TORCH_EXT_PYTHON (an interpreter that has
# torch, tqdm and matplotlib: nothing is installed then), OMP_NUM_THREADS (the cores, shared out among the processes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "$*" in
  '' | --quick) ;;
  *)
    echo "usage: bash examples/run.sh [--quick]" >&2
    exit 2
    ;;
esac

. bazel/setup.sh
quiet_bazel build //:torch_ext || die "the build failed; the lines above say why."
bash examples/gpt/job.sh "$@"
