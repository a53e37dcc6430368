"""Waits for messages that fail or that Ctrl-C interrupts, and waits for the same messages once more: an error must stay
one, and an interrupted wait must be completed."""

import contextlib
import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import internals
import pytest
import ranks
import strategies
import torch
from gradients import BF16, FP32, Given, noise, policy, whole_gradients
from torch.nn.parallel import DistributedDataParallel
from works import Work

import torch_ext
from torch_ext.comm import compression, gloo_p2p
from torch_ext.optim import device_step, stepper
from torch_ext.parallel import parallel_module

# -- without ranks ---------------------------------------------------------------------------------------------------


def _raises(error: BaseException, times: int = 1) -> Callable[[], None]:
    """Returns an arrival for `Work` that raises the error the first `times` times."""
    left = [error] * times

    def arrives() -> None:
        if left:
            raise left.pop()

    return arrives


def _travel(*works: Work) -> Any:
    """Returns a transfer that receives with all but the last of these Works and sends with the last."""
    exchange: Any = types.SimpleNamespace(group=Work())
    travel = gloo_p2p.PendingTransfer(exchange, 0, "bucket 7")
    travel.recvs, travel.sends = list(enumerate(works[:-1])), [(9, works[-1])]
    return travel


def test_a_failure_is_one_whenever_it_is_asked_for() -> None:
    works = [Work(), Work(_raises(RuntimeError("connection reset"))), Work()]
    travel = _travel(*works)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"bucket 7: rank 1 did not respond \(connection reset\)"):
            travel.wait()
    assert [work.waits for work in works] == [1, 1, 0]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_interrupted_wait_goes_on_where_it_was(which: int) -> None:
    works = [Work(_raises(KeyboardInterrupt()) if i == which else lambda: None) for i in range(3)]
    travel = _travel(*works)
    with pytest.raises(KeyboardInterrupt):
        travel.wait()
    assert travel.recvs and travel.sends
    travel.wait()
    assert [work.waits for work in works] == [1 + (i == which) for i in range(3)]
    assert not travel.recvs and not travel.sends


@pytest.mark.parametrize("which", ["the message", "what did not fit"])
def test_an_interrupted_wait_for_a_compressed_message(which: str) -> None:
    numel = 8192
    generator = torch.Generator().manual_seed(1)
    values = torch.ldexp(torch.randn(numel, generator=generator), torch.arange(numel) % 119 - 60).to(torch.bfloat16)
    wire = torch.empty(compression.size(numel, torch.bfloat16), dtype=torch.uint8)
    rest = compression.compress(values, wire)
    assert rest
    sent, works, into = [wire, compression.end_of(values, rest)], [], torch.zeros_like(values)

    def receive(to: torch.Tensor) -> Work:
        message, number = sent.pop(0), len(works)
        interrupt = _raises(KeyboardInterrupt(), times=int(number == ["the message", "what did not fit"].index(which)))

        def arrives() -> None:
            interrupt()
            to.copy_(message)

        works.append(Work(arrives))
        return works[-1]

    pool = gloo_p2p.MemoryPool()
    arriving = gloo_p2p.PendingRecv(gloo_p2p.CompressedMessage(into, pool), receive)
    with pytest.raises(KeyboardInterrupt):
        arriving.wait()
    assert not arriving.is_completed()
    arriving.wait()
    assert arriving.is_completed()
    assert torch.equal(into.view(torch.int16), values.view(torch.int16))
    assert not sent and len(works) == 2


# -- with ranks ------------------------------------------------------------------------------------------------------

SHAPES: list[Any] = [(300,), (5, 77), (300,), (1000,)]
LATE = [0.0, 0.3, 0.6]  # seconds, by rank: rank 0 waits for two others


@contextlib.contextmanager
def _interrupted(rank: int, waiting_for: str) -> Iterator[None]:
    """Interrupts rank 0's main thread after it has received the first of two messages."""
    if rank != 0:
        yield
        return
    wait = gloo_p2p.wait_all

    def waits_once(works: Any, exchange: Any, what: str) -> None:
        if threading.current_thread() is not threading.main_thread() or waiting_for not in what:
            wait(works, exchange, what)
            return
        wait(works[:1], exchange, what)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_p2p, "wait_all", waits_once)
        with pytest.raises(KeyboardInterrupt):
            yield


