"""Bytes per rank where matrices are Muon's: what is planned is what is allocated, kept, and on its way in a step."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, noise
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_ext
from torch_ext.comm import group_calls
from torch_ext.optim.muon.planned_matrices import MuonOptions
from torch_ext.parallel import parallel_module
from torch_ext.parallel.memory_plan import plan_memory
from torch_ext.parallel.strategies.table import strategies
from torch_ext.params.local_shard import tensor_of

SHAPES: list[Any] = [(7,), (300, 1000), (512,), (200, 512), (6, 64, 200), (130, 1000), (1000, 64)]
SPLIT = {"p1": (100, 200)}
NS_DTYPES = {"fp32": FP32, "bf16": BF16, "8bit": BF16}  # by the word for states
SMALL = 8192
"""Bytes of scalars, of tables of ids and of what ranks tell each other of a round."""


class LiveBytes(TorchDispatchMode):
    """Counts the memory that is allocated inside, and how much of it is in use at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._old: dict[StorageWeakRef, None] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            if (ref := StorageWeakRef(tensor.untyped_storage())) not in self._sizes:
                self._old[ref] = None
        made = func(*args, **kwargs or {})
        for tensor in _tensors(made):
            if (ref := StorageWeakRef(tensor.untyped_storage())) not in self._old:
                self._sizes[ref] = tensor.untyped_storage().nbytes()
        self.most = max(self.most, self.now())
        return made

    def now(self) -> int:
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [tensor_of(one) for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _storages(tensors: Any) -> int:
    storages = [tensor_of(t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _measured(rank: int, world: int, strategy: str, products: dict[str, int]) -> dict[str, tuple[int, int, int]]:
    """By states: bytes of parameters, gradients and states; that are kept beside them; and at most in a later step."""
    found = {}
    _unhurried()
    for states, ns_dtype in NS_DTYPES.items():
        model: Any = Given(SHAPES, BF16)
        torch_ext.parallelize(model, _policy(states), strategy=strategy)
        optimizer = torch_ext.Muon(
            model.named_parameters(), policy=_policy(states), ns="auto", ns_dtype=ns_dtype, split=SPLIT
        )
        model(noise(1, rank, SHAPES, BF16)).backward()
        optimizer.state_dict()  # makes states
        with LiveBytes() as first:
            optimizer.step()
        kept, most = _settled(first, products[states] + SMALL), []
        for _ in range(4):
            with LiveBytes() as later:
                optimizer.step()
            most.append(later.most)
        params = list(model.parameters())
        grads = [parallel_module.reducer_of(model).grad(p) for p in params]
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        found[states] = sum(_storages(of) for of in (params, grads, tensors)), kept, min(most)
    return found


def _settled(live: LiveBytes, expected: int) -> int:
    """gloo's thread lets go of a message a little after its end."""
    deadline = time.monotonic() + 5
    while live.now() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return live.now()


def _unhurried() -> None:
    """What gloo's thread has not let go of yet is in use, but it is not what is measured."""
    theirs = group_calls.Call.wait

    def wait(call: group_calls.Call) -> None:
        theirs(call)
        time.sleep(0.005)

    group_calls.Call.wait = wait  # type: ignore[method-assign]


def _policy(states: str) -> torch_ext.Policy:
    return torch_ext.load_policy(
        BF16, override_optimizer_config={"states": states}, override_ddp_config={"bucket_size": 200_000}
    )


@pytest.mark.parametrize(
    ("strategy", "world"), [*((strategy, 2) for strategy in strategies()), ("optim", 1), ("optim", 3)]
)
def test_the_plan_is_what_is_measured(strategy: str, world: int) -> None:
    shapes = {f"p{i}": torch.empty(shape, dtype=BF16, device="meta") for i, shape in enumerate(SHAPES)}
    plans = {}
    for states, ns_dtype in NS_DTYPES.items():
        muon = MuonOptions(ns="auto", ns_dtype=ns_dtype, split=SPLIT)
        (plans[states],) = plan_memory(shapes, _policy(states), world, [strategy], muon=muon)
    found = ranks.run(world, _measured, strategy, {states: plan.products for states, plan in plans.items()})
    for states, plan in plans.items():
        for allocated, kept, _ in (of_rank[states] for of_rank in found):
            assert plan.total - plan.products == pytest.approx(allocated, rel=0.01), states
            assert plan.products <= kept <= plan.products + SMALL, states
        most = max(of_rank[states][2] for of_rank in found)
        assert plan.stepping <= most <= plan.stepping + SMALL, states
        assert (plan.stepping > 0) == (world > 1)
        (by_adamw,) = plan_memory(shapes, _policy(states), world, [strategy])
        assert plan.moments < by_adamw.moments
        assert plan.peak == max(plan.total + max(plan.transient, plan.stepping), plan.peak)


def test_what_is_refused() -> None:
    policy = _policy("bf16")
    with pytest.raises(ValueError, match="no parameter is a matrix of Muon's: shapes are needed"):
        plan_memory([1000, 7], policy, 1, muon=MuonOptions())
    shapes = {"p": torch.empty(30, 20, dtype=BF16, device="meta")}
    with pytest.raises(ValueError, match="split of 'p' is 7"):
        plan_memory(shapes, policy, 1, muon=MuonOptions(split={"p": 7}))
    with pytest.raises(ValueError, match="adamw_params"):
        plan_memory(shapes, policy, 1, muon=MuonOptions(adamw_params="head"))
    with pytest.raises(ValueError, match="ns is 'cubic'"):
        plan_memory(shapes, policy, 1, muon=MuonOptions(ns="cubic"))
