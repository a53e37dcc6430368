"""parallelize(..., optimizer=...): states follow when layers freeze or thaw, or the strategy changes.

Every rank has the same gradients. So any sequence of layouts must end with the bits of a run that was never parallel.
"""

import random
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise

import torch_ext

SHAPES: list[Any] = [(3, 5), (1300,), (4, 2, 3), (16, 130), (129,), (40, 30)]
STRATEGIES = ["no_shard", "optim", "optim_grads"]
STATES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "masters": (BF16, {}),
    "remainders": (BF16, {"store_param_remainders": True}),
    "8 bits": (BF16, {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
}


def _policy(states: str, bucket_size: int | None = 900) -> Any:
    dtype, config = STATES[states]
    return torch_ext.load_policy(
        dtype,
        override_optimizer_config={"main_grads_dtype": FP32, "use_precision_aware_optimizer": True, **config},
        override_ddp_config={"grad_comm_dtype": FP32, "bucket_size": bucket_size},
    )


def _build(states: str, **options: Any) -> tuple[Any, Any]:
    """Returns a model that is not parallel and its optimizer. states: a key of STATES."""
    model: Any = Given(SHAPES, STATES[states][0])
    weights = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=weights))
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=_policy(states), **options)


def _steps(model: Any, optimizer: Any, which: range) -> None:
    """Takes the training steps whose numbers are in `which`; frozen parameters get no gradient."""
    for step in which:
        grads = noise(step, 0, SHAPES, BF16)
        trained = [p.requires_grad for p in model.parameters()]
        model([g if there else None for g, there in zip(grads, trained, strict=True)]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _set_trained(model: Any, trained: set[int]) -> None:
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i in trained)


def _whole(model: Any, optimizer: Any) -> dict[str, list[bytes]]:
    """Returns the bits of weights and of the logical states that there are, by name, on every rank."""
    state = optimizer.consolidate_state_dict(to=None)["state"]
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        weight = p.full_tensor() if hasattr(p, "full_tensor") else p
        found[name] = bits([weight.detach(), *(value.clone() for value in state.get(i, {}).values())])
    optimizer.zero_grad()
    return found


def _plan(seed: int) -> list[tuple[set[int], str, int | None, int]]:
    """Draws a sequence of (trained parameters, strategy, bucket_size, steps). At least one parameter is trained."""
    draw = random.Random(seed)
    found = []
    for _ in range(5):
        trained = {i for i in range(len(SHAPES)) if draw.random() < 0.6} or {3}
        found.append((trained, draw.choice(STRATEGIES), draw.choice([300, 900, None]), draw.randrange(1, 3)))
    return found


def _random(rank: int, world: int, states: str, seed: int) -> None:
    """Goes through the sequence; after each change and each run of steps all bits must be those of the plain model."""
    model, optimizer = _build(states, offload_fraction=0.5 * (seed % 2))
    plain, reference = _build(states)
    at = 0
    for trained, strategy, bucket_size, steps in _plan(seed):
        for one in (model, plain):
            _set_trained(one, trained)
        had = _whole(model, optimizer)
        torch_ext.parallelize(model, _policy(states, bucket_size), strategy=strategy, optimizer=optimizer)
        assert _whole(model, optimizer) == had == _whole(plain, reference), f"{trained}, {strategy}"
        for one, its in ((model, optimizer), (plain, reference)):
            _steps(one, its, range(at, at + steps))
        at += steps
        assert _whole(model, optimizer) == _whole(plain, reference), f"{trained}, {strategy} after {at} steps"


@pytest.mark.parametrize("states", STATES)
def test_any_sequence_of_layouts_ends_in_the_bits_of_none(states: str) -> None:
    for seed in range(2):
        ranks.run(2, _random, states, 10 * list(STATES).index(states) + seed)


def _fsdp2(rank: int, world: int) -> None:
    """Under FSDP2 states are DTensors and stay where they are. Frozen parameters are sharded, too."""
    for states in ("masters", "8 bits"):
        model, optimizer = _build(states)
        plain, reference = _build(states)
        at = 0
        for trained in ({1, 3, 5}, {0, 1, 2, 3, 4, 5}, {0, 1, 2}, {3}, {0, 2, 3, 4}):
            for one in (model, plain):
                _set_trained(one, trained)
            had = _whole(model, optimizer)
            torch_ext.parallelize(model, _policy(states), strategy="optim_grads_params", optimizer=optimizer)
            assert _whole(model, optimizer) == had, trained
            for one, its in ((model, optimizer), (plain, reference)):
                _steps(one, its, range(at, at + 2))
            at += 2
            assert _whole(model, optimizer) == _whole(plain, reference), f"{trained} after {at} steps"


