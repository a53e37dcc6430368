"""torch_ext.offload and onload in one process (B4): everything comes back as it was, and memory is released and
reused."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from offloaded import KINDS, STEPS, Net, adamw, bits, everything, loss_of, memory, one_step, states, trained, weights
from torch import Tensor, nn

import torch_ext
from bench import resident_memory
from torch_ext.offloading import host_buffer, transfer
from torch_ext.tensors import host_copies

# -- what is brought back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", training.POLICIES)
def test_B4_training_goes_on_with_the_same_bits(name: str) -> None:
    ends = []
    for offloaded in (False, True):
        params = training.params_of(name)
        model = nn.ParameterList(params)
        optimizer = torch_ext.AdamW(params, lr=1e-2, policy=training.policy_of(name))
        for step in range(2 * STEPS):
            training.train(optimizer, [step])
            if offloaded:
                torch_ext.offload(model, optimizer)
                torch_ext.onload(model, optimizer)
        ends.append(training.everything(optimizer))
    assert ends[0] == ends[1]


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "SGD, which has no state": lambda params: torch.optim.SGD(params, lr=1e-2),
    "LBFGS, whose state is lists": lambda params: torch.optim.LBFGS(params, lr=1e-2, max_iter=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_B4_any_optimizer(name: str) -> None:
    ends = []
    for offloaded in (False, True):
        model = Net(torch.float32, torch.contiguous_format)  # LBFGS flattens gradients by view(-1)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = OTHERS[name](trainable)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 7)
            loss.backward()
            return loss

        for _ in range(2 * STEPS):
            optimizer.step(closure)  # type: ignore[arg-type]
            if offloaded:
                torch_ext.offload(model, optimizer)
                with pytest.raises(RuntimeError, match=r"onload"):
                    optimizer.step(lambda: 0.0)
                torch_ext.onload(model, optimizer)
        ends.append(bits(weights(model)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("order", ["all", "grads kept", "states first", "twice", "weights stay"])
@pytest.mark.parametrize("zeroed", [True, False], ids=["after zero_grad", "gradients there"])
def test_B4_whole_loop_in_any_order(order: str, zeroed: bool) -> None:
    """Each step clips. Gradients are dropped by offload, with or without zero_grad() before it."""
    model, optimizer = trained()
    expected = Net()
    reference = adamw(expected)
    one_step(expected, reference, 0)
    for step in range(1, STEPS):
        if zeroed:
            optimizer.zero_grad()
        if order == "states first":
            torch_ext.offload(model, optimizer, params=False, grads=False)
            torch_ext.offload(model, optimizer, states=False)
            torch_ext.onload(model, optimizer, params=False)
            torch_ext.onload(model, optimizer, grads=False, states=False)
        else:
            kinds = {"grads kept": {"grads": False}, "weights stay": {"params": False}}.get(order, {})
            for _ in range(2 if order == "twice" else 1):
                torch_ext.offload(model, optimizer, **kinds)
            for _ in range(2 if order == "twice" else 1):
                torch_ext.onload(model, optimizer)
        one_step(model, optimizer, step)
        one_step(expected, reference, step)
        assert everything(model, optimizer) == everything(expected, reference), step


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_B4_states_that_live_on_the_host_stay_there(fraction: float) -> None:
    model, optimizer = trained(offload_fraction=fraction)
    expected, reference = trained()
    held = [t for entry in optimizer._states.host._states.values() for key, t in entry.items() if key != "step"]
    assert held and (fraction == 1.0) == (not states(optimizer))
    for step in range(1, STEPS):
        optimizer.zero_grad()
        torch_ext.offload(model, optimizer)
        assert memory(held) > 0 and memory(states(optimizer)) == memory(weights(model)) == 0
        torch_ext.onload(model, optimizer)
        one_step(model, optimizer, step)
        one_step(expected, reference, step)
    assert bits(weights(model)) == bits(weights(expected))


def test_B4_tensors_stay_the_objects_that_they_are() -> None:
    model, optimizer = trained()
    before = [*weights(model), *states(optimizer)]
    looks = [(id(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad) for t in before]
    view, gradients = model.first.weight.detach()[3:5], [p.grad for p in model.parameters()]
    row = view.clone()
    torch_ext.offload(model, optimizer)
    assert all(p.grad is None for p in model.parameters())
    torch_ext.onload(model, optimizer)
    after = [*weights(model), *states(optimizer)]
    assert looks == [(id(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad) for t in after]
    assert model.tied.weight is model.second.weight
    assert torch.equal(view, row)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_B4_gradients_come_back_zero_and_those_that_were_not_there_do_not() -> None:
    model, optimizer = trained()
    model.first.weight.grad = None
    torch_ext.offload(model, optimizer, params=False, states=False)
    torch_ext.onload(model, optimizer)
    assert model.first.weight.grad is None
    assert all(p.grad is None for p in model.frozen.parameters())
    rest = [p for p in model.parameters() if p.requires_grad and p is not model.first.weight]
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in rest)


def test_B4_a_clip_coefficient_goes_with_its_gradients() -> None:
    """Offloading drops gradients; a pending clip coefficient must go too."""
    model, optimizer = trained()
    torch_ext.clip_grad_norm_(optimizer, 1e-6)
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    expected, reference = trained()
    reference.zero_grad()
    loss_of(expected, 1).backward()
    reference.step()
    assert everything(model, optimizer) == everything(expected, reference)


def test_B4_weights_that_lie_in_one_storage_move_once() -> None:
    memory_of_both = torch.arange(1000.0)
    model = nn.ParameterList([nn.Parameter(memory_of_both[:500]), nn.Parameter(memory_of_both[500:].view(20, 25).t())])
    optimizer = torch.optim.AdamW(model.parameters())
    torch_ext.offload(model, optimizer)
    assert memory_of_both.untyped_storage().nbytes() == 0
    torch_ext.onload(model, optimizer)
    assert torch.equal(memory_of_both, torch.arange(1000.0))
    memory_of_both.zero_()
    assert all(p.count_nonzero() == 0 for p in model)


def test_B4_no_write_of_somebody_else_is_suspected() -> None:
    """Moving weights must not count as an external write."""
    for config in ({}, {"store_param_remainders": True}):
        model = Net()
        policy = torch_ext.load_policy(model, override_optimizer_config=config)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy, on_external_write="error")
        for step in range(STEPS):
            one_step(model, optimizer, step)
            torch_ext.offload(model, optimizer)
            torch_ext.onload(model, optimizer)


# -- where the memory is meanwhile -------------------------------------------------------------------------------------


def test_B4_memory_is_released() -> None:
    model, optimizer = trained()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sizes = [memory(weights(model)), memory(gradients), memory(states(optimizer))]
    assert all(sizes)
    torch_ext.offload(model, optimizer)
    assert [memory(weights(model)), memory(gradients), memory(states(optimizer))] == [0, 0, 0]
    torch_ext.onload(model, optimizer)
    assert [memory(weights(model)), memory(gradients), memory(states(optimizer))] == sizes


def test_B4_resident_memory_falls() -> None:
    """The host buffer is allocated on the first offload and kept, so only the second offload shows how much the model's
    memory shrinks. (The "device" is the CPU here.)"""
    model = nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    total = 3 * model.weight.nbytes
    before = resident_memory.status("VmRSS")
    torch_ext.offload(model, optimizer)
    offloaded = resident_memory.status("VmRSS")
    torch_ext.onload(model, optimizer)
    back = resident_memory.status("VmRSS")
    assert abs(before - offloaded - total) < 0.1 * total
    assert abs(back - offloaded - total) < 0.1 * total


@pytest.mark.parametrize("chosen", range(8))
def test_B4_separate_switches(chosen: int) -> None:
    kinds = {kind: bool(chosen >> i & 1) for i, kind in enumerate(KINDS)}
    model, optimizer = trained()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before = everything(model, optimizer)
    torch_ext.offload(model, optimizer, **kinds)
    released = [memory(weights(model)) == 0, memory(gradients) == 0, memory(states(optimizer)) == 0]
    assert released == list(kinds.values())
    if not kinds["params"]:
        loss_of(model.eval(), 5)  # weights that stay can be used
    torch_ext.onload(model, optimizer)
    assert everything(model, optimizer) == before


def test_B4_host_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = []
    allocate = host_copies.allocate
    monkeypatch.setattr(host_copies, "allocate", lambda *a: allocated.append(a) or allocate(*a))
    model, optimizer = trained()
    counts = []
    for step in range(10):
        torch_ext.offload(model, optimizer)
        torch_ext.onload(model, optimizer)
        one_step(model, optimizer, step)
        counts.append(len(allocated))
    assert counts == [2] * 10, "one for weights, one for states"


def test_B4_host_memory_grows_by_what_is_new() -> None:
    model, optimizer = Net(), None
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model)
    model.add_module("more", nn.Linear(500, 500))
    before = bits(weights(model))
    torch_ext.offload(model)
    model_bytes = memory(weights(model))
    torch_ext.onload(model)
    assert model_bytes == 0 and bits(weights(model)) == before


def test_B4_what_is_new_joins_what_is_offloaded() -> None:
    """A module that is added while the model is offloaded is offloaded by the next call and brought back with the
    rest."""
    model = Net()
    torch_ext.offload(model)
    model.add_module("more", nn.Linear(50, 50))
    new = bits(weights(model.get_submodule("more")))
    torch_ext.offload(model)
    assert memory(weights(model)) == 0
    torch_ext.onload(model)
    assert bits(weights(model.get_submodule("more"))) == new
    del model.more
    assert bits(weights(model)) == bits(weights(Net()))


class OnDevice(Tensor):
    """A tensor that claims to be in an accelerator's memory."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.parametrize("pinned", [False, True], ids=["", "as with an accelerator"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("slab", [4096, 1 << 28], ids=["many slabs", "one slab"])
