"""step_in_backward: each bucket is stepped as soon as its sum is there. The bits must be those of a step at the end."""

import copy
import gc
import time
import warnings
from typing import Any

import internals
import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, bits, noise

import torch_ext

EARLY = {"step_in_backward": True, "bucket_size": 1}
SHAPES: list[Any] = [(3, 5), (700,), (0,), (129,), (16, 130), (1,)]


def _policy(early: bool, **options: Any) -> Any:
    return torch_ext.load_policy(
        BF16,
        override_optimizer_config={"main_grads_dtype": FP32, **options.pop("optimizer", {})},
        override_ddp_config={"step_in_backward": early, "bucket_size": 1, **options},
    )


def _build(strategy: str, early: bool, **optimizer: Any) -> tuple[Any, Any]:
    """Returns the model and its optimizer with two groups. early: step_in_backward."""
    torch.manual_seed(7)
    model: Any = Given(SHAPES, BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    chosen = _policy(early)
    torch_ext.parallelize(model, chosen, strategy=strategy)
    groups = [{"params": list(model.named_parameters())[:3], "lr": 0.1}, {"params": list(model.named_parameters())[3:]}]
    return model, torch_ext.AdamW(groups, lr=0.01, policy=chosen, **optimizer)


def _trained(rank: int, strategy: str, early: bool, microbatches: int) -> tuple[list[bytes], list[float]]:
    """Returns the weights after four steps under a schedule, and after each backward the fraction of this rank's
    parameters that had changed."""
    model, optimizer = _build(strategy, early)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    changed: list[list[bool]] = []
    for step in range(4):
        for microbatch in range(microbatches):
            before = [p.detach().clone() for p in model.parameters()]
            with model.sync() if microbatch == microbatches - 1 else model.no_sync():
                model(noise(10 * step + microbatch, rank, SHAPES, BF16)).backward()
            changed.append([not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)])
            last = microbatch == microbatches - 1
            assert not any(changed[-1]) or (early and last and step > 0), "nothing is stepped that more is to come for"
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert all(optimizer.state[p]["step"] == 4 for p in model.parameters())
    mine = [i for i, p in enumerate(model.parameters()) if optimizer.state[p]["exp_avg"].numel()]
    shares = [sum(each[i] for i in mine) / max(1, len(mine)) for each in changed]
    return bits(list(model.parameters())), shares


def _compared(rank: int, world: int, strategy: str, joined: bool) -> None:
    """Weights must be those of steps at the end, although many are stepped before backward returns."""
    for microbatches in (1, 2):
        late, _ = _trained(rank, strategy, False, microbatches)
        with pytest.MonkeyPatch.context() as patch:
            if joined:
                internals.join_pairs(patch)
            early, changed = _trained(rank, strategy, True, microbatches)
        assert late == early
        assert changed[-1] > 0.5 and changed[0] == 0.0, "states are made by the first step()"


@pytest.mark.parametrize("joined", [False, True], ids=["one by one", "joined"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_bits_of_a_step_in_backward(strategy: str, joined: bool) -> None:
    ranks.run(3, _compared, strategy, joined)


def _beside_others(rank: int, world: int, begins: bool) -> None:
    """Another model is created or dropped between a backward that stepped and step(); it must change nothing."""
    weights = []
    for early in (True, False):
        model, optimizer = _build("optim", early)
        for step in range(4):
            others = [] if begins else [_build("no_shard", False)]
            _backward(model, rank, step)
            if begins:
                others.append(_build("no_shard", False))
            others.clear()
            gc.collect()
            assert optimizer.stepped_in_backward() == (early and step > 0), "states are made by the first step()"
            optimizer.step()
            optimizer.zero_grad()
        weights.append(bits(list(model.parameters())))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("begins", [False, True], ids=["ends", "begins"])
def test_another_model_that_begins_or_ends_changes_nothing(begins: bool) -> None:
    ranks.run(2, _beside_others, begins)


def _backward(model: Any, rank: int, step: int = 0) -> None:
    model(noise(step, rank, SHAPES, BF16)).backward()


def _wrong(rank: int, world: int) -> None:
    """Clipping, and a second backward, must raise after a backward that stepped."""
    model, optimizer = _build("optim", True)
    _backward(model, rank)
    torch_ext.clip_grad_norm_(optimizer, 1.0)  # legal, as the first backward steps nothing
    optimizer.step()
    optimizer.zero_grad()
    _backward(model, rank)
    with pytest.raises(RuntimeError, match="applied before they were clipped"):
        torch_ext.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="second backward before step"):
        _backward(model, rank)


def _left_out(rank: int, world: int) -> None:
    """Calls zero_grad() instead of step(): every rank must have the stepped weights."""
    model, optimizer = _build("optim", True)
    for step in range(2):
        _backward(model, rank, step)
        if step == 0:
            optimizer.step()
        optimizer.zero_grad()
    other, late = _build("optim", False)
    for step in range(2):
        _backward(other, rank, step)
        late.step()
        late.zero_grad()
    assert bits(list(model.parameters())) == bits(list(other.parameters()))


def _skips(rank: int, world: int) -> None:
    """With skip_nonfinite=True a backward would step before it is known whether to skip, and must raise."""
    model, optimizer = _build("optim", True, skip_nonfinite=True)
    _backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="skip_nonfinite=True"):
        _backward(model, rank)