def test_layers_that_thaw_under_fsdp2() -> None:
    ranks.run(2, _fsdp2)


def _into_fsdp2(rank: int, world: int, strategy: str) -> None:
    """Moves a model with state from each strategy to FSDP2; training must go on with the bits of the plain model."""
    model, optimizer = _build("8 bits")
    plain, reference = _build("8 bits")
    if strategy != "none":
        torch_ext.parallelize(model, _policy("8 bits"), strategy=strategy)
    for one, its in ((model, optimizer), (plain, reference)):
        _steps(one, its, range(2))
    torch_ext.parallelize(model, _policy("8 bits"), strategy="optim_grads_params", optimizer=optimizer)
    assert all(hasattr(p, "full_tensor") for p in optimizer.param_groups[0]["params"])
    for one, its in ((model, optimizer), (plain, reference)):
        _steps(one, its, range(2, 4))
    assert _whole(model, optimizer) == _whole(plain, reference)


@pytest.mark.parametrize("strategy", ["none", *STRATEGIES])
def test_any_layout_may_become_fsdp2s(strategy: str) -> None:
    ranks.run(2, _into_fsdp2, strategy)


def _scheduled(rank: int, world: int, strategy: str) -> None:
    """The optimizer stays the same object: its scheduler goes on, groups can be added, states of other parameters
    stay."""
    model, optimizer = _build("remainders")
    aside = torch.nn.Parameter(torch.zeros(5))
    _set_trained(model, {0, 1, 2, 3, 4})
    torch_ext.parallelize(model, _policy("remainders"), strategy=strategy)
    optimizer = torch_ext.AdamW([model.p0, model.p1, model.p2, model.p3, aside], lr=0.1, policy=optimizer.policy)
    second = torch_ext.AdamW([model.p4], lr=0.1, policy=optimizer.policy)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(2):
        aside.grad = torch.ones(5)
        model([*noise(step, 0, SHAPES[:5], BF16), None]).backward()
        optimizer.step()
        second.step()
        scheduler.step()
        optimizer.zero_grad()
        second.zero_grad()
    had = _whole(model, optimizer), _whole(model, second), bits(list(optimizer.state[aside].values()))
    _set_trained(model, {0, 1, 2, 3, 4, 5})
    words = "AdamW\\) has state for parameter 'p4'.*optimizer=optimizer"
    with pytest.raises(RuntimeError, match=words):
        torch_ext.parallelize(model, _policy("remainders"), strategy=strategy, optimizer=optimizer)
    torch_ext.parallelize(model, _policy("remainders"), strategy=strategy, optimizer=[optimizer, second])
    optimizer.add_param_group({"params": [model.p5], "lr": 0.05})
    assert (_whole(model, optimizer)["p0"], _whole(model, second)["p4"]) == (had[0]["p0"], had[1]["p4"])
    assert bits(list(optimizer.state[aside].values())) == had[2]
    model(noise(2, 0, SHAPES, BF16)).backward()
    optimizer.step()
    second.step()
    assert [float(optimizer.state[p]["step"]) for p in (model.p0, aside, model.p5)] == [3.0, 2.0, 1.0]
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1 / 3)
    assert float(second.state[model.p4]["step"]) == 3.0


@pytest.mark.parametrize("strategy", [*STRATEGIES, "optim_grads_params"])
def test_optimizers_go_on_as_the_objects_that_they_were(strategy: str) -> None:
    ranks.run(2, _scheduled, strategy)


def _rank_0s(rank: int, world: int, strategy: str) -> None:
    """The ranks' weights differ. They become rank 0's, and the states must become rank 0's, too."""
    model, optimizer = _build("8 bits")
    _steps(model, optimizer, range(10 * rank, 10 * rank + 2))
    torch_ext.parallelize(model, _policy("8 bits"), strategy=strategy, optimizer=optimizer)
    expected = _build("8 bits")
    _steps(*expected, range(2))
    assert _whole(model, optimizer) == _whole(*expected)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "optim_grads_params"])
def test_states_become_rank_0s_as_weights_do(strategy: str) -> None:
    ranks.run(2, _rank_0s, strategy)


