"""The planned bytes per rank must be those that are allocated. The arithmetic itself is tested in C, the command in
test_plan_command.py."""

import ctypes
import gc
import time
from collections.abc import Iterable
from typing import Any

import internals
import live_bytes
import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, noise, policy

import torch_ext
from bench import resident_memory
from torch_ext.optim.muon.planned_matrices import MuonOptions
from torch_ext.parallel import bucket_plan, memory_plan, parallel_module
from torch_ext.parallel.memory_plan import plan_memory
from torch_ext.parallel.strategies.table import strategies as strategy_names
from torch_ext.params.local_shard import tensor_of

# -- the plan and what is allocated ----------------------------------------------------------------------------------

WORLD = 2
SHAPES: list[Any] = [(7,), (300, 1000), (512,), (200, 512), (1,), (130, 1000)]
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, fp32 gradients": {"optimizer": {"main_grads_dtype": "fp32"}},
    "bf16, 8-bit moments, remainders": {
        "optimizer": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "store_param_remainders": True}
    },
    "bf16, fp16 moment, no masters": {"optimizer": {"exp_avg_dtype": "fp16", "main_params_dtype": None}},
    "fp32": {"dtype": FP32},
}


def _policy(case: dict[str, Any]) -> Any:
    return torch_ext.load_policy(
        case.get("dtype", BF16),
        override_optimizer_config=case.get("optimizer"),
        override_ddp_config={"bucket_size": 200_000},
    )


def _storages(tensors: Iterable[Any]) -> int:
    """Returns the bytes of the distinct storages of the tensors, or of DTensors' local tensors."""
    storages = [tensor_of(t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _allocated(rank: int, world: int, strategy: str) -> dict[str, int]:
    """Returns the bytes of parameters, gradients and states after a step, under each policy."""
    found = {}
    for name, case in POLICIES.items():
        chosen = _policy(case)
        model: Any = Given(SHAPES, chosen.param_dtype)
        torch_ext.parallelize(model, chosen, strategy=strategy)
        optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
        model(noise(1, rank, SHAPES, chosen.param_dtype)).backward()
        optimizer.step()
        params = list(model.parameters())
        engine = parallel_module.reducer_of(model)
        grads = [engine.grad(p) for p in params]
        states = [t for state in optimizer.state.values() for t in state.values()]
        found[name] = sum(_storages(tensors) for tensors in (params, grads, states))
    return found


@pytest.mark.parametrize("strategy", strategy_names())
def test_the_plan_is_what_is_allocated(strategy: str) -> None:
    for allocated in ranks.run(WORLD, _allocated, strategy):
        for name, case in POLICIES.items():
            shapes = {f"p{i}": torch.empty(s, dtype=case.get("dtype", BF16)) for i, s in enumerate(SHAPES)}
            (plan,) = plan_memory(shapes, _policy(case), WORLD, [strategy])
            assert plan.total == pytest.approx(allocated[name], rel=0.01), name


STATES = ["fp32", "bf16", "bf16_remainder", "8bit"]


def _state_bytes(rank: int, world: int, strategy: str) -> dict[str, int]:
    """Returns the bytes of optimizer state for each word of `states=`, as state_bytes() counts them, without the
    checksums, which the plan leaves out."""
    found = {}
    for states in STATES:
        chosen = torch_ext.load_policy(BF16, override_optimizer_config={"states": states})
        model: Any = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy=strategy)
        optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
        optimizer.state_dict()  # creates the states
        counted = optimizer.state_bytes()
        found[states] = sum(counted.values()) - counted["checksum"]
    return found


@pytest.mark.parametrize("strategy", strategy_names())
def test_the_planned_states_are_those_that_state_bytes_counts(strategy: str) -> None:
    shapes = {f"p{i}": torch.empty(shape, dtype=BF16) for i, shape in enumerate(SHAPES)}
    answers = ranks.run(WORLD, _state_bytes, strategy)
    for states in STATES:
        chosen = torch_ext.load_policy(BF16, override_optimizer_config={"states": states})
        (plan,) = plan_memory(shapes, chosen, WORLD, [strategy])
        planned = plan.masters + plan.moments + plan.scales + plan.steps
        mean = sum(answer[states] for answer in answers) / WORLD
        assert mean == planned if strategy == "no_shard" else mean == pytest.approx(planned, rel=0.01), states


EXTRAS: list[dict[str, Any]] = [
    {"ema_dtype": BF16, "publisher": True},
    {"ema_dtype": "24bit", "publisher": True, "exact": True},
    {"ema_dtype": FP32},
]


def _extras_allocated(rank: int, world: int, strategy: str) -> list[list[int]]:
    """Returns the bytes of averages and of what a publisher keeps, for each of EXTRAS."""
    found = []
    for extras in EXTRAS:
        chosen = _policy({})
        model: Any = Given(SHAPES, chosen.param_dtype)
        torch_ext.parallelize(model, chosen, strategy=strategy)
        optimizer = torch_ext.AdamW(
            model.named_parameters(), policy=chosen, ema_decay=0.9, ema_dtype=extras["ema_dtype"]
        )
        kept = []
        if "publisher" in extras:
            publisher = torch_ext.WeightPublisher(model, optimizer, exact=extras.get("exact", False))
            model(noise(1, rank, SHAPES, chosen.param_dtype)).backward()
            optimizer.step()
            publisher.publish()
            kept = [t for of_param in publisher._kept._changes._of.values() for t in of_param.values()]
            kept += [run.checksums for run in publisher._kept._runs.current_runs()]
        else:
            optimizer.state_dict()
        states = [t for state in optimizer.state.values() for key, t in state.items() if key.startswith("ema_")]
        found.append([sum(tensor_of(t).nbytes for t in states), _storages(kept)])  # small states share a storage
    return found


@pytest.mark.parametrize("strategy", strategy_names())
def test_the_plan_counts_averages_and_what_a_publisher_keeps(strategy: str) -> None:
    shapes = {f"p{i}": torch.empty(s, dtype=BF16) for i, s in enumerate(SHAPES)}
    allocated = ranks.run(WORLD, _extras_allocated, strategy)
    for i, extras in enumerate(EXTRAS):
        (plan,) = plan_memory(shapes, _policy({}), WORLD, [strategy], **extras)
        (without,) = plan_memory(shapes, _policy({}), WORLD, [strategy])
        assert plan.total == without.total + plan.emas + plan.changes
        for emas, changes in (one[i] for one in allocated):
            if strategy == "no_shard":
                assert emas == plan.emas
                assert abs(changes - plan.changes) <= 8, "ranks have a checksum more or less"
            assert emas == pytest.approx(plan.emas, rel=0.01)
            assert changes == pytest.approx(plan.changes, rel=0.01)


@pytest.mark.parametrize("word", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_the_plan_counts_what_is_kept_in_32_bits(word: Any) -> None:
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(shape, dtype=BF16)) for i, shape in enumerate(SHAPES)}
    options: dict[str, Any] = {"keep_32bit": ["p1"]}
    optimizer = torch_ext.AdamW(params.items(), states=word, min_8bit_size=50, **options)
    optimizer.state_dict()
    (plan,) = plan_memory(params, optimizer.policy, 1, ["no_shard"], **options)
    tensors = [(key, t) for state in optimizer.state.values() for key, t in state.items()]
    assert plan.moments == sum(t.nbytes for key, t in tensors if key.startswith("exp_avg"))
    assert plan.masters == sum(t.nbytes for key, t in tensors if key.startswith("master_"))
    assert plan.scales == sum(t.nbytes for key, t in tensors if key == "scales")


