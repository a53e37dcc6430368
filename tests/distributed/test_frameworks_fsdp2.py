"""A training loop as in torchtitan, on gloo ranks: FSDP2 per block, mixed precision, torch's clipping, checkpoints
through DCP, also with compiled blocks. A resumed run must go on bit for bit."""

import functools
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradients import bits
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_ext

WORLD, STEPS, HALF, MAX_NORM = 2, 6, 3, 0.05
BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.head = (
            nn.Linear(8, 16),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(16, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# By name: the weights' dtype, the blocks' compute dtype, whether our exchange is used, whether blocks are compiled.
CASES = {
    "fp32 shards, bf16 blocks": (FP32, BF16, False, False),
    "fp32 shards, bf16 blocks, parallelize": (FP32, BF16, True, False),
    "bf16": (BF16, None, False, False),
    "bf16, parallelize": (BF16, None, True, False),
    "bf16, compiled blocks": (BF16, None, False, True),
    "bf16, compiled blocks, parallelize": (BF16, None, True, True),
}


def _build(case: str) -> tuple[Any, Any, Any]:
    """Returns model, optimizer and learning rate schedule of a case."""
    dtype, compute, ours, compiled = CASES[case]
    model = Net().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=FP32) if compute else MixedPrecisionPolicy()
    for layer in model.layers:
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    policy = torch_ext.load_policy(model)
    if ours:
        torch_ext.parallelize(model, policy, strategy="optim_grads_params")
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))


def _titans_clip(params: list[Any]) -> torch.Tensor:
    """Clips as torchtitan does, and returns the norm."""
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=True)
    norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(params, MAX_NORM, norm, foreach=True)
    return norm


def _torchs_clip(params: list[Any]) -> torch.Tensor:
    norm: Any = torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _train(made: Any, steps: range, clip: str) -> list[float]:
    """Trains these steps and returns the norms. clip: a key of CLIPS."""
    model, optimizer, schedule = made
    norms = []
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank()))
        loss = (model(x.to(model.head.weight.dtype))[:, 0].float() - x.abs().sum(1)).square().mean()
        loss.backward()
        params = list(model.parameters())
        if clip == "ours":
            norms.append(float(torch_ext.clip_grad_norm_(optimizer, MAX_NORM)))
        else:
            norms.append(float(_titans_clip(params) if clip == "torchtitan's" else _torchs_clip(params)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


class Optimizers:
    """torchtitan's OptimizersContainer as DCP sees it: flat names, so that any other parallelism can load them."""

    def __init__(self, made: Any) -> None:
        self.model, self.optimizer, _ = made
        self.options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return dcp_state.get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dcp_state.set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


class Model:
    """torchtitan's ModelWrapper as DCP sees it."""

    def __init__(self, made: Any) -> None:
        self.model = made[0]
        self.state_dict = functools.partial(dcp_state.get_model_state_dict, self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dcp_state.set_model_state_dict(self.model, state_dict)


def _parts(made: Any) -> dict[str, Any]:
    return {"model": Model(made), "optimizer": Optimizers(made), "schedule": made[2]}


def _everything(made: Any) -> list[bytes]:
    """Returns the bits of this rank's weights and optimizer state."""
    model, optimizer, _ = made
    return bits([t for p in model.parameters() for t in (p.to_local(), *optimizer.state[p].values())])


def _resumes(rank: int, world: int, cases: list[str], clip: str, folder: str) -> list[Any]:
    """Saves halfway, trains on, and resumes another model from the save. Returns for each case what both reached."""
    answers = []
    for i, case in enumerate(cases):
        whole = _build(case)
        norms = _train(whole, range(HALF), clip)
        dcp.save(_parts(whole), checkpoint_id=f"{folder}/{i}")
        norms += _train(whole, range(HALF, STEPS), clip)
        resumed = _build(case)
        dcp.load(_parts(resumed), checkpoint_id=f"{folder}/{i}")
        later = _train(resumed, range(HALF, STEPS), clip)
        step = next(iter(resumed[1].state.values()))["step"]
        answers.append((norms, later == norms[HALF:], float(step), _everything(whole) == _everything(resumed)))
    return answers


# By who clips: the cases, each at least once, and torch's two ways of clipping also with compiled blocks.
CLIPS = {
    "torch's": [case for case in CASES if case != "bf16, compiled blocks"],
    "torchtitan's": ["fp32 shards, bf16 blocks", "bf16, compiled blocks"],
    "ours": ["fp32 shards, bf16 blocks, parallelize", "bf16"],
}


@pytest.mark.parametrize("clip", CLIPS)
def test_D4_fsdp2_loop_resumes_bit_for_bit(tmp_path: Any, clip: str) -> None:
    first, second = ranks.run(WORLD, _resumes, CLIPS[clip], clip, str(tmp_path))
    assert first == second, "every rank has the same norms and counters"
    for case, (norms, same_norms, step, equal) in zip(CLIPS[clip], first, strict=True):
        assert min(norms) > MAX_NORM, "every step is clipped"
        assert step == STEPS, case
        assert same_norms and equal, case