def _is_mean(model: Any, step: int, world: int) -> bool:
    """Whether the gradients are the mean of the ranks' noise of this step."""
    shapes = [p.shape for p in model.parameters()]
    each = [noise(step, r, shapes) for r in range(world)]
    means = [torch.stack(of_ranks).sum(0) / world for of_ranks in zip(*each, strict=True)]
    found = whole_gradients(model)
    return all(torch.allclose(g, mean, rtol=1e-5, atol=1e-6) for g, mean in zip(found, means, strict=True))


def _sums_are_late(rank: int, world: int, strategy: str) -> None:
    """Interrupts a backward and a zero_grad() that wait for sums. The later backwards must be right."""
    shapes = [(4000,)]
    model: Any = torch_ext.parallelize(Given(shapes), policy(bucket_size=1), strategy=strategy)
    for step in range(2):
        model(noise(step, rank, shapes)).backward()
        model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        internals.before_sums(lambda: time.sleep(LATE[rank]), patch)
        with _interrupted(rank, "gradients of cycle 2"):
            model(noise(2, rank, shapes)).backward()
        with _interrupted(rank, "gradients of cycle 2"):
            model.zero_grad()
        model.zero_grad()
        # The late sum of the interrupted backward must not be used for this one, nor be written into its gradient.
        handle = model.p0.register_hook(lambda _: time.sleep(0.2 if rank == 0 else 0))
        model(noise(3, rank, shapes)).backward()
        handle.remove()
        assert _is_mean(model, 3, world)
    for step in range(4, 6):
        model.zero_grad()
        model(noise(step, rank, shapes)).backward()
        assert _is_mean(model, step, world)


def test_an_interrupt_while_sums_come() -> None:
    strategies.run(3, _sums_are_late, chosen=["no_shard"])  # with others a rank waits for its own sum only


def _backward_is_interrupted(rank: int, world: int, strategy: str) -> None:
    """Interrupts backward on all ranks while it waits for the others. Training must go on after zero_grad()."""
    chosen = policy(bucket_size=1, overlap_grad_reduce=True)
    model: Any = torch_ext.parallelize(Given(SHAPES), chosen, strategy=strategy)
    ones = [torch.ones(s) for s in SHAPES]
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    model(ones).backward()
    optimizer.zero_grad()
    engine: Any = parallel_module.reducer_of(model)
    wait = engine.exchange.do_wait

    def interrupt(action: Any) -> None:
        engine.exchange.do_wait = wait
        raise KeyboardInterrupt

    engine.exchange.do_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(ones).backward()
    with pytest.raises(RuntimeError, match="step"):
        optimizer.step()
    optimizer.zero_grad()
    for step in range(2):
        model(noise(step, rank, SHAPES)).backward()
        assert _is_mean(model, step, world)
        optimizer.step()
        optimizer.zero_grad()


def test_training_goes_on_after_an_interrupt_on_all_ranks() -> None:
    strategies.run(2, _backward_is_interrupted)


def _reports_are_late(rank: int, world: int, strategy: str) -> None:
    """Interrupts the wait for the other ranks' reports at the end of a cycle."""
    with pytest.MonkeyPatch.context() as patch:
        internals.join_pairs(patch)
        chosen = policy(bucket_size=300, overlap_grad_reduce=True)
        model: Any = torch_ext.parallelize(Given(SHAPES), chosen, strategy=strategy)
        for step in range(6):
            late = torch.ones(1, requires_grad=True)
            last = late * 2  # its gradient is the last of this backward
            if step == 2:
                last.register_hook(lambda _: time.sleep(LATE[rank]))
            with _interrupted(rank, "end of gradient cycle 2") if step == 2 else contextlib.nullcontext():
                (model(noise(step, rank, SHAPES)) + last.sum()).backward()
            if step != 2:
                assert _is_mean(model, step, world)
            model.zero_grad()


def test_an_interrupt_while_ranks_report() -> None:
    """Also with joined buckets: the next cycles must be right on all ranks."""
    strategies.run(3, _reports_are_late)


