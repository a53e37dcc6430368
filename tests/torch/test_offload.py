"""B4, in one process: what leaves comes back as it was, memory is released and reused, and uses of it are errors."""

import copy
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from torch import Tensor, nn

import torch_ext
from torch_ext import _bench_memory, _copies, _host_buffer, _luggage

KINDS = ("params", "grads", "states")
STEPS = 3


class Net(nn.Module):
    """A frozen layer, a buffer, tied weights, and one of channels_last memory."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, order: Any = torch.channels_last) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.first, self.second = nn.Linear(8, 300), nn.Linear(300, 8)
        self.tied = nn.Linear(300, 8)
        self.norm = nn.BatchNorm1d(8)
        self.to(dtype).to(memory_format=order)  # type: ignore[call-overload]
        self.tied.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(x))
        x = x + self.conv(x.reshape(-1, 2, 2, 2)).flatten(1)[:, :8]
        x = self.first(x).relu()
        return self.second(x) + self.tied(x.sin())


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def adamw(model: nn.Module, **options: Any) -> torch_ext.AdamW:
    return torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=torch_ext.load_policy(model), **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if isinstance(optimizer, torch_ext.Adam):
        torch_ext.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


def trained(**options: Any) -> tuple[Net, torch_ext.AdamW]:
    model = Net()
    optimizer = adamw(model, **options)
    one_step(model, optimizer, 0)
    return model, optimizer


def weights(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for entry in optimizer.state.values() for key, t in entry.items() if key != "step"]


def memory(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def bits(tensors: list[Tensor]) -> list[bytes]:
    """Of copies: what numpy sees cannot be released any more."""
    return [training.bits(t.detach().clone()) for t in tensors]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    steps = [entry["step"] for entry in optimizer.state.values() if "step" in entry]
    return bits([*weights(model), *states(optimizer), *steps])


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", training.POLICIES)
def test_B4_training_goes_on_with_the_same_bits(name: str) -> None:
    ends = []
    for away in (False, True):
        params = training.params_of(name)
        model = nn.ParameterList(params)
        optimizer = torch_ext.AdamW(params, lr=1e-2, policy=training.policy_of(name))
        for step in range(2 * STEPS):
            training.train(optimizer, [step])
            if away:
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
    for away in (False, True):
        model = Net(torch.float32, torch.contiguous_format)  # LBFGS takes no other
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = OTHERS[name](trainable)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 7)
            loss.backward()
            return loss

        for _ in range(2 * STEPS):
            optimizer.step(closure)  # type: ignore[arg-type]
            if away:
                torch_ext.offload(model, optimizer)
                with pytest.raises(RuntimeError, match=r"onload"):
                    optimizer.step(lambda: 0.0)
                torch_ext.onload(model, optimizer)
        ends.append(bits(weights(model)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("order", ["away", "grads kept", "states first", "twice", "weights stay"])
@pytest.mark.parametrize("zeroed", [True, False], ids=["after zero_grad", "gradients there"])
def test_B4_whole_loop_in_any_order(order: str, zeroed: bool) -> None:
    """A clip in each step; gradients are dropped with or without zero_grad() before."""
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
    held = [t for entry in optimizer._host._states.values() for key, t in entry.items() if key != "step"]
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
    assert [p.grad for p in model.parameters()] == gradients or all(
        a is b for a, b in zip([p.grad for p in model.parameters()], gradients, strict=True)
    )


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
    for config in ({}, {"store_param_remainders": True}):
        model = Net()
        policy = torch_ext.load_policy(model, override_optimizer_config=config)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy, on_external_write="error")
        for step in range(STEPS):
            one_step(model, optimizer, step)
            torch_ext.offload(model, optimizer)
            torch_ext.onload(model, optimizer)


# -- where it is meanwhile ---------------------------------------------------------------------------------------------


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
    """The host buffer is there from the first time on, so the second time shows what the device's stand-in gave up."""
    model = nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    total = 3 * model.weight.nbytes
    before = _bench_memory.status("VmRSS")
    torch_ext.offload(model, optimizer)
    away = _bench_memory.status("VmRSS")
    torch_ext.onload(model, optimizer)
    back = _bench_memory.status("VmRSS")
    assert abs(before - away - total) < 0.1 * total
    assert abs(back - away - total) < 0.1 * total


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
        loss_of(model.eval(), 5)  # a generation with the weights
    torch_ext.onload(model, optimizer)
    assert everything(model, optimizer) == before


