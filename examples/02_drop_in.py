"""An ordinary PyTorch loop with one line changed: the one that creates the optimizer. Begin here.

The model is bf16, so torch_ext.AdamW keeps fp32 master weights and bf16 moments for it. The schedule, torch's own
clip_grad_norm_ and the checkpoint stay as they are, and the checkpoint loads into torch.optim.AdamW.

    python examples/02_drop_in.py
"""

import pathlib
import sys

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
import torch_ext

STEPS, LR = 300, 5e-4


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(128, 1)).bfloat16()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Runs the loop, which does not use torch_ext; returns the loss on new data."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in tqdm(range(STEPS + 1), type(optimizer).__module__):
        x = torch.randn(128, 16, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x.bfloat16())[:, 0].float(), x.abs().sum(1))
        if step == STEPS:
            return loss.item()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    raise AssertionError("not reached")


def main() -> None:
    model = network()
    before = train(model, torch.optim.AdamW(model.parameters(), lr=LR))

    model = network()
    optimizer = torch_ext.AdamW(model.parameters(), lr=LR)  # was: torch.optim.AdamW(model.parameters(), lr=LR)
    after = train(model, optimizer)

    print("Loss of the bf16 network on fresh data:")
    print(f"  torch.optim.AdamW  {before:.3f}")
    print(f"  torch_ext.AdamW    {after:.3f}")
    assert after < before, "fp32 masters no longer help a bf16 model"

    torch.optim.AdamW(model.parameters(), lr=LR).load_state_dict(optimizer.state_dict())  # and back


if __name__ == "__main__":
    main()
