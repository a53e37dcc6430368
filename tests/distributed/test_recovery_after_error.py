"""A mistake of user code must be an error that names it, or give the right result. Training must go on afterwards."""

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import strategies
import torch
from gradients import FP16, Given, bits, noise, on_all_ranks, policy, whole_gradients
from strategies import SHARDED, STRATEGIES

import torch_ext

SHAPES = [(4,), (200,), (3,)]


def _parallel(strategy: str, **options: Any) -> Any:
    chosen = policy(bucket_size=1, overlap_grad_reduce=True)
    return torch_ext.parallelize(Given(SHAPES), chosen, strategy=strategy, **options)


def _ones(factor: float = 1.0) -> list[torch.Tensor]:
    return [torch.full(s, factor) for s in SHAPES]


def _gradients_are(model: Any, values: list[torch.Tensor]) -> bool:
    """Whether the gradients are close to these values."""
    return all(torch.allclose(g, v) for g, v in zip(whole_gradients(model), values, strict=True))


def _mean(step: int, world: int) -> list[torch.Tensor]:
    """Returns the mean of the ranks' noise of this step."""
    each = [noise(step, r, SHAPES) for r in range(world)]
    return [torch.stack(grads).sum(0) / world for grads in zip(*each, strict=True)]


# -- exceptions in user code --------------------------------------------------------------------------------------


class _Oops(Exception):
    pass


def _oops(_grad: torch.Tensor) -> None:
    raise _Oops


def _raises_in_backward(model: Any, grads: list[torch.Tensor]) -> None:
    """Raises in a backward after p2's bucket was sent, and before the other two."""
    handle = model.p1.register_hook(_oops)
    with pytest.raises(_Oops):
        model(grads).backward()
    handle.remove()


def _zeroed_by_others(rank: int, world: int, who: str) -> None:
    """Calls zero_grad after a backward that raised, while sums for it are still to come from a rank that is late."""
    model = _parallel("no_shard")
    model(_ones()).backward()
    outer, optimizer = torch.nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=1.0)
    if rank == 1:
        time.sleep(1.0)
    _raises_in_backward(model, _ones())
    {"an optimizer": optimizer, "a module around it": outer, "the model": model}[who].zero_grad(set_to_none=False)
    time.sleep(0.5)
    assert not any(p.grad.any() for p in model.parameters())
    model(_ones(1.0 + rank)).backward()
    assert _gradients_are(model, _ones(1.5))


@pytest.mark.parametrize("who", ["an optimizer", "a module around it", "the model"])
def test_nothing_comes_into_gradients_that_others_zeroed(who: str) -> None:
    ranks.run(2, _zeroed_by_others, who)


def _after_other_gradients(rank: int, world: int, strategy: str) -> None:
    """Raises on both ranks after a backward in which each rank left out another parameter. Both must have sent the same
    buckets."""
    model = _parallel(strategy, find_unused_parameters=True)
    first: list[Any] = _ones()
    first[2 - rank] = None
    model(first).backward()
    model.zero_grad()
    handle = model.p0.register_hook(_oops)
    with pytest.raises(_Oops):
        model(_ones()).backward()
    handle.remove()
    model.zero_grad()
    model(_ones(1.0 + rank)).backward()
    assert _gradients_are(model, _ones(1.5))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_raise_alike_have_sent_the_same(strategy: str) -> None:
    ranks.run(2, _after_other_gradients, strategy, timeout=10.0)


def _between_microbatches(model: Any, rank: int) -> None:
    with pytest.raises(_Oops), model.no_sync():
        model(_ones()).backward()
        raise _Oops


def _on_one_rank(model: Any, rank: int) -> None:
    if rank == 1:
        with pytest.raises(_Oops), model.no_sync():
            raise _Oops


def _in_the_first(model: Any, rank: int) -> None:
    _raises_in_backward(model, _ones())


def _in_the_second(model: Any, rank: int) -> None:
    model(_ones()).backward()
    _raises_in_backward(model, _ones())


