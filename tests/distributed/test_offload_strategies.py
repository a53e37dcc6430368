"""B4 under every strategy: training has the same bits if everything is offloaded and brought back between its steps."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, bits, policy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from units import RECOVERS

import torch_ext
from torch_ext.optim.state import access
from torch_ext.params import local_shard, reducer_registry

OURS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SETUPS = ("none", *OURS, "fsdp alone", "ddp", "ddp, gradients are views")
DTYPES = {"bf16": (BF16, BF16, BF16), "bf16, gradients fp32": (BF16, FP32, BF16), "fp32": (FP32, FP32, FP32)}


class Net(torch.nn.Module):
    """Has frozen weights, a buffer, tied weights and odd sizes, so that shards are uneven and some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 9)
        self.frozen = torch.nn.Linear(9, 9).requires_grad_(False)
        self.block = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.GELU(), torch.nn.Linear(33, 9))
        self.head = torch.nn.Linear(9, 11, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((11,), 0.125))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        x = x + self.block(self.frozen(x))
        return self.head(x) + self.shift  # type: ignore[no-any-return]


def made(setup: str, dtypes: Any, fraction: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """Returns the model in a setup of SETUPS and its optimizer. fraction: offload_fraction; options: of the policy."""
    torch.manual_seed(7)
    model: Any = Net().to(dtypes[0])
    chosen = policy(*dtypes, bucket_size=200, **options)
    if setup in OURS:
        torch_ext.parallelize(model, chosen, strategy=setup)
    elif setup == "fsdp alone":
        fully_shard(model.block)
        fully_shard(model)
    elif setup.startswith("ddp"):
        model = DistributedDataParallel(model, gradient_as_bucket_view="views" in setup)
        torch_ext.register_comm_hook(model, chosen)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model, torch_ext.AdamW(trainable, lr=1e-2, policy=chosen, offload_fraction=fraction)


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    logits = model(tokens).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), (tokens * 3 + 1).remainder(11).flatten())


def one_step(model: Any, optimizer: Any, step: int, rank: int) -> None:
    """Takes a step with two micro-batches and a clip. The gradients stay."""
    optimizer.zero_grad()
    for microbatch in range(2):
        last = microbatch == 1
        with model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext():
            loss_of(model, 2 * step + microbatch, rank).backward()
    torch_ext.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()


def on_device(model: Any, optimizer: Any) -> dict[str, list[Tensor]]:
    """Returns this rank's tensors by kind: parameters and buffers, gradients, optimizer state."""
    params = list(model.parameters())
    grads = [local_shard.tensor_of(p.grad) for p in params if p.grad is not None]
    for owner in reducer_registry.owners_of(params):
        grads += owner.gradient_memory()
    kept = [t for entry in access.entries(optimizer.state) for key, t in entry.items() if key != "step"]
    return {"params": list(map(local_shard.tensor_of, [*params, *model.buffers()])), "grads": grads, "states": kept}


