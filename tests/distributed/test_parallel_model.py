"""What parallelize must not change (class, keys, pickle, copies), and what it rejects."""

import copy
import io
import itertools
import pickle
import threading
import time
import weakref
from typing import Any

import pytest
import ranks
import strategies
import torch
from gradients import BF16, FP16, FP32, Given, gradient, on_all_ranks, policy
from strategies import SHARDED, STRATEGIES
from torch.nn.parallel import DistributedDataParallel

import torch_ext
from torch_ext.parallel import parallel_module


class Net(torch.nn.Module):
    """A model with frozen and tied parameters, a buffer and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.note = "kept"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)) * self.scale)


def _backward(model: torch.nn.Module, rank: int = 0) -> None:
    model(torch.tensor([1, 2, 3 + rank])).square().mean().backward()


def _same_object(rank: int, world: int, strategy: str) -> None:
    """Parallelizes a model that differs between ranks, and trains a step with an optimizer created before."""
    torch.manual_seed(rank)
    model = Net()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    weights = [w.clone() for w in model.state_dict().values()]
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)  # created before, which is legal while it has no state
    assert torch_ext.parallelize(model, policy(), strategy=strategy) is model
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model, Net) and type(model).__name__ == "Net" and type(model).__qualname__ == "Net"
    assert type(model).__module__ == Net.__module__ and model.note == "kept"
    assert rank or all(torch.equal(a, b) for a, b in zip(weights, model.state_dict().values(), strict=True))
    all_ranks = on_all_ranks({k: v.tolist() for k, v in model.state_dict().items()})
    assert all_ranks[0] == all_ranks[1], "rank 0's weights and buffers"
    assert model.head.weight is model.embed.weight
    _backward(model, rank)
    optimizer.step()
    assert model.embed.weight.grad is model.head.weight.grad and model.scale.grad is None
    assert (model.embed.weight.grad is None) == (strategy == "optim_grads")
    all_ranks = on_all_ranks([p.tolist() for p in model.parameters()])
    assert all_ranks[0] == all_ranks[1] != [w.tolist() for w in weights]


def test_the_same_object_with_the_same_names_and_rank_0s_weights() -> None:
    strategies.run(2, _same_object)


def _copies(rank: int, world: int, strategy: str) -> None:
    """Copies and pickles of a parallelized model must be plain models with its weights, which train by themselves."""
    model: Any = torch_ext.parallelize(Net(), policy(FP32, FP32, BF16), strategy=strategy)
    _backward(model, rank)
    torch_ext.AdamW(model.parameters()).step()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(model),
        "copy": copy.copy(model),
        "torch.save": torch.load(saved, weights_only=False),
        **{f"pickle {p}": pickle.loads(pickle.dumps(model, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    }
    for how, other in copies.items():
        assert type(other) is Net, how
        assert list(other.state_dict()) == list(model.state_dict()), how
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True)), how
        assert other.embed.weight is other.head.weight and other.note == "kept", how
        assert (other.embed.weight is model.embed.weight) == (how == "copy"), how
    assert b"torch_ext" not in pickle.dumps(model)
    for how in ("deepcopy", "torch.save"):
        plain = copies[how]
        _backward(plain, rank)
        assert plain.body[0].weight.grad is not None is not model.body[0].weight.grad or strategy == "optim_grads"
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert not torch.equal(plain.body[0].weight, model.body[0].weight)
        plain.zero_grad()
        again = torch_ext.parallelize(plain, policy(), strategy=strategy)  # a copy can be parallelized, too
        _backward(again, rank)
    weights = io.BytesIO()
    torch.save(model.state_dict(), weights)
    weights.seek(0)
    loaded: Any = Net()
    loaded.load_state_dict(torch.load(weights))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    model.zero_grad()
    _backward(model, rank)


def test_pickle_and_copies_give_the_plain_model() -> None:
    strategies.run(2, _copies)


def _grad_dtypes(model: Any) -> list[torch.dtype]:
    """Returns the dtypes of the gradients that this rank's optimizer reads."""
    reducer: Any = parallel_module.reducer_of(model)
    return [grad.dtype for p in model.parameters() for grad in [reducer.grad(p)] if grad is not None]