def _in_the_second_of_no_sync(model: Any, rank: int) -> None:
    with model.no_sync():
        model(_ones()).backward()
        _raises_in_backward(model, _ones())


def _twice_in_a_row(model: Any, rank: int) -> None:
    _raises_in_backward(model, _ones())
    _raises_in_backward(model, _ones())


EXCEPTIONS: dict[str, Callable[[Any, int], None]] = {
    "between micro-batches": _between_microbatches,
    "between micro-batches, on one rank": _on_one_rank,
    "in the first backward": _in_the_first,
    "in the second backward": _in_the_second,
    "in the second backward under no_sync": _in_the_second_of_no_sync,
    "in two backwards": _twice_in_a_row,
}
ZEROING: dict[str, Callable[[Any, Any], None]] = {
    "model": lambda model, _: model.zero_grad(),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer, to zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


def _goes_on(rank: int, world: int, strategy: str) -> None:
    """Raises in every place, zeroes the gradients in every way: the next two steps must have the right means."""
    for fails in EXCEPTIONS.values():
        for zero in ZEROING.values():
            model = _parallel(strategy)
            optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
            for p in (None, model.p2):  # in the first backward of all, and in a later one
                if p is not None:
                    model(_ones()).backward()
                    optimizer.step()
                    zero(model, optimizer)
                fails(model, rank)
                zero(model, optimizer)
                for step in range(2):
                    model(noise(step, rank, SHAPES)).backward()
                    assert _gradients_are(model, _mean(step, world))
                    optimizer.step()
                    zero(model, optimizer)


def test_training_goes_on_after_an_exception() -> None:
    strategies.run(2, _goes_on)


def _jitters(rank: int, world: int, strategy: str) -> None:
    """Many buckets, ranks that are ahead or behind in turn, and exceptions that come on all ranks at the same place."""
    shapes = [(130 + 17 * i,) for i in range(12)]
    model: Any = torch_ext.parallelize(
        Given(shapes), policy(bucket_size=1, overlap_grad_reduce=True), strategy=strategy
    )
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    own, common = random.Random(rank), random.Random(world)
    failing = -1

    def hook(i: int) -> Callable[[torch.Tensor], None]:
        def jitter(grad: torch.Tensor) -> None:
            if own.random() < 0.1:
                time.sleep(own.random() * 0.01)
            if i == failing:
                raise _Oops

        return jitter

    for i, p in enumerate(model.parameters()):
        p.register_hook(hook(i))
    for step in range(10):
        failing = common.randrange(len(shapes)) if common.random() < 0.4 else -1
        grads = noise(step, rank, shapes)
        if failing >= 0:
            with pytest.raises(_Oops):
                model(grads).backward()
            optimizer.zero_grad()
            failing = -1
        for _ in range(2):
            model(grads).backward()
        each = [noise(step, r, shapes) for r in range(world)]
        for found, of_ranks in zip(whole_gradients(model), zip(*each, strict=True), strict=True):
            assert torch.allclose(found, 2 * torch.stack(of_ranks).sum(0) / world, rtol=1e-5, atol=1e-6)
        if own.random() < 0.3:
            time.sleep(own.random() * 0.02)
        optimizer.step()
        optimizer.zero_grad()
    assert on_all_ranks(bits(list(model.parameters())))[0] == bits(list(model.parameters()))


def test_ranks_that_are_now_ahead_and_now_behind() -> None:
    strategies.run(3, _jitters)


def _before_and_after_the_first_gradient(rank: int, world: int) -> None:
    """One rank's backward raises before any gradient is ready, the other's after one is ready and before any is sent.
    Both count this backward, although the first has begun no cycle. torch.autograd.grad is counted nowhere."""
    for strategy in STRATEGIES:
        model: Any = torch_ext.parallelize(Given(SHAPES), policy(bucket_size=1000), strategy=strategy)
        for step in range(4):
            model.zero_grad()
            loss = model(_ones())
            raises = loss if rank == step % 2 else model.p0
            handle = raises.register_hook(_oops)
            with pytest.raises(_Oops):
                loss.backward()
            handle.remove()
            if rank == 0:
                torch.autograd.grad(model(_ones()), [model.p1])
                loss = model(_ones())
                loss.register_hook(_oops)
                with pytest.raises(_Oops):
                    torch.autograd.grad(loss, [model.p1])
            model.zero_grad()
            model(noise(step, rank, SHAPES)).backward()
            assert _gradients_are(model, _mean(step, world)), f"{strategy}, {step}"


def test_ranks_that_raise_before_and_after_their_first_gradient() -> None:
    ranks.run(2, _before_and_after_the_first_gradient, timeout=5.0)


def _without_zeroing(rank: int, world: int, strategy: str) -> None:
    """Without zero_grad() gradients from before the exception count, as in torch; reduced ones count once. Under
    optim_grads step() raises, since some sums were added already."""
    for factor, scale in ((None, 0.5), (1.0, 1.0)):
        model = _parallel(strategy, gradient_divide_factor=factor)
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
        model(_ones()).backward()
        model.zero_grad()
        model(_ones(1.0 + rank)).backward()
        _raises_in_backward(model, _ones(10.0))
        model(_ones(100.0 * (1 + rank))).backward()
        if strategy == "optim_grads":
            with pytest.raises(RuntimeError, match="a backward that raised when some of its sums were added already"):
                optimizer.step()
            continue
        added = [303.0 * scale, 303.0 * scale, 303.0 * scale + 20.0 * scale]
        assert _gradients_are(model, [torch.full(s, a) for s, a in zip(SHAPES, added, strict=True)])
        optimizer.step()


def test_going_on_without_zero_grad_adds_what_came() -> None:
    strategies.run(2, _without_zeroing)


def _steps_after(rank: int, world: int, strategy: str) -> list[str]:
    """step() and clipping after a backward that raised must raise until every optimizer has zeroed its gradients."""
    model = _parallel(strategy)
    halves = [torch_ext.AdamW([model.p0, model.p1], lr=0.1), torch_ext.AdamW([model.p2], lr=0.1)]
    model(_ones()).backward()
    _raises_in_backward(model, _ones())
    messages = []
    for optimizer in halves:
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        messages.append(str(raised.value))
        with pytest.raises(RuntimeError):
            torch_ext.clip_grad_norm_(optimizer, 1.0)
    assert not any(p.any() for p in model.parameters())
    halves[0].zero_grad()
    with pytest.raises(RuntimeError, match="zero_grad"):
        halves[1].step()
    halves[1].zero_grad()
    model(_ones()).backward()
    for optimizer in halves:
        optimizer.step()
    assert all(torch.allclose(p, torch.tensor(-0.1)) for p in model.parameters())
    return messages


def test_step_after_a_backward_that_raised_is_an_error() -> None:
    words = {"no_shard": "no_sync(), or raised", "optim": "no_sync(), or raised", "optim_grads": "repeat the micro-bat"}
    for strategy, answers in strategies.run(2, _steps_after).items():
        for message in (message for messages in answers for message in messages):
            assert words[strategy] in message and "zero_grad()" in message


# -- calls that would lose gradients ---------------------------------------------------------------------------------


def _steps_unreduced(rank: int, world: int, strategy: str) -> None:
    """step() with gradients from no_sync() must raise and change nothing. Under optim_grads it is legal."""
    model = _parallel(strategy)
    optimizers: list[Any] = [torch_ext.AdamW(model.parameters(), lr=0.1)]
    if strategy == "no_shard":
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for optimizer in optimizers:
        model.zero_grad()
        before = model.p0.detach().clone()

        def closure(optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            with model.no_sync():
                model(_ones(1.0 + rank)).backward()

        with model.no_sync():
            model(_ones(1.0 + rank)).backward()
            if strategy == "optim_grads":
                optimizer.step()  # optim_grads reduces every backward, so nothing would be lost
                assert not torch.equal(model.p0, before)
                optimizer.step(closure)
                continue
            with pytest.raises(RuntimeError, match="'p0'.*no_sync"):
                optimizer.step()
        for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):  # noqa: B023
            with pytest.raises(RuntimeError, match="'p0'.*no_sync"):
                call()
        if isinstance(optimizer, torch_ext.AdamW):
            with pytest.raises(RuntimeError, match="'p0'.*no_sync"):
                torch_ext.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.equal(model.p0, before)
        model(_ones()).backward()
        optimizer.step()
        assert not torch.equal(model.p0, before)
        for set_to_none in (True, False):
            with model.no_sync():
                model(_ones()).backward()
            model.zero_grad(set_to_none)
            optimizer.step()  # there is no gradient to lose


def test_e8_step_with_gradients_of_no_sync_is_an_error() -> None:
    strategies.run(2, _steps_unreduced)


def _closes(rank: int, world: int, strategy: str) -> None:
    """A step's closure may run the backward that ends a cycle begun before the step, as Lightning accumulates."""
    steppers: list[Any] = [torch_ext.AdamW]
    if strategy == "no_shard":
        steppers.append(torch.optim.AdamW)
    for stepper in steppers:
        for by_name in (False, True):
            model = _parallel(strategy)
            optimizer = stepper(model.parameters(), lr=0.1)

            def closure(model: Any = model) -> float:
                model(_ones()).backward()
                return 4.0

            with model.no_sync():
                model(_ones(-3.0)).backward()
            assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)) == 4.0
            assert (model.p0 > 0.05).all(), "both backwards count, the larger one most"