def test_host_buffer_gives_back_what_was_put_in(
    slab: int, threads: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = host_copies.allocate  # without an accelerator nothing can be pinned
    monkeypatch.setattr(host_copies, "allocate", lambda nbytes, _pinned: allocate(nbytes, False))
    monkeypatch.setattr(host_buffer, "SLAB", slab)
    monkeypatch.setattr(host_copies, "CHUNK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    buffer = host_buffer.HostBuffer(pinned)
    content = torch.randint(0, 256, (20_000,), dtype=torch.uint8)
    there = content.as_subclass(OnDevice) if pinned else content
    for end in (5_000, 20_000):
        buffer.reserve(end)
        assert buffer.capacity >= end
    cuts = ((0, 1), (1, 4096), (4096, 4097), (4097, 4097), (4097, 20_000))
    buffer.store((begin, there[begin:end]) for begin, end in cuts)
    back = torch.zeros(20_000, dtype=torch.uint8)
    target = back.as_subclass(OnDevice) if pinned else back
    buffer.load((begin, target[begin:end]) for begin, end in ((0, 9_000), (9_000, 20_000)))
    assert torch.equal(back, content)


def test_pinned_memory_is_asked_for_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *a, **k: asked.append((a, k)))
    host_copies.allocate(4096, pinned=True)
    assert asked == [((4096,), {"dtype": torch.uint8, "pin_memory": True, "device": "cpu"})]


def test_accelerators_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is under way may still read memory that is about to be released."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    host_copies.synchronize(devices)
    assert waited == devices[1:]


# case -> number of the call that fails, among those that allocate or free
FAILS = {
    "host memory for weights": 1,
    "host memory for states": 2,
    "after weights were freed": 2,
    "after weights and states were freed": 3,
}


@pytest.mark.parametrize("where", FAILS)
def test_B4_offload_that_fails_has_changed_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = everything(model, optimizer)
    calls = []

    def failing(*_: object) -> None:
        calls.append(where)
        if len(calls) == FAILS[where]:
            raise MemoryError("no more")
        return real(*_)  # type: ignore[no-any-return]

    if where.startswith("after"):
        real: Any = transfer.free
        monkeypatch.setattr(transfer, "free", failing)
    else:
        real = host_copies.allocate
        monkeypatch.setattr(host_copies, "allocate", failing)
    with pytest.raises(RuntimeError, match=r"offload of \d+ bytes failed, and nothing has moved: no more"):
        torch_ext.offload(model, optimizer)
    assert everything(model, optimizer) == before
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    monkeypatch.undo()
    expected, reference = trained()
    for net, stepper in ((model, optimizer), (expected, reference)):
        one_step(net, stepper, 1)
    assert everything(model, optimizer) == everything(expected, reference)
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    assert everything(model, optimizer) == everything(expected, reference)


# -- legal, though unusual ---------------------------------------------------------------------------------------------


def test_B4_optimizer_missing_or_empty_and_model_without_weights() -> None:
    model = Net()
    fresh = adamw(model)
    for optimizer in (None, fresh):
        before = bits(weights(model))
        torch_ext.offload(model, optimizer)
        assert memory(weights(model)) == 0
        torch_ext.onload(model, optimizer)
        assert bits(weights(model)) == before
    one_step(model, fresh, 0)
    torch_ext.offload(nn.ReLU())
    torch_ext.onload(nn.ReLU())


def test_B4_several_models_in_one_call() -> None:
    one, two = Net(), Net()
    two.first = one.first
    before = bits([*weights(one), *weights(two)])
    torch_ext.offload([one, two])
    assert memory([*weights(one), *weights(two)]) == 0
    with pytest.raises(RuntimeError, match=r"onload.*another model.*both"):
        torch_ext.onload(two)
    torch_ext.onload([one, two])
    assert bits([*weights(one), *weights(two)]) == before
    torch_ext.offload(one)
    with pytest.raises(RuntimeError, match=r"offload.*'first.weight'.*another model"):
        torch_ext.offload(two)
    assert memory(weights(two)) > 0
    torch_ext.onload(one)


def test_B4_a_model_and_an_optimizer_are_freed_while_offloaded() -> None:
    model, optimizer = trained()
    torch_ext.offload(model, optimizer)
    alive = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_B4_leaves_no_hooks_behind() -> None:
    model, optimizer = trained()
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    again = copy.deepcopy(model)
    assert bits(weights(again)) == bits(weights(model))
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
