"""Models of all kinds, trained in parallel under every strategy, must train as one rank that sees every rank's batch.

Each case also trains a copy without parallelize, on the batches of all ranks. With fp32 gradients and wire, weights
must have the same bits under every strategy and on every rank.
"""

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import strategies
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from gradients import BF16, FP32, bits, gradient, on_all_ranks
from strategies import STRATEGIES

import torch_ext


def _input(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * step + rank), requires_grad=True)


class Tied(torch.nn.Module):
    """Has tied weights, a frozen parameter, buffers, a layer that is used twice, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 40), torch.nn.Linear(40, 8, bias=False)
        self.last.weight = torch.nn.Parameter(torch.randn(8, 40))
        self.embed = torch.nn.Linear(40, 8, bias=False)
        self.embed.weight = self.last.weight
        self.norm, self.twice = torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 40)
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.twice(self.twice(self.first(x)).tanh()))
        return self.last(hidden) * self.scale + self.embed(hidden.square()) + self.nothing.sum()


class Segments(torch.nn.Module):
    """Has most layers in activation checkpoints; with reentrant ones their gradients come in nested backwards."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i == 1:
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return x


def _stack() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 8))


def _with_compiled() -> torch.nn.Module:
    model: Any = _stack()
    model[2] = torch.compile(model[2], backend="aot_eager")
    return model