def _torchs(rank: int, world: int) -> None:
    """torch's optimizers can be kept under no_shard, where their states are whole."""
    model, _ = _build("fp32")
    _set_trained(model, {0, 1})
    torch_ext.parallelize(model, _policy("fp32"), strategy="no_shard")
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    _steps(model, theirs, range(2))
    had = bits(list(theirs.state[model.p0].values()))
    _set_trained(model, {1, 2})
    with pytest.raises(
        TypeError, match="AdamW cannot be passed as optimizer= from 'no_shard' to 'optim'.*torch_ext.AdamW"
    ):
        torch_ext.parallelize(model, _policy("fp32"), strategy="optim", optimizer=theirs)
    torch_ext.parallelize(model, _policy("fp32"), strategy="no_shard", optimizer=theirs)
    _steps(model, theirs, range(2, 3))
    assert bits(list(theirs.state[model.p0].values())) == had
    assert [float(theirs.state[p]["step"]) for p in (model.p1, model.p2)] == [3.0, 1.0]


def test_torchs_optimizers_stay_under_no_shard() -> None:
    ranks.run(2, _torchs)


# -- what is rejected, and must change nothing -----------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a policy with other states": (
        {"policy": _policy("masters")},
        ValueError,
        "the policy has changed: it stores the state of 'p0' as moments in torch.bfloat16 and torch.bfloat16 with an "
        "fp32 master, and the optimizer has moments in torch.uint8 .* in remainders",
    ),
    "no optimizer": ({"optimizer": None}, RuntimeError, r"AdamW\) has state for parameter 'p0'.*optimizer=optimizer"),
    "a model": ({"optimizer": "model"}, TypeError, "optimizer is a Given; an optimizer, or a list of them"),
}


def _refused(rank: int, world: int, strategy: str) -> None:
    """After every rejected call, training must go on with the bits of a run without it."""
    model, optimizer = _build("8 bits")
    torch_ext.parallelize(model, _policy("8 bits"), strategy=strategy)
    _steps(model, optimizer, range(2))
    had = _whole(model, optimizer)
    for change, kind, words in REFUSED.values():
        options = {"policy": _policy("8 bits"), "optimizer": optimizer, **change}
        if options["optimizer"] == "model":
            options["optimizer"] = [model]
        with pytest.raises(kind, match=words):
            torch_ext.parallelize(model, options.pop("policy"), strategy=strategy, **options)
    alone = torch.distributed.new_group([0]), torch.distributed.new_group([1])
    if strategy != "no_shard":
        with pytest.raises(ValueError, match=r"sharded over ranks \[0, 1\], and the process group has ranks \["):
            torch_ext.parallelize(
                model, _policy("8 bits"), strategy=strategy, optimizer=optimizer, process_group=alone[rank]
            )
    with optimizer.master_weights(), pytest.raises(RuntimeError, match="within master_weights"):
        torch_ext.parallelize(model, _policy("8 bits"), strategy=strategy, optimizer=optimizer)
    other = torch_ext.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(RuntimeError, match="on rank 0: an optimizer .*" * rank + "has state for parameter 'p0'"):
        torch_ext.parallelize(model, _policy("8 bits"), strategy=strategy, optimizer=optimizer if rank else other)
    assert _whole(model, optimizer) == had
    _steps(model, optimizer, range(2, 3))
    plain, reference = _build("8 bits")
    _steps(plain, reference, range(3))
    assert _whole(model, optimizer) == _whole(plain, reference), "goes on as if nothing had been asked"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_cannot_be_taken_along_is_refused(strategy: str) -> None:
    ranks.run(2, _refused, strategy)


# -- optimizers that are gone ----------------------------------------------------------------------------------------


def _fails(model: Any, optimizer: Any, kept: list[BaseException]) -> None:
    """Stores the error of a step, with the frames of its traceback, which refer to the optimizer."""
    model(noise(5, 0, SHAPES, BF16)).backward()
    optimizer.param_groups[0]["eps"] = -1.0
    try:
        optimizer.step()
    except ValueError as error:
        kept.append(error)


def _failed(strategy: str, kept: list[BaseException]) -> Any:
    """Returns a model whose optimizer has failed and is referred to by `kept` only."""
    model, optimizer = _build("fp32")
    torch_ext.parallelize(model, _policy("fp32"), strategy=strategy)
    _steps(model, optimizer, range(1))
    _fails(model, optimizer, kept)
    model.zero_grad()
    return model


def _after_an_error(rank: int, world: int, strategy: str) -> None:
    """Parallelizes again while only a stored traceback refers to the former optimizer."""
    kept: list[BaseException] = []
    model = _failed(strategy, kept)
    assert len(kept) == 1
    torch_ext.parallelize(model, _policy("fp32"), strategy=strategy)  # only the traceback refers to the optimizer
    _steps(model, torch_ext.AdamW(model.named_parameters(), lr=0.1), range(1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stored_traceback_keeps_nobody_from_parallelizing_again(strategy: str) -> None:
    ranks.run(2, _after_an_error, strategy)