def memory(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def content(model: Any, optimizer: Any) -> list[bytes]:
    """Returns the bits of this rank's weights, buffers and optimizer state."""
    held = on_device(model, optimizer)
    steps = [entry["step"] for entry in access.entries(optimizer.state)]
    return bits([t.clone() for t in [*held["params"], *held["states"], *steps]])


# -- training ----------------------------------------------------------------------------------------------------------

CALLS: dict[str, list[dict[str, bool]]] = {
    "everything": [{}],
    "states, then the rest": [{"params": False, "grads": False}, {}],
    "all but weights": [{"params": False}],
}


def cycle(model: Any, optimizer: Any, calls: list[dict[str, bool]]) -> None:
    """Offloads as `calls` say and brings everything back; checks the bytes that are left, and the gradients."""
    held = on_device(model, optimizer)
    sizes = {kind: memory(tensors) for kind, tensors in held.items()}
    gradients = [p.grad for p in model.parameters()]
    for kinds in calls:
        torch_ext.offload(model, optimizer, **kinds)
        torch_ext.offload(model, optimizer, **kinds)
        for kind, tensors in held.items():
            if kinds.get(kind, True):
                assert memory(tensors) == 0, kind
    torch_ext.onload(model, optimizer)
    assert {kind: memory(tensors) for kind, tensors in held.items()} == sizes
    assert all(g.count_nonzero() == 0 for g in held["grads"]), "gradients come back zero"
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def _trained(rank: int, setup: str, dtypes: Any, calls: str | None, fraction: float = 0.0) -> list[bytes]:
    """Trains, with an offload cycle after each step unless calls is None, and returns the content."""
    model, optimizer = made(setup, dtypes, fraction)
    for step in range(4):
        one_step(model, optimizer, step, rank)
        if calls is not None:
            if step % 2:  # with gradients in every other cycle
                optimizer.zero_grad()
            cycle(model, optimizer, CALLS[calls])
    assert loss_of(model, 50, rank).isfinite()
    torch_ext.offload(model, optimizer)  # after an evaluation, which may leave weights unsharded
    torch_ext.onload(model, optimizer)
    return content(model, optimizer)


def _goes_on(rank: int, world: int, setups: tuple[str, ...], dtypes: Any, every: bool) -> None:
    """every: whether each setup is tried with all of CALLS; otherwise each with one of them."""
    for i, setup in enumerate(setups):
        expected = _trained(rank, setup, dtypes, None)
        for calls in CALLS if every else [list(CALLS)[i % len(CALLS)]]:
            assert _trained(rank, setup, dtypes, calls) == expected, (setup, calls)


def _goes_on_with_a_host_part(rank: int, world: int) -> None:
    """Trains with half of the optimizer state on the host, with and without offload cycles."""
    for setup in ("none", *OURS):
        ends = [_trained(rank, setup, DTYPES["bf16"], calls, 0.5) for calls in (None, "everything")]
        assert ends[0] == ends[1], setup


def test_B4_part_of_the_optimizer_on_the_host() -> None:
    ranks.run(2, _goes_on_with_a_host_part)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("world", [1, 2])
def test_B4_training_goes_on_with_the_same_bits(world: int, name: str) -> None:
    setups = SETUPS if name != "bf16, gradients fp32" else ("none", *OURS)
    ranks.run(world, _goes_on, setups, DTYPES[name], (world, name) == (2, "bf16"))


# -- calls while offloaded ---------------------------------------------------------------------------------------------


def refused(act: Callable[[], object], words: str) -> None:
    """The call must raise a RuntimeError with these words."""
    with pytest.raises(RuntimeError, match=words):
        act()


def _refuses(rank: int, world: int, setups: tuple[str, ...]) -> None:
    """Rejected calls while everything is offloaded must not change how training goes on."""
    for setup in setups:
        ends = []
        for offloaded in (False, True):
            model, optimizer = made(setup, DTYPES["bf16"])
            one_step(model, optimizer, 0, rank)
            optimizer.zero_grad()
            if offloaded:
                _use_everything(model, optimizer, rank, setup)
            one_step(model, optimizer, 1, rank)
            one_step(model, optimizer, 2, rank)
            ends.append(content(model, optimizer))
        assert ends[0] == ends[1], setup


def _use_everything(model: Any, optimizer: Any, rank: int, setup: str) -> None:
    """Makes every call that needs offloaded memory: each must raise and name onload."""
    torch_ext.offload(model, optimizer)
    for act in (
        lambda: loss_of(model, 0, rank),
        optimizer.step,
        lambda: torch_ext.clip_grad_norm_(optimizer, 1.0),
        lambda: torch_ext.clip_grad_norm_(model.parameters(), 1.0),
        optimizer.consolidate_state_dict,
        model.state_dict,
        optimizer.resync_masters,
    ):
        refused(act, r"torch_ext\.onload")
    if setup in ("optim", "optim_grads"):  # where torch's own clipping finds our shards
        refused(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), r"torch_ext\.onload")
        refused(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0), r"torch_ext\.onload")
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    if setup in OURS:
        refused(lambda: torch_ext.parallelize(model, policy(BF16), strategy=setup), r"parallelize.*onload")
    torch_ext.onload(model, optimizer, states=False)
    refused(optimizer.step, r"states of this optimizer.*torch_ext\.onload")
    torch_ext.onload(model, optimizer)
    if setup not in ("fsdp alone",):  # nothing of ours sees that setup's backward
        torch_ext.offload(model, optimizer, params=False, states=False)
        loss = loss_of(model, 0, rank)
        refused(loss.backward, r"backward: .*torch_ext\.onload")
        torch_ext.onload(model, optimizer)
        assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_B4_uses_while_offloaded(world: int) -> None:
    ranks.run(world, _refuses, ("none", *OURS, "fsdp alone"))


def _unreduced(rank: int, world: int, strategy: str) -> None:
    """Gradients that were not reduced, or have NaN, must be dropped by offload and no longer prevent a step."""
    model, optimizer = made(strategy, DTYPES["bf16"], check_for_nan_in_grad=True)
    one_step(model, optimizer, 0, rank)
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, 1, rank).backward()
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    refused((loss_of(model, 2, rank) * float("nan")).backward, "NaN")
    refused(optimizer.step, "NaN")
    torch_ext.offload(model, optimizer, params=False, states=False)
    torch_ext.onload(model, optimizer)
    optimizer.step()
    assert all(t.isfinite().all() for t in on_device(model, optimizer)["params"])


@pytest.mark.parametrize("strategy", OURS)
def test_B4_dropped_gradients_are_no_longer_in_the_way(strategy: str) -> None:
    ranks.run(2, _unreduced, strategy)


def _one_parameter(rank: int, world: int, strategy: str) -> None:
    """Calls zero_grad of an optimizer that has only one of the model's parameters."""
    model, _ = made(strategy, DTYPES["bf16"])
    optimizer = torch_ext.AdamW([model.scale], policy=policy(BF16))
    loss_of(model, 0, rank).backward()
    torch_ext.offload(model, optimizer)
    optimizer.zero_grad()
    torch_ext.onload(model, optimizer)
    assert all(g.count_nonzero() == 0 for g in on_device(model, optimizer)["grads"])