def _square(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    return model(x).square().sum()


def _penalty(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """Returns a loss with a gradient penalty: a gradient to the input is computed inside, and differentiated again."""
    out = model(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return out + grad.square().sum()


def _twice(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    return (model(x).square() * model(2 * x)).sum()


def _parts(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """Returns a loss that leaves out the last layer in odd steps."""
    hidden = model[1](model[0](x))
    return (model[3](model[2](hidden)) if step % 2 == 0 else model[2](hidden)).square().sum()


def _freeze(model: Any, step: int) -> None:
    """Freezes a layer and thaws it two steps later; a bias in the middle of a bucket is frozen for one step."""
    model[2].requires_grad_(step not in (1, 2))
    model[0].bias.requires_grad_(step != 2)


def _write(model: Any, step: int) -> None:
    """Writes to weights as weight averaging, pruning or loading a checkpoint do."""
    with torch.no_grad():
        if step == 1:
            model[2].weight.mul_(0.5)
        if step == 2:
            model.load_state_dict({key: value.clone() * 1.5 for key, value in model.state_dict().items()})
        if step == 3:
            model[0].weight[3:5] = 0.25


def _evaluate(model: Any, step: int) -> None:
    """Uses the model between two steps: in evaluation, without a backward, and for a gradient of an input."""
    model.eval()
    with torch.no_grad():
        model(_input(step, 0))
    model.train()
    (model(_input(step, 0)).sum() * 0).detach()  # a graph without a backward
    torch.autograd.grad(model(x := _input(step, 1)).sum(), x)


def _nothing(model: Any, step: int) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """How a model is built and trained."""

    make: Callable[[], torch.nn.Module]
    loss: Callable[[Any, torch.Tensor, int], torch.Tensor] = _square
    before: Callable[[Any, int], None] = _nothing  # each step
    microbatches: int = 1
    unused: bool = False
    dtype: torch.dtype = FP32
    tolerance: float = 1e-5


CASES = {
    "tied, frozen, buffers, twice": Case(Tied),
    "tied, accumulated": Case(Tied, microbatches=3),
    "checkpoints": Case(lambda: Segments(False)),
    "reentrant checkpoints": Case(lambda: Segments(True)),
    "reentrant checkpoints, accumulated": Case(lambda: Segments(True), microbatches=2),
    "the model used twice": Case(_stack, _twice),
    "a compiled module inside": Case(_with_compiled),
    "a gradient penalty": Case(_stack, _penalty),
    "parts of the model": Case(_stack, _parts, unused=True, microbatches=2),
    "frozen and thawed": Case(_stack, before=_freeze),
    "frozen and thawed, accumulated": Case(_stack, before=_freeze, microbatches=2),
    "evaluated between": Case(_stack, before=_evaluate),
    "weights written": Case(_stack, before=_write),
    "weights written beside masters": Case(_stack, before=_write, dtype=BF16, tolerance=0.1),
}


def _trained(rank: int, world: int, strategy: str, case: Case) -> list[bytes]:
    """Trains the model and its copy, compares them after each step, and returns the weights."""
    torch.manual_seed(3)
    model: Any = case.make().to(case.dtype)
    plain = copy.deepcopy(model)
    chosen = torch_ext.load_policy(
        case.dtype,
        override_optimizer_config={"main_grads_dtype": FP32},
        override_ddp_config={"grad_comm_dtype": FP32, "bucket_size": 400, "overlap_grad_reduce": True},
    )
    torch_ext.parallelize(model, chosen, strategy=strategy, find_unused_parameters=case.unused)
    names = [name for name, _ in plain.named_parameters()]
    optimizers = []
    for each in (model, plain):
        params = [p for _, p in each.named_parameters()]
        groups = [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.1}]
        optimizers.append(torch_ext.AdamW(groups, lr=0.01, policy=chosen))
    for step in range(5):
        for each in (model, plain):
            case.before(each, step)
        for microbatch in range(case.microbatches):
            with model.sync() if microbatch == case.microbatches - 1 else model.no_sync():
                case.loss(model, _input(step + 10 * microbatch, rank).to(case.dtype), step).backward()
            for r in range(world):
                (case.loss(plain, _input(step + 10 * microbatch, r).to(case.dtype), step) / world).backward()
        norms = [float(torch_ext.clip_grad_norm_(optimizer, 10.0)) for optimizer in optimizers]
        assert norms[0] == pytest.approx(norms[1], rel=max(1e-4, case.tolerance))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p, q in zip(names, model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=case.tolerance, atol=case.tolerance), f"{name} after step {step}"
    all_ranks = on_all_ranks(bits(list(model.parameters())))
    assert all(each == all_ranks[0] for each in all_ranks), "the same weights on every rank"
    assert all_ranks[0] != bits(list(case.make().to(case.dtype).parameters()))
    return all_ranks[0]


def _all_trained(rank: int, world: int, strategy: str) -> dict[str, Any]:
    """Returns by case the weights, or the traceback of what was raised."""
    answers: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            answers[name] = _trained(rank, world, strategy, case)
        except Exception:
            answers[name] = traceback.format_exc()
        dist.barrier()
    return answers


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, Any]]]:
    return strategies.run(2, _all_trained, limit=120.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_as_if_one_rank_had_seen_every_batch(case: str, strategy: str, trained: Any) -> None:
    # optim_grads reduces every backward, so it sums over the ranks first and over the micro-batches then.
    like = strategy if strategy == "optim_grads" and CASES[case].microbatches > 1 else "no_shard"
    for answer in trained[strategy]:
        assert isinstance(answer[case], list), answer[case]
        assert answer[case] == trained[like][0][case], f"the same bits as under {like}"


# -- torch.compile ------------------------------------------------------------------------------------------------


def _compiled(rank: int, world: int, strategy: str) -> None:
    """Parallelizes the compiled model, or compiles the parallelized one: both must train the same weights."""
    chosen = torch_ext.load_policy(FP32)
    for before in (True, False):
        torch.manual_seed(1)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        parallel = torch_ext.parallelize(compiled if before else model, chosen, strategy=strategy)
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
        weight = model[1].bias.detach().clone()
        for _ in range(2):
            compiled(torch.full((2, 4), 1.0 + rank)).sum().backward()
            found = gradient(parallel, model[1].bias)
            assert found is not None and found.tolist() == [2.0] * found.numel()
            optimizer.step()
            parallel.zero_grad()
        assert torch.allclose(model[1].bias, weight * (1 - 1e-3) ** 2 - 0.2, atol=1e-3)
        all_ranks = on_all_ranks([p.tolist() for p in model.parameters()])
        assert all_ranks[0] == all_ranks[1]


def test_torch_compile() -> None:
    strategies.run(2, _compiled, limit=60.0)