def _raises(rank: int, world: int) -> None:
    """A backward that raises after it has stepped some buckets leaves weights of two steps: later calls must say so."""
    model, optimizer = _build("optim", True)
    for step in range(2):
        _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    model.p0.register_hook(fail)  # p0's gradient comes last
    with pytest.raises(ZeroDivisionError):
        _backward(model, rank, 2)
    for go_on in (optimizer.step, lambda: _backward(model, rank, 3)):
        with pytest.raises(RuntimeError, match="partly those of the next step. Load a checkpoint"):
            go_on()


def _under_no_sync(rank: int, world: int) -> None:
    """After a backward that stepped, gradients under no_sync would be lost, or be those of partly stepped weights."""
    for strategy in ("optim", "optim_grads"):
        model, optimizer = _build(strategy, True)
        _backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        _backward(model, rank, 1)
        with pytest.raises(RuntimeError, match="second backward before step"), model.no_sync():
            _backward(model, rank, 2)


def _parts_on_the_host(rank: int, world: int) -> None:
    """One rank steps all of its parts on the host and the other does not. Both must get the same errors."""
    for what in ("zero_grad", "backward", "clip_grad_norm_"):
        model: Any = torch_ext.parallelize(
            Given([(100,), (300,)]), torch_ext.load_policy(FP32, override_ddp_config=EARLY), strategy="optim"
        )
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, offload_fraction=1.0)
        ones = [torch.ones(100), torch.ones(300)]
        model(ones).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(ones).backward()
        if what == "zero_grad":
            optimizer.zero_grad()
        elif what == "backward":
            with pytest.raises(RuntimeError, match="second backward before step"):
                model(ones).backward()
        else:
            with pytest.raises(RuntimeError, match="applied before they were clipped"):
                torch_ext.clip_grad_norm_(optimizer, 1.0)


def _late_lane(rank: int, world: int) -> None:
    """All ranks raise at the same place, and one of them has not stepped its buckets yet when the others ask."""
    model, optimizer = _stepped_in_part(rank, late=0.4 if rank == 1 else 0.0)
    begin = time.monotonic()
    optimizer.zero_grad()
    assert time.monotonic() - begin < 15, "a rank waited for one that did not respond"
    with pytest.raises(RuntimeError, match="partly those of the next step. Load a checkpoint"):
        _backward(model, rank, 3)


def _again(rank: int, world: int) -> None:
    """A second parallelize would broadcast rank 0's weights although they are partly stepped, and must warn, once."""
    model, optimizer = _stepped_in_part(rank)
    del optimizer
    gc.collect()
    with pytest.warns(
        UserWarning, match="partly those of the next step. Load a checkpoint. Unless a checkpoint was loaded"
    ):
        torch_ext.parallelize(model, _policy(True), strategy="optim")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_ext.parallelize(model, _policy(True), strategy="optim")
    _backward(model, rank, 3)


def _stepped_in_part(rank: int, late: float = 0.0) -> tuple[Any, Any]:
    """Returns a model and its optimizer after a backward that raised at its last gradient."""
    model, optimizer = _build("optim", True)
    for step in range(2):
        _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()

    def fail(grad: torch.Tensor) -> None:
        time.sleep(0.1)
        raise ZeroDivisionError

    handle = model.p0.register_hook(fail)
    with pytest.MonkeyPatch.context() as patch:
        internals.before_sums(lambda: time.sleep(late), patch)
        with pytest.raises(ZeroDivisionError):
            _backward(model, rank, 2)
    handle.remove()
    return model, optimizer


