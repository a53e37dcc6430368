"""torch_ext.offload in one process (B4): using what is offloaded raises, so do calls that are not possible, and nothing
changes."""

import copy
import io
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from offloaded import KINDS, Net, adamw, everything, loss_of, memory, one_step, states, trained, weights
from torch import Tensor, nn

import torch_ext
from bench import resident_memory

USES: dict[str, tuple[str, Callable[[nn.Module, Any], object]]] = {
    # use -> (the kinds that must not be offloaded, by first letter; the use)
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
    "a copy of the model": ("p", lambda model, _: copy.deepcopy(model)),
    "a copy of a part of it": ("p", lambda model, _: copy.deepcopy(model.get_submodule("first"))),
    "a copy of both": ("ps", lambda model, optimizer: copy.deepcopy((model, optimizer))),
    "a pickle of the model": ("p", lambda model, _: pickle.dumps(model)),
    "the model in a file": ("p", lambda model, _: torch.save(model, io.BytesIO())),
    "a copy of the optimizer": ("s", lambda _, optimizer: copy.copy(optimizer)),
    "resync_masters": ("ps", lambda _, optimizer: optimizer.resync_masters()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_B4_uses_while_offloaded(use: str, kind: str) -> None:
    needs, act = USES[use]
    model, optimizer = trained()
    optimizer.zero_grad()
    model.eval()  # a forward in train mode would write buffers
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


NAMED: dict[str, tuple[str, Callable[[nn.Module, Any], object]]] = {
    # offloaded kind -> (how the message begins; a use)
    "params": (
        r"step\(\): parameter 'frozen.weight'",
        lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    ),
    "grads": (
        r"the gradient of parameter 'frozen.weight'",
        lambda _, optimizer: torch_ext.clip_grad_norm_(optimizer, 1.0),
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_B4_messages_name_the_parameter(kind: str) -> None:
    words, act = NAMED[kind]
    model = Net()
    optimizer = adamw(model)
    torch_ext.offload(model, optimizer, **{k: k == kind for k in KINDS})
    with pytest.raises(RuntimeError, match=rf"{words} is offloaded; call torch_ext\.onload\(model, optimizer\) first"):
        act(model, optimizer)


def test_B4_torch_optimizers_neither_save_nor_load_what_is_offloaded() -> None:
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
    """8-bit moments and remainders are decoded when they are read, also after state_dict() returned them."""
    params = training.params_of("8bit")
    model, optimizer = nn.ParameterList(params), torch_ext.AdamW(params, policy=training.policy_of("8bit"))
    training.train(optimizer, [0])
    entry = optimizer.state_dict()["state"][0]
    before = {key: value.clone() for key, value in entry.items()}
    torch_ext.offload(model, optimizer, **{k: k == kind for k in KINDS})
    with pytest.raises(RuntimeError, match=r"handed out before.*torch_ext\.onload"):
        entry["master_param"].clone()
    torch_ext.onload(model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in entry.items())


class Wrapped(torch.optim.Optimizer):
    """A framework's wrapper of an optimizer."""

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


def test_B4_no_group_is_added_while_weights_are_offloaded() -> None:
    """Their addresses are all the same then, as if they shared memory."""
    model, optimizer = trained()
    torch_ext.offload(model, optimizer)
    late = {"params": [("late", nn.Parameter(torch.ones(3).bfloat16()))]}
    with pytest.raises(RuntimeError, match=r"^add_param_group\(\): parameter .* is offloaded; call torch_ext\.onload"):
        optimizer.add_param_group(dict(late))
    torch_ext.onload(model, optimizer)
    groups = len(optimizer.param_groups)
    optimizer.add_param_group(dict(late))
    assert len(optimizer.param_groups) == groups + 1


def test_B4_zero_grad_is_fine_while_offloaded() -> None:
    model, optimizer = trained()
    torch_ext.offload(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    torch_ext.onload(model, optimizer)


def test_B4_a_graph_from_before_is_refused() -> None:
    """Backward through a graph that was recorded before the weights were offloaded raises."""
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
    """A weight's memory cannot be released if numpy, another process or a file uses it."""
    model = Net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    FIXED[how](model.second.weight, tmp_path)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"cannot release parameter 'second.weight'.*Clone"):
        torch_ext.offload(model, optimizer)
    assert everything(model, optimizer) == before
    one_step(model, optimizer, 1)


_WITHOUT_ROOM = """
import resource, torch, torch_ext
from bench import resident_memory
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2048)).sum().backward()
optimizer.step()
before = [t.detach().clone() for t in model.parameters()]
torch_ext.offload(model, optimizer)
limit = resident_memory.status("VmSize") + 3 * 2048 * 2048 * 4  # room for some storages, not for all
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
    """The process' address space is too small for onload, until the limit is lifted."""
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ROOM], capture_output=True, text=True, env=resident_memory.environment()
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