# -- the plan and what is resident -----------------------------------------------------------------------------------

LAYERS = 32


class Layers(torch.nn.Module):
    """Layers of 1 MiB of bf16 each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 512, bias=False, dtype=BF16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.pad(layer(x), (0, 512))
        return x


# No masters and 8-bit moments: then the peak is where weights move into flat buffers, before there are states.
LEAN = {"main_params_dtype": None, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}


# Compressed messages need memory in addition to the buckets.
COMPRESSED = {"grad_comm_compression": "on"}

# Buckets are sent together. The speed is given, because a measured one would vary between runs.
FAST = {"link_gbps": 8}


def _train(layers: int, strategy: str, optimizer_config: Any, ddp_config: Any) -> Any:
    """Trains four steps; returns the optimizer, whose states must be alive when memory is measured."""
    model: Any = Layers(layers)
    chosen = torch_ext.load_policy(model, override_optimizer_config=optimizer_config, override_ddp_config=ddp_config)
    torch_ext.parallelize(model, chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), policy=chosen)
    for _ in range(4):
        model(torch.ones(4, 1024, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _resident(rank: int, world: int, strategy: str, *configs: Any) -> int:
    """Returns the largest number of bytes that a training has resident, less what was resident before it.

    Sums are delayed, so that as many buckets are in flight as is allowed, which is what the plan assumes.
    """
    internals.before_sums(lambda: time.sleep(0.02))
    threshold = -3  # M_MMAP_THRESHOLD: freed memory goes back to the system at once, so what is resident is in use
    ctypes.CDLL(None).mallopt(threshold, 1 << 16)
    _train(2, strategy, *configs)  # starts threads and loads code, which must not be counted
    gc.collect()
    before = resident_memory.status("VmRSS")
    resident_memory.reset_peak()
    optimizer = _train(LAYERS, strategy, *configs)
    del optimizer
    return resident_memory.status("VmHWM") - before


PEAKS: list[Any] = [
    *(pytest.param(strategy, None, FAST, id=strategy) for strategy in strategy_names()),
    *(
        pytest.param(name, None, COMPRESSED | FAST, id=f"{name}-compressed")
        for name in ("no_shard", "optim", "optim_grads")
    ),
    pytest.param("optim", LEAN, FAST, id="optim-while-weights-move"),
    pytest.param("optim_grads_params", {"main_grads_dtype": "fp32"}, None, id="optim_grads_params-fp32-gradients"),
]


@pytest.mark.parametrize(("strategy", "optimizer_config", "ddp_config"), PEAKS)
def test_the_peak_is_planned_within_5_percent(strategy: str, optimizer_config: Any, ddp_config: Any) -> None:
    model = Layers(LAYERS)
    units = memory_plan.units_of(model)
    chosen = torch_ext.load_policy(model, override_optimizer_config=optimizer_config, override_ddp_config=ddp_config)
    (plan,) = plan_memory(bucket_plan.trainable(model), chosen, WORLD, [strategy], units=units)
    assert (plan.peak > plan.total + plan.transient) == (optimizer_config is LEAN)
    for peak in ranks.run(WORLD, _resident, strategy, optimizer_config, ddp_config):
        assert 0.95 * plan.peak <= peak <= 1.05 * plan.peak


# -- Muon's matrices -------------------------------------------------------------------------------------------------

MATRICES: list[Any] = [(7,), (150, 500), (512,), (100, 256), (6, 32, 100), (70, 500), (500, 32)]
SPLIT = {"p1": (50, 100)}
NS_DTYPES = {"fp32": FP32, "bf16": BF16, "8bit": BF16}  # by the argument `states`
SMALL = 8192
"""Bytes of scalars, of tables of ids, and of what ranks tell each other about a round."""


def _muons_measured(
    rank: int, world: int, strategy: str, threads: int, products: dict[str, int]
) -> dict[str, tuple[int, int, int]]:
    """Returns, by states, three numbers of bytes: of parameters, gradients and states; of what else a first step keeps;
    and the most that a later step allocates."""
    internals.after_waiting(lambda: time.sleep(0.005))  # until gloo's thread has released the message
    torch.set_num_threads(threads)
    found = {}
    for states in NS_DTYPES:
        kept, most = [], []
        for _ in range(3):  # the minimum counts, since gloo now and then keeps a message for good
            model, optimizer = _muon_and_model(rank, strategy, states)
            with live_bytes.LiveBytes() as first:
                optimizer.step()
            model(noise(1, rank, MATRICES, BF16))  # waits for the weights
            kept.append(live_bytes.settled(first, products[states] + SMALL))
            with live_bytes.LiveBytes() as later:
                optimizer.step()
            most.append(later.most)
        params = list(model.parameters())
        grads = [parallel_module.reducer_of(model).grad(p) for p in params]
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        found[states] = sum(_storages(of) for of in (params, grads, tensors)), min(kept), min(most)
    return found


def _muon_and_model(rank: int, strategy: str, states: str) -> Any:
    """Returns a model and its Muon with states, before its first step."""
    model: Any = Given(MATRICES, BF16)
    torch_ext.parallelize(model, _policy_of_states(states), strategy=strategy)
    options: dict[str, Any] = {"ns": "auto", "ns_dtype": NS_DTYPES[states], "split": SPLIT}
    optimizer = torch_ext.Muon(model.named_parameters(), policy=_policy_of_states(states), **options)
    model(noise(1, rank, MATRICES, BF16)).backward()
    optimizer.state_dict()
    return model, optimizer


def _policy_of_states(states: str) -> torch_ext.Policy:
    return torch_ext.load_policy(
        BF16, override_optimizer_config={"states": states}, override_ddp_config={"bucket_size": 50_000}
    )


@pytest.mark.parametrize(
    ("strategy", "world", "threads"),
    [
        *((strategy, 2, 1 + i % 2) for i, strategy in enumerate(("optim", *strategy_names()))),
        ("optim", 1, 2),
        ("optim", 3, 1),
    ],
)
def test_the_plan_of_matrices_is_what_is_measured(strategy: str, world: int, threads: int) -> None:
    shapes = {f"p{i}": torch.empty(shape, dtype=BF16, device="meta") for i, shape in enumerate(MATRICES)}
    plans = {}
    for states, ns_dtype in NS_DTYPES.items():
        muon = MuonOptions(ns="auto", ns_dtype=ns_dtype, split=SPLIT, threads=threads)
        (plans[states],) = plan_memory(shapes, _policy_of_states(states), world, [strategy], muon=muon)
    products = {states: plan.products for states, plan in plans.items()}
    found = ranks.run(world, _muons_measured, strategy, threads, products)
    for states, plan in plans.items():
        for allocated, kept, _ in (of_rank[states] for of_rank in found):
            assert plan.total - plan.products == pytest.approx(allocated, rel=0.01), states
            assert plan.products <= kept <= plan.products + SMALL, states
        most = max(of_rank[states][2] for of_rank in found)
        assert plan.stepping <= most <= plan.stepping + SMALL, states
        assert (plan.stepping > 0) == (world > 1)
        (by_adamw,) = plan_memory(shapes, _policy_of_states(states), world, [strategy])
        assert plan.moments < by_adamw.moments
        assert plan.peak == max(plan.total + max(plan.transient, plan.stepping), plan.peak)


def test_matrices_that_are_refused() -> None:
    policy = _policy_of_states("bf16")
    with pytest.raises(ValueError, match="no parameter is a matrix that Muon steps: give shapes"):
        plan_memory([1000, 7], policy, 1, muon=MuonOptions())
    shapes = {"p": torch.empty(30, 20, dtype=BF16, device="meta")}
    with pytest.raises(ValueError, match="split of 'p' is 7"):
        plan_memory(shapes, policy, 1, muon=MuonOptions(split={"p": 7}))
    with pytest.raises(ValueError, match="adamw_params"):
        plan_memory(shapes, policy, 1, muon=MuonOptions(adamw_params="head"))
    with pytest.raises(ValueError, match="ns is 'cubic'"):
        plan_memory(shapes, policy, 1, muon=MuonOptions(ns="cubic"))


# -- units and frozen parameters -------------------------------------------------------------------------------------


class Blocks(torch.nn.Module):
    """Two blocks in a list, each a list itself, and an embedding that shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.Linear(size, 4)) for size in (3, 5)
        )
        self.norm = torch.nn.LayerNorm(4, dtype=BF16)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_units_are_the_members_of_lists_and_the_rest() -> None:
    units = memory_plan.units_of(Blocks(), 1)
    assert units == [
        ("blocks.0", 4 * 3 + 3 + 3 * 4 + 4, 31, FP32),
        ("blocks.1", 4 * 5 + 5 + 5 * 4 + 4, 49, FP32),
        ("norm", 8, 8, BF16),
        ("", 40, 40, FP32),
    ]
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    assert [u.trained for u in memory_plan.units_of(model, 1)] == [0, 49, 8, 40]