def _sharded(rank: int, world: int) -> tuple[Any, torch.Tensor, float]:
    """Returns an FSDP2 model, an input and the output's sum with whole weights."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(300, 300, bias=False)
    inputs = torch.ones(1, 300)
    wanted = model(inputs).sum().item()
    torch_ext.parallelize(model, policy(), strategy="optim_grads_params")
    return model, inputs, wanted


def _weights_are_late(rank: int, world: int) -> None:
    model, inputs, wanted = _sharded(rank, world)
    time.sleep(LATE[rank])
    with _interrupted(rank, "weights of"):
        found = model(inputs).sum()
    if rank == 0:
        found = model(inputs).sum()
    assert found.item() == pytest.approx(wanted, rel=1e-5)
    found.backward()


def test_an_interrupt_while_weights_come() -> None:
    ranks.run(3, _weights_are_late)


def _weights_do_not_come(rank: int, world: int) -> list[str]:
    model, inputs, _ = _sharded(rank, world)
    if rank == 1:
        time.sleep(6)
        return []
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            model(inputs)
        said.append(str(error.value))
    return said


def test_weights_that_did_not_come_are_an_error_each_time() -> None:
    (first, second), _ = ranks.run(2, _weights_do_not_come, timeout=3.0)
    assert "rank 1 did not respond" in first
    assert first in second


# -- steps: weights that are still being gathered are waited for before they are used --------------------------------

SHARDED = ["optim", "optim_grads"]


def _model(strategy: str, dtypes: Any = None) -> Any:
    """Returns a model under a strategy, or "DDP hook". dtypes: of parameters that are not bf16, by position."""
    torch.manual_seed(0)
    model: Any = Given(SHAPES, BF16)
    for i, dtype in (dtypes or {}).items():
        getattr(model, f"p{i}").data = getattr(model, f"p{i}").data.to(dtype)
    if strategy == "DDP hook":
        ddp = DistributedDataParallel(model)
        torch_ext.register_comm_hook(ddp, policy(BF16))
        return ddp
    return torch_ext.parallelize(model, policy(BF16, bucket_size=300), strategy=strategy)


def _weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _is_interrupted(rank: int, world: int, strategy: str) -> tuple[list[Any], list[str]]:
    """Returns the weights that each forward sees. Rank 0 is interrupted while it waits for the first step's weights."""
    model = _model(strategy)
    optimizer, seen = torch_ext.AdamW(model.parameters(), lr=0.1), []
    model.register_forward_pre_hook(lambda *_: seen.append(_weights(model)))
    for step in range(3):
        model([g.to(BF16) for g in noise(step, rank, SHAPES)]).backward()
        time.sleep(LATE[rank] if step == 0 else 0)
        with _interrupted(rank, "weights of") if step == 0 else contextlib.nullcontext():
            optimizer.step()
        if step == 0:  # like a loop that saves when it is interrupted
            seen.append([w.clone() for w in model.state_dict().values()])
        optimizer.zero_grad()
    model([g.to(BF16) for g in noise(3, rank, SHAPES)])
    return [[w.view(torch.int16).tolist() for w in weights] for weights in seen], [str(world)]


@pytest.mark.parametrize("strategy", SHARDED)
def test_weights_that_were_not_waited_for_are_there_in_the_next_forward(strategy: str) -> None:
    first, *others = ranks.run(3, _is_interrupted, strategy)
    assert all(other == first for other in others)
    assert len({str(weights) for weights in first[0]}) == 4, "each step changes them"


def _interrupted_halfway(rank: int, _world: int, strategy: str) -> list[str]:
    """Interrupts rank 0 after the first of a step's operator calls; sharded strategies have several. Returns what each
    later call does."""
    model = _model(strategy, {1: FP32})
    optimizer, said = torch_ext.AdamW(model.parameters(), lr=0.1), []
    grads = [g.to(p.dtype) for g, p in zip(noise(0, rank, SHAPES), model.parameters(), strict=True)]
    model(grads).backward()
    run = device_step.DeviceStep.run

    def once(self: Any, *args: Any) -> None:
        run(self, *args)
        if rank == 0:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_step.DeviceStep, "run", once)
        try:
            optimizer.step()
        except (KeyboardInterrupt, RuntimeError) as error:
            said.append(type(error).__name__)
    for again in ["step"] * (rank == 0) + ["backward"] * 2:
        try:
            optimizer.step() if again == "step" else model(grads).backward()
            said.append("goes on")
        except RuntimeError as error:
            said.append(str(error))
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED, "DDP hook"])
def test_a_rank_that_stepped_some_parameters_only_says_so_for_good(strategy: str) -> None:
    first, *others = ranks.run(2, _interrupted_halfway, strategy, timeout=3.0)
    assert first[0] == "KeyboardInterrupt"
    assert all("step() was interrupted" in text and "Load a checkpoint" in text for text in first[1:]), first
    assert all("goes on" not in said for said in others), others


def _refused(rank: int, _world: int, strategy: str) -> bool:
    """A step that is rejected before it has written anything must not count as a failed step."""
    model = _model(strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, on_external_write="error")
    for step in range(3):
        model([g.to(BF16) for g in noise(step, rank, SHAPES)]).backward()
        if step == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1)
            with pytest.raises(RuntimeError):
                optimizer.step()
            optimizer.resync_masters()
        optimizer.step()
        optimizer.zero_grad()
    return True


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED, "DDP hook"])
def test_a_refused_step_is_no_failure(strategy: str) -> None:
    assert ranks.run(2, _refused, strategy) == [True, True]