def _dtypes_of_gradients(rank: int, world: int, strategy: str) -> None:
    """Tries all combinations: main gradients must have their dtype after one reduction and after another."""
    wires: list[Any] = [None, FP32, BF16, FP16, torch.uint8]
    for dtype, main, wire in itertools.product((FP32, BF16, FP16), (None, FP32, BF16, FP16), wires):
        chosen = policy(dtype, main, wire)
        model: Any = torch_ext.parallelize(Given([(256,)], dtype), chosen, strategy=strategy)
        assert chosen.main_grads_dtype == main or main is None
        for sync in (model.sync, model.no_sync, model.sync):
            with sync():
                model([torch.ones(256)]).backward()
            if sync == model.sync:
                expected = main or (FP32 if dtype == FP16 else dtype)
                assert _grad_dtypes(model) == [expected], (dtype, main, wire)
                reducer: Any = parallel_module.reducer_of(model)
                assert len(reducer.strategy.temporary) == 0, "E3: buckets in the wire's dtype are freed"


def test_gradients_have_main_grads_dtype() -> None:
    strategies.run(2, _dtypes_of_gradients)


def _plans(rank: int, world: int, strategy: str) -> int:
    """Returns the fingerprint of a model's plan, which must be the one that plan_buckets returns."""
    shapes: list[Any] = [(4,), (300,), (0,), (2, 70), (129,)]
    chosen = policy(bucket_size=200, overlap_grad_reduce=True)
    reducer: Any = parallel_module.reducer_of(torch_ext.parallelize(Given(shapes), chosen, strategy=strategy))
    plan = reducer.plan
    assert plan.world_size == world and all(b.numel % (128 * world) == 0 for b in plan.buckets)
    assert plan.fingerprint == torch_ext.plan_buckets(Given(shapes).named_parameters(), chosen, world).fingerprint
    return plan.fingerprint  # type: ignore[no-any-return]


def test_one_plan_for_each_world() -> None:
    found = [set(itertools.chain(*strategies.run(world, _plans).values())) for world in (1, 2, 3)]
    assert [len(fingerprints) for fingerprints in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def _again(rank: int, world: int, strategy: str) -> None:
    """Parallelizes again, from each strategy to each and back, with gradients of the first, which must be dropped, and
    without gradients or with those of the second."""
    for following in STRATEGIES:
        model: Any = Given([(4,), (300,)], BF16)
        torch_ext.parallelize(model, policy(BF16, FP32), strategy=strategy)
        kind = type(model)
        for _ in range(2):
            model([torch.ones(4), torch.ones(300)]).backward()
            assert _grad_dtypes(model) == [FP32] * 2
            model.zero_grad()
        model([torch.ones(4), torch.ones(300)]).backward()
        torch_ext.parallelize(model, policy(BF16), gradient_divide_factor=1.0, strategy=following)
        assert type(model) is kind and model.p0.grad is None
        model([torch.ones(4), torch.ones(300)]).backward()
        grad = gradient(model, model.p1)
        assert _grad_dtypes(model) == [BF16] * 2 and grad is not None and grad.eq(2.0).all()
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.125)
        optimizer.step()
        assert model.p1.tolist() == [-0.125] * 300
        del optimizer
        torch_ext.parallelize(model, policy(BF16), strategy=strategy)
        assert model.p1.tolist() == [-0.125] * 300, "weights are kept"


def test_a_second_call_replaces_the_first() -> None:
    strategies.run(2, _again)


def _mixed(rank: int, world: int, strategy: str) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.LayerNorm(8))
    torch_ext.parallelize(model, torch_ext.load_policy(model), strategy=strategy)
    model[1](model[0](torch.ones(2, 8, dtype=BF16)).float()).square().sum().backward()
    assert _grad_dtypes(model) == [BF16, BF16, FP32, FP32]
    torch_ext.AdamW(model.parameters()).step()


def test_a2_parameters_of_another_dtype_follow_their_own_row() -> None:
    strategies.run(2, _mixed)


# -- changes that the reducer is not told of -------------------------------------------------------------------------


