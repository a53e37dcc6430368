# The main job itself, once the library is built. Called by examples/run.sh and by the test of the examples, from anywhere.
#
#     TORCH_EXT_PYTHON=python3 bash examples/gpt/job.sh [--quick]
#
# Environment: OUT_DIR (default: out), OMP_NUM_THREADS (threads of each of the two processes; default: half the cores).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${TORCH_EXT_PYTHON:-python3}
out=${OUT_DIR:-out}
processes=2
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Both processes are on this machine: the loopback needs no name resolution, and nothing leaves the machine.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

title() { printf '\n== %s\n' "$*"; }

train() {
  "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" \
    examples/gpt/train.py --out "$out" "$@"
}

job() {
  local seed configuration scratch=()
  for configuration in torch-fp32 torch-bf16 bf16 bf16_remainder 8bit; do
    for seed in 0 1 2; do
      [ "$configuration:$seed" = 8bit:0 ] || scratch+=("scratch/$configuration:$seed")
    done
  done
  title "1 of 4: a GPT learns Python code, fp32, two processes: the checkpoint for step 3. Then half a run of step 2."
  train "$@" pretrain/torch-fp32:3 --half scratch/8bit:0
  title "2 of 4: from random weights, two processes: five configurations of AdamW, three seeds each; 8bit resumes."
  train "$@" --resume scratch/8bit:0 "${scratch[@]}"
  title "3 of 4: fine-tuning of the checkpoint on documentation at a low learning rate: the same configurations and seeds."
  "$python" examples/gpt/finetune.py --out "$out" "$@"
  title "4 of 4: results."
  "$python" examples/gpt/report.py "$out"
}

mkdir -p "$out"
rm -f "$out"/{pretrain,scratch,finetune}/*.{jsonl,pt} "$out"/pretrained.pt
TIMEFORMAT='Processor time: %U s and %S s in the system; %R s on the clock.'
time job "$@"
