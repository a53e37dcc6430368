#!/usr/bin/env bash
# The main job: sets the machine up, builds the library, trains a byte-level GPT in bf16 with torch_ext and beside it with
# torch's own DDP and AdamW, in fp32 and in bf16; ends with a table and a picture.
#
#     bash examples/run.sh            # a few minutes on two cores
#     bash examples/run.sh --quick    # a tiny model: every path, under a minute
#
# From the environment: OUT_DIR (out), TORCH_EXT_PYTHON (an interpreter that has torch, tqdm and matplotlib: nothing is
# installed then), OMP_NUM_THREADS (the cores shared out among the processes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=()
case "${1:-}" in
  '') ;;
  --quick) quick=(--quick) ;;
  *)
    echo "usage: bash examples/run.sh [--quick]" >&2
    exit 2
    ;;
esac

. bazel/setup.sh
quiet_bazel build //:torch_ext || die "the build failed; the lines above say why."

processes=2
out=${OUT_DIR:-out}
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Both processes are on this machine: nothing has to resolve its name or leave it.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
mkdir -p "$out" || die "can't write to $out; set OUT_DIR."
rm -f "$out"/*.jsonl

train() {
  "$TORCH_EXT_PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" \
    examples/gpt/train.py --out "$out" ${quick[@]+"${quick[@]}"} "$@"
}

say "training: $processes processes, $OMP_NUM_THREADS thread(s) each; logs and checkpoints in $out"
train ours:0 --until middle
# New processes: ours goes on from its checkpoint, then come torch's recipes.
train --resume ours:0 torch-fp32:0 torch-fp32:1 torch-bf16:0
"$TORCH_EXT_PYTHON" examples/gpt/report.py "$out"
