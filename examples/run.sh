#!/usr/bin/env bash
# The main job from a fresh clone. Sets the machine up, builds the library, and trains a small byte-level GPT with torch's
# AdamW in fp32 and in bf16 and with torch_ext's in three configurations: from random weights in two processes, and
# fine-tuned from a checkpoint at a low learning rate. Prints two tables and draws a picture; examples/gpt/RESULTS.md has
# those of one run.
#
#     bash examples/run.sh            # at most 20 minutes of processor time: about 10 minutes on two free cores
#     bash examples/run.sh --quick    # a tiny model, every path: under a minute once it is built
#
# Environment: OUT_DIR (default: out; for logs, checkpoints, table.md, results.json, gpt.png), TORCH_EXT_PYTHON (an
# interpreter that has torch, tqdm and matplotlib: nothing is installed then), OMP_NUM_THREADS (threads of each of the
# two processes that train together; default: half the cores).
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