def _assign(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _thaw(model: Any) -> None:
    model.scale.requires_grad_(True)


def _to_bf16(model: Any) -> None:
    model.to(BF16)


CHANGES = [
    pytest.param(_assign, "'embed.weight' is another tensor now .*assign=True", id="assign"),
    pytest.param(_thaw, "'scale' was thawed", id="thawed"),
    pytest.param(_to_bf16, "became torch.bfloat16 after parallelize", id="to"),
]


def _changed(rank: int, world: int, strategy: str, change: Any, words: str) -> None:
    """Changes the model: the next backward must name the parameter, and a second parallelize must help."""
    model: Any = torch_ext.parallelize(Net(), policy(), strategy=strategy)
    _backward(model)
    model.zero_grad()
    change(model)
    with pytest.raises(RuntimeError, match=words):
        _backward(model)
    model.zero_grad()
    torch_ext.parallelize(model, torch_ext.load_policy(model), strategy=strategy)  # as the message says
    _backward(model)
    torch_ext.AdamW(model.parameters()).step()
    with torch.no_grad():
        change(model)


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_parameter_that_is_not_what_it_was_is_named(change: Any, words: str) -> None:
    strategies.run(2, _changed, change, words)


def _left(rank: int, world: int, strategy: str) -> None:
    """Changes the model after a backward: then step must notice."""
    model: Any = torch_ext.parallelize(Net(), policy(), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters())
    _backward(model)
    model.to(BF16)
    with pytest.raises(RuntimeError, match="'embed.weight' became torch.bfloat16 .*call parallelize again"):
        optimizer.step()
    model.zero_grad()
    del optimizer
    torch_ext.parallelize(model, torch_ext.load_policy(model), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters())
    for moved in (False, True):
        _backward(model)
        if moved:
            model.embed.weight.data = model.embed.weight.data.clone()
            with pytest.raises(RuntimeError, match="'embed.weight' left the flat buffer .*before parallelize"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_weight_that_is_not_where_it_was_is_named() -> None:
    strategies.run(2, _left, chosen=SHARDED)


def _harmless(rank: int, world: int, strategy: str) -> None:
    """Makes calls that change no parameter's dtype or identity; training must go on."""
    model: Any = torch_ext.parallelize(Net(), policy(), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        _backward(model)
        before = gradient(model, model.embed.weight)
        model.to(torch.float32).to("cpu").train()
        model.share_memory()  # moves weights and gradients elsewhere
        after = gradient(model, model.embed.weight)
        assert before is not None and after is not None and torch.equal(before, after)
        assert model.embed.weight.is_shared()
        optimizer.step()
        all_ranks = on_all_ranks([p.tolist() for p in model.parameters()])
        assert all_ranks[0] == all_ranks[1]
        model.load_state_dict(model.state_dict())
        model.zero_grad(set_to_none=False)
    _backward(model)
    engine: Any = parallel_module.reducer_of(model)
    if strategy != "optim_grads":
        assert all(engine.strategy.buffers.holds(i) for i in range(len(engine.params)))


def test_changes_that_change_nothing_are_fine() -> None:
    strategies.run(2, _harmless)


def _ends(rank: int, world: int, strategy: str) -> None:
    """A model that is gone must take its reducer and its threads with it."""
    threads = threading.active_count()
    model: Any = torch_ext.parallelize(Given([4]), policy(), strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    model([torch.ones(4)]).backward()
    optimizer.step()
    del optimizer
    engine = weakref.ref(parallel_module.reducer_of(model))
    parameters = list(model.parameters())
    assert threading.active_count() > threads or world == 1
    del model
    assert engine() is None, "neither hooks nor parameters keep it"
    deadline = time.monotonic() + 5.0
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    parameters[0].grad = None
    parameters[0].sum().backward()  # the hooks left behind do nothing


def test_an_engine_ends_with_its_model() -> None:
    strategies.run(2, _ends)


# -- what is rejected ------------------------------------------------------------------------------------------------


def _with_state() -> Any:
    """A model whose optimizer has state for its parameter."""
    model: Any = Given([2])
    optimizer = torch.optim.AdamW(model.parameters())
    model([torch.ones(2)]).backward()
    optimizer.step()
    model.zero_grad()
    model.keep = [optimizer]
    return model


def _frozen() -> Any:
    return Given([2]).requires_grad_(False)


def _part_of_another() -> Any:
    """A model with a part that belongs to another parallelized model."""
    inner = torch.nn.Linear(2, 2)
    outer = torch_ext.parallelize(torch.nn.Sequential(inner), policy())
    other: Any = torch.nn.Sequential(inner)
    other.keep = [outer]
    return other


REFUSED: list[Any] = [
    pytest.param(
        lambda: Given([2]),
        {"strategy": "zero3"},
        ValueError,
        ["'zero3'", "ZeRO-3 is optim_grads_params here"],
        id="E2-unknown name",
    ),
    pytest.param(lambda: Given([2]), {"strategy": 4}, ValueError, ["4", "'no_shard' (0)", "'optim' (1)"], id="E2-4"),
    pytest.param(lambda: Given([2]), {"strategy": -1}, ValueError, ["-1", "'no_shard' (0)"], id="E2-minus 1"),
    pytest.param(lambda: Given([2]), {"strategy": True}, ValueError, ["True", "'no_shard' (0)"], id="E2-True"),
    pytest.param(lambda: Given([2]), {"gradient_divide_factor": 0.0}, ValueError, ["0.0", "> 0"], id="divide by zero"),
    pytest.param(
        lambda: Given([2]), {"gradient_divide_factor": float("nan")}, ValueError, ["nan", "> 0"], id="divide by nan"
    ),
    pytest.param(_frozen, {}, ValueError, ["Given", "no trainable parameter"], id="nothing trainable"),
    pytest.param(_with_state, {}, RuntimeError, ["AdamW", "'p0'", "before the first step"], id="optimizer with state"),
    pytest.param(_part_of_another, {}, RuntimeError, ["'0.weight'", "another parallelized model"], id="two engines"),
    pytest.param(lambda: Given([2], torch.float64), {}, TypeError, ["'p0'", "float64"], id="float64"),
    pytest.param(lambda: DistributedDataParallel(Given([2])), {}, TypeError, ["register_comm_hook"], id="DDP"),
    pytest.param(
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")),
        {},
        ValueError,
        ["'0.weight' is on cpu", "'1.weight' on meta"],
        id="mixed devices",
    ),
    pytest.param(lambda: torch.nn.Linear(2, 2, device="meta"), {}, ValueError, ["meta", "cpu"], id="meta"),
]


def _torn() -> Any:
    """Returns a model with two parameters in one memory, tied as long as weights are not moved into flat buffers."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = torch.nn.Parameter(model[0].weight.data)
    return model


def _refuses(rank: int, world: int, strategy: str) -> list[tuple[str, str]]:
    """Returns each case's error; a rejected call must not change the model."""
    messages = []
    for case in REFUSED:
        make, options, *_ = case.values
        model = make()
        before = type(model)
        addresses = [p.data_ptr() for p in model.parameters()]
        try:
            torch_ext.parallelize(model, policy(), **{"strategy": strategy, **options})
        except Exception as error:
            messages.append((type(error).__name__, str(error)))
        else:
            messages.append(("", "nothing was raised"))
        assert type(model) is before and addresses == [p.data_ptr() for p in model.parameters()]
    return messages


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[case.id for case in REFUSED])
def test_what_is_refused(case: int, strategy: str, refusals: dict[str, list[list[tuple[str, str]]]]) -> None:
    _, _, kind, words = REFUSED[case].values
    (messages,) = refusals[strategy]
    assert messages[case][0] == kind.__name__
    for word in words:
        assert word in messages[case][1]


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[list[tuple[str, str]]]]:
    return strategies.run(1, _refuses)


def _refuses_to_tear(rank: int, world: int, strategy: str) -> None:
    model = _torn()
    with pytest.raises(ValueError, match="'0.weight' and '1.weight' share memory; pass tied weights once"):
        torch_ext.parallelize(model, policy(), strategy=strategy)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_parameters_that_share_memory_are_not_torn_apart() -> None:
    strategies.run(2, _refuses_to_tear, chosen=SHARDED)


NAMES: list[tuple[Any, str]] = [
    ("no_shard", "NoShard"),
    (0, "NoShard"),
    (None, "NoShard"),
    ("optim", "ShardedOptimizer"),
    (1, "ShardedOptimizer"),
    ("optim_grads", "ShardedGradients"),
    (2, "ShardedGradients"),
]


def _store(model: Any) -> str:
    """Returns the name of the class that implements the model's strategy."""
    engine: Any = parallel_module.reducer_of(model)
    return type(engine.strategy).__name__


def _accepts(rank: int, world: int) -> None:
    for strategy, name in NAMES:
        assert _store(torch_ext.parallelize(Given([2]), policy(), strategy=strategy)) == name
    by_policy = policy(data_parallel_sharding_strategy="optim")
    assert _store(torch_ext.parallelize(Given([2]), by_policy)) == "ShardedOptimizer"


def test_e2_strategies_by_name_number_and_policy() -> None:
    ranks.run(1, _accepts)


def test_a_process_group_that_is_not_initialised() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group"):
        torch_ext.parallelize(Given([2]), policy())


def test_a_comm_hook_wants_ddp() -> None:
    with pytest.raises(TypeError, match="a DistributedDataParallel is expected"):
        torch_ext.register_comm_hook(Given([2]), policy())  # type: ignore[arg-type]


def _sparse(rank: int, world: int) -> None:
    model: Any = torch_ext.parallelize(torch.nn.Embedding(5, 2, sparse=True), policy())
    with pytest.raises(RuntimeError, match="'weight' has a sparse gradient.*sparse=False"):
        model(torch.tensor([1])).sum().backward()


def test_a_sparse_gradient_is_named() -> None:
    ranks.run(1, _sparse)
