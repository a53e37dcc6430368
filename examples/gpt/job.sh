# The main job itself, once the library is built: three commands. Called by examples/run.sh and by the test of the
# examples, from anywhere.
#
#     TORCH_EXT_PYTHON=python3 bash examples/gpt/job.sh [--quick]
#
# From the environment: OUT_DIR (out), OMP_NUM_THREADS (the cores, shared out among the processes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${TORCH_EXT_PYTHON:-python3}
out=${OUT_DIR:-out}
processes=2
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Both processes are on this machine: nothing has to resolve its name, and nothing leaves it.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

train() {
  "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" \
    examples/gpt/train.py --out "$out" "$@"
}

mkdir -p "$out"
rm -f "$out"/ours-?.* "$out"/torch-*-?.*
train "$@" ours:0 --until middle
# New processes: ours goes on from its checkpoint, then come torch's recipes.
train "$@" --resume ours:0 torch-fp32:0 torch-fp32:1 torch-bf16:0
"$python" examples/gpt/report.py "$out"