BODIES = {
    "clip and backward": _wrong,
    "zero_grad": _left_out,
    "skip_nonfinite": _skips,
    "an exception": _raises,
    "no_sync": _under_no_sync,
    "parts on the host": _parts_on_the_host,
    "an exception, and a late rank": _late_lane,
    "an exception, and parallelize again": _again,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_comes_too_late(body: Any) -> None:
    ranks.run(2, body)


def _lost(rank: int, world: int) -> None:
    """Rank 1 leaves a backward in which some buckets were stepped; rank 0's zero_grad() must not wait for it."""
    model, optimizer = _build("optim", True)
    for step in range(2):
        _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()

    def leave(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    if rank == 1:
        model.p0.register_hook(leave)
        with pytest.raises(ZeroDivisionError):
            _backward(model, rank, 2)
        time.sleep(6)
        return
    with pytest.raises(RuntimeError, match="rank 1 did not respond"):
        _backward(model, rank, 2)
    assert optimizer.stepped_in_backward()
    optimizer.zero_grad()
    assert not optimizer.stepped_in_backward()


def test_zero_grad_after_a_lost_rank() -> None:
    ranks.run(2, _lost, timeout=3.0)


REFUSED: list[Any] = [
    ("no_shard", {}, {}, "'no_shard'"),
    ("optim_grads_params", {}, {}, "'optim_grads_params'"),
    ("optim", {"check_for_nan_in_grad": True}, {}, "check_for_nan_in_grad=True"),
    ("optim", {"optimizer": {"clip_grad": 1.0}}, {}, "clip_grad=1.0"),
    ("optim", {}, {"find_unused_parameters": True}, "find_unused_parameters=True"),
]


def _refuses(rank: int, world: int) -> None:
    for strategy, options, arguments, words in REFUSED:
        with pytest.raises(ValueError, match=f"step_in_backward=True.*{words}"):
            torch_ext.parallelize(Given(SHAPES, BF16), _policy(True, **dict(options)), strategy=strategy, **arguments)


def test_what_would_have_to_be_known_before() -> None:
    ranks.run(1, _refuses)


# -- the optimizer's argument step_in_backward -----------------------------------------------------------------------


def _argument(rank: int, world: int) -> None:
    """For a reduced model the policy decides; the optimizer's argument must agree with it or be rejected."""
    for strategy, early in (("optim", True), ("optim", False), ("optim_grads", True), ("no_shard", False)):
        model, optimizer = _build(strategy, early, step_in_backward=True)
        if early:
            other, late = _build(strategy, False)
            for step in range(3):
                for each, by in ((model, optimizer), (other, late)):
                    _backward(each, rank, step)
                    by.step()
                    by.zero_grad()
            assert bits(list(model.parameters())) == bits(list(other.parameters()))
            continue
        before = bits(list(model.parameters()))
        with pytest.raises(RuntimeError, match="whose model was parallelized without it"):
            _backward(model, rank)
        assert bits(list(model.parameters())) == before
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch_ext.AdamW(wrapped.parameters(), step_in_backward=True)
    with pytest.raises(RuntimeError, match="step_in_backward=True under DistributedDataParallel"):
        wrapped(torch.ones(1, 4)).sum().backward()
    alone = torch.nn.Linear(4, 4)
    optimizer = torch_ext.AdamW(alone.parameters(), step_in_backward=True)
    alone(torch.ones(1, 4)).sum().backward()
    assert optimizer.stepped_in_backward() and alone.weight.grad is None


def test_the_argument_of_an_optimizer_beside_a_policy() -> None:
    ranks.run(2, _argument)


# -- between a backward that steps and step() --------------------------------------------------------------------------


def _between(rank: int, world: int) -> None:
    """Calls that would change the plan must be rejected by name, and training must go on as without them."""
    for strategy in ("optim", "optim_grads"):
        (model, optimizer), (plain, other) = (_build(strategy, True, ema_decay=0.9) for _ in range(2))
        for step in range(4):
            for each, by in ((model, optimizer), (plain, other)):
                _backward(each, rank, step)
                if each is model and step > 0:
                    for call in (optimizer.measure_health, optimizer.master_weights, optimizer.ema_weights):
                        words = rf"{call.__name__}\(\) after a backward that stepped .* call step\(\) first"
                        with pytest.raises(RuntimeError, match=words):
                            call().__enter__()
                by.step()
                by.zero_grad()
        assert bits(list(model.parameters())) == bits(list(plain.parameters()))


def _loads_between(rank: int, world: int, then: str) -> None:
    """A state loaded there would be stepped again, by gradients that backward has already applied."""
    model, optimizer = _build("optim", True)
    counts, saved = [], {}
    for step in range(5):
        _backward(model, rank, step)
        if step == 3:
            kept = bits([*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())])
            words = r"load_state_dict\(\) after a backward that stepped .* call step\(\) or zero_grad\(\) first"
            with pytest.raises(RuntimeError, match=words):
                optimizer.load_state_dict(saved)
            assert bits([*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())]) == kept
            getattr(optimizer, then)()
            optimizer.load_state_dict(saved)
        else:
            optimizer.step()
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        counts.append({int(entry["step"]) for entry in optimizer.state.values()})
    assert counts == [{1}, {2}, {3}, {2}, {3}]


@pytest.mark.parametrize("then", ["step", "zero_grad"])
def test_loading_between_backward_and_step(then: str) -> None:
    ranks.run(2, _loads_between, then)


def test_what_is_refused_between_backward_and_step() -> None:
    ranks.run(2, _between)


def _dropped(rank: int, world: int) -> None:
    """zero_grad() after a backward that stepped keeps the step; a publisher must publish it."""
    model, optimizer = _build("optim", True)
    publisher = torch_ext.WeightPublisher(model, optimizer)
    engine = {name: p.detach().clone() for name, p in model.named_parameters()}
    subscriber = torch_ext.WeightSubscriber(engine)
    for step in range(6):
        _backward(model, rank, 2 * step)
        if step == 0:
            optimizer.step()  # creates states; only later backwards step
        assert optimizer.stepped_in_backward() == (step > 0)
        optimizer.zero_grad()
        _backward(model, rank, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
        parts: list[Any] = [None] * world
        torch.distributed.all_gather_object(parts, publisher.publish())
        subscriber.apply(parts, "full")
        assert bits(list(engine.values())) == bits(list(model.parameters()))


def test_gradients_that_are_dropped_after_they_were_applied() -> None:
    ranks.run(2, _dropped)