def test_B4_host_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = []
    allocate = _host_buffer.allocate
    monkeypatch.setattr(_host_buffer, "allocate", lambda *a: allocated.append(a) or allocate(*a))
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


def test_B4_what_is_new_joins_what_is_away() -> None:
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


@pytest.mark.parametrize("pinned", [False, True], ids=["", "as with an accelerator"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("slab", [4096, 1 << 28], ids=["many slabs", "one slab"])
def test_host_buffer_gives_back_what_was_put_in(
    slab: int, threads: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = _host_buffer.allocate  # there may be no accelerator to pin for
    monkeypatch.setattr(_host_buffer, "allocate", lambda nbytes, _pinned: allocate(nbytes, False))
    monkeypatch.setattr(_host_buffer, "SLAB", slab)
    monkeypatch.setattr(_copies, "CHUNK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    buffer = _host_buffer.HostBuffer(pinned)
    content = torch.randint(0, 256, (20_000,), dtype=torch.uint8)
    for end in (5_000, 20_000):
        buffer.reserve(end)
        assert buffer.capacity >= end
    cuts = ((0, 1), (1, 4096), (4096, 4097), (4097, 4097), (4097, 20_000))
    buffer.store((begin, content[begin:end]) for begin, end in cuts)
    back = torch.zeros(20_000, dtype=torch.uint8)
    buffer.load((begin, back[begin:end]) for begin, end in ((0, 9_000), (9_000, 20_000)))
    assert torch.equal(back, content)


def test_pinned_memory_is_asked_for_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *a, **k: asked.append((a, k)))
    _host_buffer.allocate(4096, pinned=True)
    assert asked == [((4096,), {"dtype": torch.uint8, "pin_memory": True})]


def test_accelerators_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are under way still read what is about to be released."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    _host_buffer.wait(devices)
    assert waited == devices[1:]


# -- tolerated ---------------------------------------------------------------------------------------------------------


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


# -- errors ------------------------------------------------------------------------------------------------------------

USES: dict[str, tuple[str, Callable[[nn.Module, Any], object]]] = {
    # name -> (what must be here for it, by the first letter of the kinds; the use)
    "forward": ("p", lambda model, _: loss_of(model, 0)),
    "forward of a part": ("p", lambda model, _: model.get_submodule("first")(torch.ones(8).bfloat16())),
    "backward": ("pg", lambda model, _: loss_of(model, 0).backward()),
    "step": ("pgs", lambda _, optimizer: optimizer.step()),
    "step of another optimizer": ("pg", lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step()),
    "clip": ("pgs", lambda _, optimizer: torch_ext.clip_grad_norm_(optimizer, 1.0)),
    "clip of parameters": ("pg", lambda model, _: torch_ext.clip_grad_norm_(model.parameters(), 1.0)),
    "state_dict": ("p", lambda model, _: model.state_dict()),
    "load_state_dict": ("p", lambda model, _: model.load_state_dict(Net().state_dict())),
    "state_dict of the optimizer": ("ps", lambda _, optimizer: optimizer.state_dict()),
    "load_state_dict of the optimizer": (
        "ps",
        lambda _, optimizer: optimizer.load_state_dict(trained()[1].state_dict()),
    ),
    "a copy of the optimizer": ("s", lambda _, optimizer: copy.copy(optimizer)),
    "resync_masters": ("ps", lambda _, optimizer: optimizer.resync_masters()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_B4_uses_while_away(use: str, kind: str) -> None:
    needs, act = USES[use]
    model, optimizer = trained()
    optimizer.zero_grad()
    model.eval()  # so that no forward writes its buffers
    before = everything(model, optimizer)
    torch_ext.offload(model, optimizer, **{k: k == kind for k in KINDS})
    if kind[0] in needs:
        with pytest.raises(RuntimeError, match=r"torch_ext\.onload"):
            act(model, optimizer)
        torch_ext.onload(model, optimizer)
        assert everything(model, optimizer) == before, "nothing half done"
        assert all(p.grad is None for p in model.parameters())
    else:
        act(model, optimizer)
    torch_ext.onload(model, optimizer)
    model.train()
    one_step(model, optimizer, 1)


def test_B4_torch_optimizers_neither_save_nor_load_what_is_away() -> None:
    model = Net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    saved = optimizer.state_dict()
    torch_ext.offload(model, optimizer)
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=r"states of this optimizer.*onload"):
            use()
    torch_ext.onload(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["params", "states"])
def test_B4_a_state_that_was_handed_out_before_is_not_read(kind: str) -> None:
    """8-bit moments and remainders are decoded when they are read."""
    params = training.params_of("c")
    model, optimizer = nn.ParameterList(params), torch_ext.AdamW(params, policy=training.policy_of("c"))
    training.train(optimizer, [0])
    entry = optimizer.state_dict()["state"][0]
    before = {key: value.clone() for key, value in entry.items()}
    torch_ext.offload(model, optimizer, **{k: k == kind for k in KINDS})
    with pytest.raises(RuntimeError, match=r"handed out before.*torch_ext\.onload"):
        entry["master_param"].clone()
    torch_ext.onload(model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in entry.items())


class Wrapped(torch.optim.Optimizer):
    """As frameworks wrap an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_B4_wrapped_and_compiled() -> None:
    model, optimizer = trained()
    wrapped, compiled = Wrapped(optimizer), torch.compile(model, backend="eager")
    before = everything(model, optimizer)
    loss_of(compiled.eval(), 0)
    torch_ext.offload(compiled, wrapped)
    assert memory(weights(model)) == memory(states(optimizer)) == 0
    with pytest.raises(RuntimeError, match=r"torch_ext\.onload"):
        loss_of(compiled, 0)
    with pytest.raises(RuntimeError, match=r"torch_ext\.onload"):
        optimizer.step()
    torch_ext.onload(compiled, wrapped)
    assert everything(model, optimizer) == before
    loss_of(compiled, 0)


def test_B4_zero_grad_is_fine_while_away() -> None:
    model, optimizer = trained()
    torch_ext.offload(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    torch_ext.onload(model, optimizer)


def test_B4_a_graph_from_before_is_refused() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    losses = [loss_of(model, 1) for _ in range(2)]
    torch_ext.offload(model, optimizer)
    with pytest.raises(RuntimeError, match=r"inplace operation|onload"):
        losses[0].backward()
    torch_ext.onload(model, optimizer)
    with pytest.raises(RuntimeError, match=r"inplace operation"):
        losses[1].backward()


@pytest.mark.parametrize("call", [torch_ext.offload, torch_ext.onload])
def test_B4_during_a_backward(call: Callable[..., None]) -> None:
    model, optimizer = trained()
    before = everything(model, optimizer)
    said: list[str] = []

    def hook(_grad: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"during a backward: call it between steps") as error:
            call(model, optimizer)
        said.append(str(error.value))

    handle = model.first.weight.register_hook(hook)
    loss_of(model.eval(), 1).backward()
    handle.remove()
    assert said and everything(model, optimizer) == before


@pytest.mark.parametrize("call", [torch_ext.offload, torch_ext.onload])
def test_B4_within_master_weights(call: Callable[..., None]) -> None:
    model, optimizer = trained()
    before = everything(model, optimizer)
    with optimizer.master_weights():
        with pytest.raises(RuntimeError, match=r"within master_weights\(\)"):
            call(model, optimizer)
    assert everything(model, optimizer) == before


FIXED: dict[str, Callable[[nn.Parameter, pathlib.Path], object]] = {
    "numpy": lambda p, _: p.detach().numpy(),
    "shared": lambda p, _: p.share_memory_(),
    "mapped": lambda p, path: setattr(p, "data", _mapped(p, path / "weights.pt")),
}


def _mapped(p: Tensor, path: pathlib.Path) -> Tensor:
    torch.save(p.detach().clone(), path)
    loaded: Tensor = torch.load(path, mmap=True)
    return loaded


@pytest.mark.parametrize("how", FIXED)
def test_B4_memory_of_others_is_refused_by_name(how: str, tmp_path: pathlib.Path) -> None:
    model = Net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    FIXED[how](model.second.weight, tmp_path)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"cannot release parameter 'second.weight'.*Clone"):
        torch_ext.offload(model, optimizer)
    assert everything(model, optimizer) == before
    one_step(model, optimizer, 1)


@pytest.mark.parametrize("where", ["host memory for weights", "host memory for states", "after weights went"])
def test_B4_offload_that_fails_has_changed_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before = everything(model, optimizer)
    calls = []

    def failing(*_: object) -> None:
        calls.append(where)
        if where != "host memory for states" or len(calls) == 2:
            raise MemoryError("no more")
        return real(*_)  # type: ignore[no-any-return, func-returns-value]

    if where == "after weights went":
        real: Any = None
        monkeypatch.setattr(_luggage.Dropped, "release", failing)
    else:
        real = _host_buffer.allocate
        monkeypatch.setattr(_host_buffer, "allocate", failing)
    with pytest.raises(RuntimeError, match=r"offload of \d+ bytes failed, and nothing has moved: no more"):
        torch_ext.offload(model, optimizer)
    assert everything(model, optimizer) == before
    monkeypatch.undo()
    expected, reference = trained()
    for net, stepper in ((model, optimizer), (expected, reference)):
        one_step(net, stepper, 1)
    assert everything(model, optimizer) == everything(expected, reference)
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    assert everything(model, optimizer) == everything(expected, reference)


_WITHOUT_ROOM = """
import resource, torch, torch_ext
from torch_ext import _bench_memory
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2048)).sum().backward()
optimizer.step()
before = [t.detach().clone() for t in model.parameters()]
torch_ext.offload(model, optimizer)
limit = _bench_memory.status("VmSize") + 3 * 2048 * 2048 * 4  # room for some storages, not for all
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        torch_ext.onload(model, optimizer)
        raise SystemExit("there should not have been room")
    except RuntimeError as error:
        text = str(error)
    assert "everything is in host memory still" in text and "bring back less" in text, text
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    try:
        optimizer.step()
        raise SystemExit("stepped")
    except RuntimeError as error:
        assert "onload" in str(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
torch_ext.onload(model, optimizer)
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
optimizer.step()
print("brought back")
"""


def test_B4_onload_without_room() -> None:
    """A process whose address space is too small for it, until it is not."""
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ROOM], capture_output=True, text=True, env=_bench_memory.environment()
    )
    assert result.stdout.strip() == "brought back", result.stderr


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [(3, None, "model.*int"), ([nn.ReLU(), "x"], None, "str"), (nn.ReLU(), "adam", "optimizer is a str")],
    ids=["model", "chunk", "optimizer"],
)
def test_B4_other_types_are_refused(model: Any, optimizer: Any, words: str) -> None:
    for call in (torch_ext.offload, torch_ext.onload):
        with pytest.raises(TypeError, match=words):
            call(model, optimizer)