def test_units_decide_what_full_sharding_gathers() -> None:
    model = Blocks()
    units = memory_plan.units_of(model, 1)
    (by_units,) = plan_memory(bucket_plan.trainable(model), policy(), 2, ["optim_grads_params"], units=units)
    # 49 elements and 40: parameters, gradients of the one, and reduced, with half of it received, of both.
    assert by_units.transient == 4 * (49 + 2 * 40 + 49) + 6 * (49 + 40)
    (least,) = plan_memory(bucket_plan.trainable(model), policy(), 2, ["optim_grads_params"])
    assert least.transient == 4 * (40 + 2 * 20 + 40) + 6 * (40 + 20)


def test_frozen_parameters_are_counted() -> None:
    model = Blocks()
    trained = [plan.params for plan in plan_memory(bucket_plan.trainable(model), policy(), 2)]
    model.blocks.requires_grad_(False)
    params, frozen = bucket_plan.trainable(model), memory_plan.frozen_bytes(model)
    assert [name for name, _ in params] == ["embedding.weight", "norm.weight", "norm.bias"]
    assert frozen == 4 * (31 + 49)
    without = [plan.params for plan in plan_memory(params, policy(), 2)]
    counted = [plan.params for plan in plan_memory(params, policy(), 2, frozen_bytes=frozen)]
    assert [b - a for a, b in zip(without, counted, strict=True)] == [frozen, frozen, frozen, frozen // 2]
    assert counted[0] == trained[0]


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="'zero'.*no_shard, optim, optim_grads, optim_grads_params"):
        plan_memory([5], policy(), 1, ["zero"])
