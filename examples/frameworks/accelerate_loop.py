"""Accelerate: one line creates the optimizer, and `prepare` takes it like any other.

With several processes `prepare` wraps the model in DistributedDataParallel. One more line uses this library's exchange
inside it: gradients are sent in the policy's dtype, and summed in fp32 in the order of the ranks.

    python -m pip install -r tests/requirements.txt
    python examples/frameworks/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py
"""

import pathlib
import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[2])
)  # the repository's root; not needed when installed
import torch_ext

STEPS = 200


def train(accelerator: Accelerator, folder: str, resume: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1)).bfloat16()
    policy = torch_ext.load_policy(model)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=2e-3, policy=policy)  # was: torch.optim.AdamW(...)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if accelerator.num_processes > 1:
        torch_ext.register_comm_hook(model, policy)  # the model from `prepare` is in DDP
    if resume:
        accelerator.load_state(folder)
    for step in range(STEPS // 2 if resume else 0, STEPS):
        seed = step * accelerator.num_processes + accelerator.process_index
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x)[:, 0].float(), x.float().abs().sum(1))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step + 1 == STEPS // 2 and not resume:
            accelerator.save_state(folder)
        if step % 50 == 0:
            accelerator.print(f"step {step:3} loss {loss.item():.3f}")
    return model


def main() -> None:
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)  # else the schedule steps once per process
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # the folder of the main process
        whole = train(accelerator, folder, resume=False)
        accelerator.free_memory()
        accelerator.wait_for_everyone()
        resumed = train(accelerator, folder, resume=True)
        accelerator.wait_for_everyone()
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), "a resumed run no longer has the bits of the other"


if __name__ == "__main__":
    main()
