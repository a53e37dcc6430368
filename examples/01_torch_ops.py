"""A training loop with torch.ops.torch_ext.* alone, for optimizers and engines of your own.

If torch_ext.AdamW is enough for you, see 02_drop_in.py instead. Here a bf16 network learns a function with AdamW. Each
parameter has an fp32 master weight, bf16 moments and a step counter. The norm of the gradients is computed, and the
step clips them without a separate pass that scales them. For comparison the same steps run with torch.optim.AdamW, on
the fp32 network and on the bf16 network.

    python examples/01_torch_ops.py
"""

import math
import pathlib
import sys

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
from torch_ext import library_path

torch.ops.load_library(library_path())  # registers torch.ops.torch_ext
ops = torch.ops.torch_ext

STEPS, LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 400, 3e-4, (0.9, 0.999), 1e-8, 0.01, 1.0
NONE = torch.empty(0)  # leaves an argument out: operators take no None


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss on a new batch per step: points in eight dimensions, and the sum of the sines of their coordinates."""
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(step))
    y = x.sin().sum(1)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype))[:, 0].float(), y)


def with_operators(model: nn.Module) -> None:
    params = [p.detach() for p in model.parameters()]  # share the parameters' memory, without autograd
    exp_avgs = [torch.zeros_like(p) for p in params]  # bf16, like the weights
    exp_avg_sqs = [torch.zeros_like(p) for p in params]
    masters = [p.float() for p in params]
    steps = [torch.zeros(1) for _ in params]  # completed steps, counted by the operator
    # One row per group of parameters: lr, beta1, beta2, eps, weight_decay, maximize, decoupled (1: AdamW, 0: Adam).
    groups = torch.tensor([[LR, *BETAS, EPS, WEIGHT_DECAY, 0, 1]], dtype=torch.float64)
    norm, clip_coef, found_inf = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    skipped = torch.zeros(1, dtype=torch.int64)

    for step in tqdm(range(STEPS), "torch.ops.torch_ext"):
        model.zero_grad()
        loss_of(model, step).backward()
        grads = [p.grad for p in model.parameters()]

        # One pass over the gradients: an exact sum of squares in integers, and the number of elements not finite.
        stats = torch.zeros(21, dtype=torch.int64)
        ops.grad_stats_(grads, stats, NONE)
        ops.grad_norm_(stats, NONE, MAX_NORM, norm, clip_coef, found_inf)

        # One pass does the step: it clips, computes in fp32, rounds the moments with dither and the weight to nearest.
        # If a gradient is not finite it writes nothing and adds 1 to `skipped`.
        ops.adamw_(
            params, grads, exp_avgs, exp_avg_sqs, masters,
            [], steps, [], groups, NONE,  # no scales of 8-bit states, no tensor lr, no shards
            NONE, clip_coef, found_inf, skipped,  # no loss scale
        )  # fmt: skip

    assert int(skipped) == 0
    # This always holds: a weight is its master weight, rounded to nearest.
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(params, masters, strict=True))


def with_torch(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, WEIGHT_DECAY)
    for step in tqdm(range(STEPS), "torch.optim.AdamW"):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def main() -> None:
    results = {}
    for name, dtype, train in [
        ("torch.optim.AdamW, fp32", torch.float32, with_torch),
        ("torch.ops.torch_ext, bf16", torch.bfloat16, with_operators),
        ("torch.optim.AdamW, bf16", torch.bfloat16, with_torch),
    ]:
        model = network(dtype)
        train(model)
        with torch.no_grad():
            results[name] = sum(loss_of(model, 10**6 + i).item() for i in range(20)) / 20
        print(f"{name:<26} loss on fresh data {results[name]:.4f}")
    fp32, ours, bf16 = results.values()
    assert math.isfinite(ours) and ours - fp32 < 0.25 * (bf16 - fp32), "bf16 with masters no longer follows fp32"


if __name__ == "__main__":
    main()