def _parallelized_after(_rank: int, world: int) -> list[str]:
    """Interrupts a step between its two parts, then calls parallelize twice: only the first must raise."""
    model: Any = Given(SHAPES, BF16)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=0.1, offload_fraction=0.5)
    run, said = device_step.DeviceStep.run, []

    def once(self: Any, *args: Any) -> None:
        run(self, *args)
        raise KeyboardInterrupt

    for patched in (False, True):
        for p, grad in zip(model.parameters(), noise(0, 0, SHAPES, BF16), strict=True):
            p.grad = grad
        with pytest.MonkeyPatch.context() as patch:
            if patched:
                patch.setattr(device_step.DeviceStep, "run", once)
            with pytest.raises(KeyboardInterrupt) if patched else contextlib.nullcontext():
                optimizer.step()
        model.zero_grad()
    for _ in range(2):
        try:
            torch_ext.parallelize(model, policy(BF16), strategy="no_shard", optimizer=optimizer)
            said.append("goes on")
        except RuntimeError as error:
            said.append(str(error))
        optimizer.zero_grad()
    return said


def test_a_second_layout_does_not_hide_that_a_step_was_interrupted() -> None:
    for first, then in ranks.run(2, _parallelized_after):
        assert re.search(r"parallelize\(optimizer=...\) after a step\(\) that was interrupted, .* zero_grad\(\)", first)
        assert then == "goes on"


def _before_anything_is_written(rank: int, _world: int, strategy: str) -> list[str]:
    """Interrupts rank 0's second step before it has written anything. Both ranks must get an error."""
    torch.manual_seed(0)
    model: Any = torch_ext.parallelize(torch.nn.Linear(30, 20).to(BF16), policy(BF16), strategy=strategy)
    optimizer, said = torch_ext.AdamW(model.parameters(), lr=0.1), []
    for step in range(4):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and step == 1:
                patch.setattr(stepper.Stepper, "current_hyper", lambda *_, **__: _raises(KeyboardInterrupt())())
            for doing in (lambda: model(torch.ones(2, 30, dtype=BF16)).sum().backward(), optimizer.step):
                try:
                    doing()
                    said.append("goes on")
                except (KeyboardInterrupt, RuntimeError) as error:
                    said.append(str(error) or "interrupted")
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])  # with the others, weights would not arrive
def test_a_rank_that_was_interrupted_before_it_stepped_anything_is_told(strategy: str) -> None:
    first, second = ranks.run(2, _before_anything_is_written, strategy)
    assert first[:4] == ["goes on"] * 3 + ["interrupted"] and second[:4] == ["goes on"] * 4
    for text in (*first[4:], *second[4:]):
        assert "after a different number of steps than rank" in text, (first, second)


# -- saves in the middle of a step ---------------------------------------------------------------------------------


def _saves_before_weights_are_gathered(_rank: int, _world: int, strategy: str, bucket_size: int) -> list[str]:
    """Returns the errors of state_dict() where this rank's part of the weights is stepped and the others are not here:
    as a signal handler's call, then in another thread; and of state_dict() after the step."""
    shapes = [(4,), (200,), (3,)]
    chosen = policy(bucket_size=bucket_size, overlap_grad_reduce=True)
    model: Any = torch_ext.parallelize(Given(shapes), chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    errors: list[str] = []

    def save() -> None:
        try:
            optimizer.state_dict()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))

    engine: Any = parallel_module.reducer_of(model)
    gather = engine.gather

    def gather_later(bucket: int) -> Any:
        engine.gather = gather
        save()
        other = threading.Thread(target=save)
        other.start()
        other.join()
        return gather(bucket)

    for step in range(2):
        model([torch.ones(s) for s in shapes]).backward()
        if step:
            engine.gather = gather_later
        optimizer.step()
        optimizer.zero_grad()
    save()
    return errors


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize("bucket_size", [1, 1000])
def test_a_handler_saves_no_weights_that_are_not_gathered(strategy: str, bucket_size: int) -> None:
    for handler, thread, later in ranks.run(2, _saves_before_weights_are_gathered, strategy, bucket_size):
        assert handler.startswith("state_dict() within step(), by a signal handler, perhaps, when it has stepped some")
        assert thread == later == ""