def test_e8_closure_of_a_step_may_end_what_no_sync_began() -> None:
    strategies.run(2, _closes)


def _assigned(rank: int, world: int, strategy: str) -> None:
    """With sharded gradients a step does not read `.grad`. A value that was assigned there must be added by the next
    backward, and until then step() must raise."""
    model = _parallel(strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    model(_ones()).backward()
    model.p1.grad = torch.full((200,), 2.0 + rank)
    with pytest.raises(RuntimeError, match=r"'p1'.*`\.grad` was assigned where gradients are sharded"):
        optimizer.step()
    model(_ones()).backward()
    assert _gradients_are(model, [torch.full((4,), 2.0), torch.full((200,), 4.5), torch.full((3,), 2.0)])
    optimizer.step()
    model.p1.grad = torch.ones(200)
    model.zero_grad()
    optimizer.step()


def test_a_grad_assigned_beside_its_shard_is_not_passed_over() -> None:
    strategies.run(2, _assigned, chosen=["optim_grads"])


def _second_backward(rank: int, world: int, strategy: str) -> None:
    """Runs two backwards through one graph."""
    for factor, scale in ((None, 1.0), (1.0, 2.0)):
        model = _parallel(strategy, gradient_divide_factor=factor)
        loss = model(noise(5, rank, SHAPES))
        loss.backward(retain_graph=True)
        loss.backward()
        assert _gradients_are(model, [2 * scale * mean for mean in _mean(5, world)])


def test_e5_a_second_backward_without_a_step_loses_nothing() -> None:
    strategies.run(2, _second_backward)


# -- optimizers ---------------------------------------------------------------------------------------------------


def _foreign_optimizers(rank: int, world: int, strategy: str) -> None:
    """torch's own optimizers must raise on sharded gradients."""
    model = _parallel(strategy)
    model(_ones()).backward()
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        with pytest.raises(RuntimeError, match=f"{make.__name__} would step whole .*torch_ext.AdamW"):
            make(model.parameters(), lr=0.1).step()
        with pytest.raises(TypeError, match="use torch_ext.AdamW"):
            torch_ext.clip_grad_norm_(make(model.parameters(), lr=0.1), 1.0)  # type: ignore[arg-type]
    assert not any(p.any() for p in model.parameters())
    torch_ext.AdamW(model.parameters(), lr=0.1).step()
    assert all(torch.allclose(p, torch.tensor(-0.1)) for p in model.parameters())


def test_an_optimizer_of_others_on_sharded_gradients_is_an_error() -> None:
    strategies.run(2, _foreign_optimizers, chosen=SHARDED)


def _made_before(rank: int, world: int, strategy: str) -> None:
    """An optimizer created before parallelize may be used if it had no state."""
    model = Given(SHAPES)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    chosen = policy(bucket_size=1, overlap_grad_reduce=True)
    torch_ext.parallelize(model, chosen, strategy=strategy)
    model(_ones()).backward()
    optimizer.step()
    assert all(torch.allclose(p, torch.tensor(-0.1)) for p in model.parameters())
    for state in (True, False):
        copy = Given(SHAPES)
        early = torch_ext.AdamW(copy.parameters(), lr=0.1)
        if state:
            copy(_ones()).backward()
            early.step()
            early.zero_grad()
        else:
            early.state_dict()  # creates state for whole parameters
        with pytest.raises(RuntimeError, match=r"AdamW\) has state for parameter 'p0'.*before the first step"):
            torch_ext.parallelize(copy, chosen, strategy=strategy)
        assert type(copy) is Given


def test_an_optimizer_made_before_parallelize_is_fine_without_state() -> None:
    strategies.run(2, _made_before)


def _beside_plain_parameters(rank: int, world: int, strategy: str) -> list[Any]:
    """One optimizer for a sharded model and a plain parameter whose gradient changes its memory order between steps."""
    model = _parallel(strategy)
    own = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = torch_ext.AdamW([model.p0, own, model.p1, model.p2], lr=0.1)
    for transposed in (False, True, False):
        model(noise(int(transposed), rank, SHAPES)).backward()
        grad = torch.arange(24.0).reshape(4, 6)
        own.grad = grad.t().contiguous().t() if transposed else grad
        optimizer.step()
        optimizer.zero_grad()
    assert [float(optimizer.state[p]["step"]) for p in (model.p0, model.p1, model.p2, own)] == [3.0] * 4
    return [p.tolist() for p in (*model.parameters(), own)]


def test_a_gradient_laid_out_anew_steps_nothing_twice() -> None:
    answers = strategies.run(2, _beside_plain_parameters)
    assert all(answer == answers["no_shard"][0] for by_rank in answers.values() for answer in by_rank)


# -- clipping -----------------------------------------------------------------------------------------------------


def _clips(rank: int, world: int, strategy: str) -> tuple[list[bytes], list[float]]:
    """Clips by the optimizer's norm, by parameters, or by the policy in step: all must give the same numbers."""
    found = []
    for how in ("optimizer", "parameters", "policy"):
        chosen = policy(bucket_size=1, overlap_grad_reduce=True)
        by_policy = torch_ext.load_policy(torch.float32, override_optimizer_config={"clip_grad": 0.5})
        model = torch_ext.parallelize(Given(SHAPES), chosen, strategy=strategy)
        used = by_policy if how == "policy" and strategy != "no_shard" else chosen
        optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=used)
        norms = []
        for step in range(3):
            model([g * 10**step for g in noise(step, rank, SHAPES)]).backward()
            if how == "parameters":
                norms.append(float(torch_ext.clip_grad_norm_(model.parameters(), 0.5)))
                assert float(torch_ext.clip_grad_norm_(optimizer, float("inf"))) == pytest.approx(0.5, rel=1e-5)
            elif used is chosen:
                norms.append(float(torch_ext.clip_grad_norm_(optimizer, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        found.append((how, norms, [p.detach().clone() for p in model.parameters()]))
    (_, norms, weights), (_, again, by_parameters), (_, _, in_step) = found
    assert norms == again, "the true norm, whoever asks"
    assert bits(weights) == bits(in_step), "the policy's clip_grad counts where nobody clipped"
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(weights, by_parameters, strict=True))
    return bits(weights), norms


def test_the_global_norm_under_every_strategy() -> None:
    answers = strategies.run(3, _clips)
    assert all(answer == answers["no_shard"][0] for by_rank in answers.values() for answer in by_rank)


# -- gradients that are not finite on one rank -----------------------------------------------------------------------


def _skips(rank: int, world: int, strategy: str, how: str) -> Any:
    """A NaN on one rank must make all ranks skip the step."""
    model = _parallel(strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, skip_nonfinite=how == "skip_nonfinite")
    grads = _ones()
    if rank == min(1, world - 1):
        grads[1][150] = float("nan")
    model(grads).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "clip_grad_norm_":
            assert torch_ext.clip_grad_norm_(optimizer, 1.0).isnan()
        optimizer.step()
    assert any("a step was skipped" in str(w.message) for w in caught)
    assert not any(p.any() for p in model.parameters()) and optimizer.skipped_steps() == 1
    optimizer.zero_grad()
    model(_ones()).backward()
    optimizer.step()
    assert all(torch.allclose(p, torch.tensor(-0.1)) for p in model.parameters()) and optimizer.skipped_steps() == 1
    if how == "clip_grad_norm_":
        model(grads).backward()
        with pytest.raises(RuntimeError, match="the total norm of the gradients is nan"):
            torch_ext.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match="the total norm of the gradients is nan"):
            torch_ext.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return float(optimizer.state[model.p1]["step"])


@pytest.mark.parametrize("how", ["clip_grad_norm_", "skip_nonfinite"])
def test_nan_on_one_rank_is_skipped_on_all(how: str) -> None:
    for steps in strategies.run(3, _skips, how).values():
        assert steps == [1.0] * 3


def _overflows(rank: int, world: int, strategy: str, scaler_of: str, unscale: bool) -> Any:
    """An overflow in fp16 on one rank must make all ranks skip the step and lower the scale."""
    chosen = policy(FP16, loss_scale=16.0, bucket_size=1, overlap_grad_reduce=True)
    model = torch_ext.parallelize(Given([(600,), (5,)], FP16), chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=chosen)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=16.0) if scaler_of == "torch" else chosen.grad_scaler()

    def step(value: float) -> None:
        grads = [torch.ones(600), torch.ones(5)]
        if rank == 1:  # rank 0 owns this element
            grads[0][3] = value
        scaler.scale(model(grads)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    if scaler_of == "torch" and strategy in SHARDED:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"policy\.grad_scaler\(\)"):
                step(1.0)
            assert not any(p.any() for p in model.parameters()) and "found_inf" not in vars(optimizer)
            optimizer.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        model([torch.ones(600), torch.ones(5)]).backward()
        optimizer.step()  # without a scaler
        return None
    for _ in range(3):  # more often than hysteresis tolerates
        step(60000.0)
        scaler.update()
        optimizer.zero_grad()
    assert not any(p.any() for p in model.parameters())
    assert scaler.get_scale() < 16.0
    step(1.0)
    scaler.update()
    assert all(torch.allclose(p.float(), torch.tensor(-0.1), rtol=1e-3) for p in model.parameters())
    return scaler.get_scale(), bits(list(model.parameters()))


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale, step"])
@pytest.mark.parametrize("scaler_of", ["policy", "torch"])
def test_overflow_on_one_rank_is_skipped_on_all(scaler_of: str, unscale: bool) -> None:
    answers = strategies.run(3, _overflows, scaler_of, unscale)
    stepping = STRATEGIES if scaler_of == "policy" else ["no_shard"]
    assert all(answer == answers["no_shard"][0] for strategy in stepping for answer in answers[strategy])


def _alone(rank: int, world: int) -> None:
    """Errors must be the same in a world of one rank."""
    for strategy in STRATEGIES:
        _steps_after(rank, world, strategy)
        _skips(rank, world, strategy, "clip_grad_norm_")


def test_a_world_of_one_is_no_exception() -> None:
    ranks.run(1, _alone)