def test_B4_zero_grad_of_some_while_offloaded() -> None:
    for strategy in OURS:
        ranks.run(1, _one_parameter, strategy)


# -- calls while a step is under way -----------------------------------------------------------------------------------


def _in_flight(rank: int, world: int) -> None:
    """Calls offload and onload in a forward and a backward: they must raise, and not change how training goes on."""
    for setup in OURS:
        ends = []
        for tried in (False, True):
            model, optimizer = made(setup, DTYPES["bf16"])
            one_step(model, optimizer, 0, rank)
            said: list[str] = []

            def attempt(where: str, model: Any = model, optimizer: Any = optimizer, said: Any = said) -> None:
                for call in (torch_ext.offload, torch_ext.onload):
                    refused(partial(call, model, optimizer), f"during a {where}: call it between steps")
                    said.append(where)

            handles = []
            if tried:
                inner = model.block[1]
                handles = [
                    inner.register_forward_hook(lambda *_, attempt=attempt: attempt("forward")),
                    inner.register_full_backward_hook(lambda *_, attempt=attempt: attempt("backward")),
                ]
            one_step(model, optimizer, 1, rank)
            for handle in handles:
                handle.remove()
            assert set(said) == ({"forward", "backward"} if tried else set())
            one_step(model, optimizer, 2, rank)
            ends.append(content(model, optimizer))
        assert ends[0] == ends[1], setup


@pytest.mark.parametrize("world", [1, 2])
def test_B4_in_flight(world: int) -> None:
    ranks.run(world, _in_flight)


def _stepped_in_backward(rank: int, world: int, strategy: str) -> None:
    """Calls offload between a backward that stepped and step(): it must raise."""
    ends = []
    for tried in (False, True):
        model, optimizer = made(strategy, DTYPES["bf16"], step_in_backward=True)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if tried and step in (2, 4):
                refused(partial(torch_ext.offload, model, optimizer), r"step_in_backward=True.*step\(\) first")
            optimizer.step()
            if tried and step == 2:  # the next backward then steps nothing, since the optimizer plans its steps again
                torch_ext.offload(model, optimizer)
                torch_ext.onload(model, optimizer)
        ends.append(content(model, optimizer))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_B4_between_a_backward_that_stepped_and_step(strategy: str) -> None:
    ranks.run(2, _stepped_in_backward, strategy)


def _held(rank: int, world: int, strategy: str) -> None:
    """While a state_dict() is held, its tensors are the weights' memory: weights cannot be offloaded, the rest can."""
    model, optimizer = made(strategy, DTYPES["bf16"])
    one_step(model, optimizer, 0, rank)
    before = content(model, optimizer)
    held = model.state_dict()
    refused(partial(torch_ext.offload, model, optimizer), r"offload while a state_dict\(\).*still referenced")
    torch_ext.offload(model, optimizer, params=False)
    torch_ext.onload(model, optimizer)
    del held
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    assert content(model, optimizer) == before


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_B4_while_a_state_dict_is_held(strategy: str) -> None:
    ranks.run(1, _held, strategy)


def _part(rank: int, world: int, strategy: str) -> None:
    """Offloads a part of the model, which must raise, and a module around the model, which must work."""
    model, optimizer = made(strategy, DTYPES["bf16"])
    before = content(model, optimizer)
    refused(
        lambda: torch_ext.offload(model.block, optimizer), r"submodule of a parallelized model.*pass the whole model"
    )
    assert content(model, optimizer) == before
    wrapped = torch.nn.Sequential(model, torch.nn.Linear(11, 2).bfloat16())
    torch_ext.offload(wrapped, optimizer)
    torch_ext.onload(wrapped, optimizer)
    assert content(model, optimizer) == before


def test_B4_a_part_of_a_parallelized_model_is_refused() -> None:
    for strategy in OURS:
        ranks.run(1, _part, strategy)


def _graph_from_before(rank: int, world: int, inner: bool) -> None:
    """Runs the backward of a forward that came before offload: it must raise.

    inner: of a submodule's output, which parallelize does not see."""
    for setup in ("none", *OURS):
        if inner and setup == "optim_grads_params" and not RECOVERS:
            continue
        model, optimizer = made(setup, DTYPES["bf16"])
        one_step(model, optimizer, 0, rank)
        optimizer.zero_grad()
        outputs: list[Tensor] = []
        handle = model.block.register_forward_hook(lambda _m, _i, output, kept=outputs: kept.append(output * 1))
        loss = loss_of(model, 1, rank)
        handle.remove()
        torch_ext.offload(model, optimizer)
        refused(outputs[0].sum().backward if inner else loss.backward, r"torch_ext\.onload|inplace operation")
        torch_ext.onload(model, optimizer)
        optimizer.zero_grad()
        one_step(model, optimizer, 1, rank)


@pytest.mark.parametrize(("world", "inner"), [(1, False), (2, False), (2, True)])
def test_B4_a_graph_from_before_is_refused(world: int, inner: bool) -> None:
    ranks.run(world, _graph_from_before, inner)
