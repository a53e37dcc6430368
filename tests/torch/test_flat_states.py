"""States of small parameters share one memory, which is passed to the operator as a whole. If other code replaces or
changes one of the states, the optimizer must notice."""

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import POLICIES, bits, everything, params_of, policy_of, set_grads, train

import torch_ext
from torch_ext.optim.state import access
from torch_ext.tensors import dense

BF16 = torch.bfloat16
MOMENT = "exp_avg"


def steps(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Like training.train, and asserts that no state tensor has been handed out."""
    train(optimizer, numbers)
    assert not access.exposed(optimizer.state)


def memories(optimizer: torch.optim.Optimizer, key: str) -> list[int]:
    """Returns the address of each parameter's memory for this key."""
    return [state[key].untyped_storage().data_ptr() for state in optimizer.state.values()]


def large_and_small() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel)) for numel in (70000, 3, 65536, 70000, 200)]


@pytest.mark.parametrize("way", ["made", "loaded"])
def test_small_ones_share_memory_and_large_ones_have_their_own(way: str) -> None:
    optimizer = torch_ext.AdamW(large_and_small())
    train(optimizer, range(1))
    if way == "loaded":
        loaded = torch_ext.AdamW(large_and_small())
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer = loaded
    for key in ("exp_avg", "exp_avg_sq"):
        a, b, c, d, e = memories(optimizer, key)
        assert b == c == e and len({a, b, d}) == 3
    assert len(set(memories(optimizer, "step"))) == 1
    b, c = (list(optimizer.state.values())[i]["exp_avg"] for i in (1, 2))
    assert c.data_ptr() - b.data_ptr() == 64, "one after the other, each from a cache line on"


def test_state_lies_in_memory_as_its_parameter_does() -> None:
    p = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = torch_ext.AdamW([nn.Parameter(torch.ones(7)), p, nn.Parameter(torch.ones(8, 8)[:, :3])])
    train(optimizer, range(1))
    strides = [state[MOMENT].stride() for state in optimizer.state.values()]
    assert strides == [(1,), p.stride(), (3, 1)]


@pytest.mark.parametrize("name", POLICIES)
def test_memory_of_their_own_gives_the_same_bits(name: str) -> None:
    """States that are replaced by clones, each in its own memory, are stepped to the same bits."""
    together, apart = (torch_ext.AdamW(params_of(name), lr=1e-2, policy=policy_of(name)) for _ in range(2))
    train(together, range(2))
    train(apart, range(2))
    for p, state in list(apart.state.items()):
        apart.state[p] = {key: value.clone() for key, value in state.items()}
    assert len(set(memories(apart, "step"))) == len(apart.state)
    train(together, range(2, 5))
    train(apart, range(2, 5))
    assert everything(together) == everything(apart)


# -- a state that other code changes is noticed ------------------------------------------------------------------------


def updated(state: dict[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    found: dict[Tensor, dict[str, Any]] = {}
    found.update(state)
    return found


def starred(state: dict[Tensor, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {"before": {}, **state}


def hooked(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Reads the state within state_dict(), which by itself hands out none of it."""
    found: dict[Tensor, dict[str, Any]] = {}
    handle = optimizer.register_state_dict_pre_hook(lambda o: found.update(dict(o.state)))
    optimizer.state_dict()
    handle.remove()
    return found


# Every way for other code to get at the state of a parameter.
WAYS: dict[str, Callable[[torch.optim.Optimizer, Tensor], dict[str, Any]]] = {
    "item": lambda o, p: o.state[p],
    "get": lambda o, p: o.state.get(p) or {},
    "setdefault": lambda o, p: o.state.setdefault(p, {}),
    "values": lambda o, p: list(o.state.values())[1],
    "items": lambda o, p: dict(o.state.items())[p],
    "dict": lambda o, p: dict(o.state)[p],
    "two stars": lambda o, p: starred(o.state)[p],
    "update": lambda o, p: updated(o.state)[p],
    "copy": lambda o, p: o.state.copy()[p],
    "copy.copy": lambda o, p: copy.copy(o.state)[p],
    "or": lambda o, p: (o.state | {})[p],
    "reversed or": lambda o, p: ({} | o.state)[p],
    "a hook of state_dict": lambda o, p: hooked(o)[p],
    "copy.copy of the optimizer": lambda o, p: copy.copy(o).state[p],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_swapped_data_of_a_state_is_noticed(way: Callable[..., dict[str, Any]]) -> None:
    """`held.data =` gives a state tensor new memory without touching the optimizer's dict."""
    optimizer, twin = (torch_ext.AdamW(params_of("fp32"), lr=1e-2) for _ in range(2))
    for o in (optimizer, twin):
        steps(o, range(2))
    held = way(optimizer, optimizer.param_groups[0]["params"][1])[MOMENT]
    assert access.exposed(optimizer.state)
    train(optimizer, range(2, 4))
    train(twin, range(2, 4))
    held.data = torch.zeros_like(held)
    twin.state[twin.param_groups[0]["params"][1]][MOMENT].zero_()
    for o in (optimizer, twin):
        train(o, range(4, 6))
    assert everything(optimizer) == everything(twin)
    assert held.count_nonzero() > 0


CHANGES: dict[str, Callable[[torch.optim.Optimizer, Tensor], Any]] = {
    "another tensor": lambda o, p: o.state[p].__setitem__(MOMENT, torch.zeros_like(p.detach())),
    "another entry": lambda o, p: o.state.__setitem__(p, {**o.state[p], MOMENT: torch.zeros_like(p.detach())}),
    "another entry by update": lambda o, p: o.state.update({p: {**o.state[p], MOMENT: torch.zeros_like(p.detach())}}),
    "another state": lambda o, p: setattr(
        o,
        "state",
        defaultdict(dict, {q: {**s, MOMENT: torch.zeros_like(q) if q is p else s[MOMENT]} for q, s in o.state.items()}),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_replaced_states_are_noticed(change: Callable[..., Any]) -> None:
    optimizer, twin = (torch_ext.AdamW(params_of("fp32"), lr=1e-2) for _ in range(2))
    for o in (optimizer, twin):
        steps(o, range(2))
    with torch.no_grad():
        change(optimizer, optimizer.param_groups[0]["params"][1])
        twin.state[twin.param_groups[0]["params"][1]][MOMENT].zero_()
    for o in (optimizer, twin):
        train(o, range(2, 4))
    assert everything(optimizer) == everything(twin)


GONE: dict[str, Callable[[torch.optim.Optimizer, Tensor], Any]] = {
    "pop": lambda o, p: o.state.pop(p),
    "del": lambda o, p: o.state.__delitem__(p),
    "clear": lambda o, p: o.state.clear(),
    "popitem": lambda o, p: [o.state.popitem() for _ in range(len(o.state))],
}


@pytest.mark.parametrize("remove", GONE.values(), ids=GONE.keys())
def test_removed_states_begin_again(remove: Callable[..., Any]) -> None:
    params = params_of("fp32")
    optimizer = torch_ext.AdamW(params, lr=1e-2)
    steps(optimizer, range(2))
    remove(optimizer, params[1])
    train(optimizer, range(2, 3))
    assert float(optimizer.state[params[1]]["step"]) == 1


def test_what_our_own_loop_does_hands_out_nothing() -> None:
    """Once states are handed out, each step must check every state, which costs a third of a step of small tensors."""
    params = params_of("bf16")
    optimizer = torch_ext.AdamW(params[:4], lr=1e-2, policy=policy_of("bf16"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(3):
        optimizer.zero_grad()
        set_grads(params, step)
        torch_ext.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        scheduler.step()
        if step == 0:
            optimizer.add_param_group({"params": params[4:]})
    optimizer.resync_masters()
    assert len(optimizer.state) == len(list(optimizer.state)) == len(optimizer.state.keys()) == len(params)
    assert all(p in optimizer.state for p in params)
    steps(optimizer, range(3, 4))


def test_loading_into_a_new_optimizer_hands_out_nothing_and_into_its_own_keeps_the_mark() -> None:
    """Loading copies the tensors of another optimizer's state dict, but uses its own, which the caller may still
    hold."""
    first, second = (torch_ext.AdamW(params_of("fp32"), lr=1e-2) for _ in range(2))
    steps(first, range(2))
    saved = first.state_dict()
    second.load_state_dict(saved)
    steps(second, range(2, 3))
    first.load_state_dict(saved)
    assert access.lent(first.state), "its memory is still that of `saved`"


@pytest.mark.parametrize("kind", POLICIES)
def test_a_state_dict_hands_out_no_state_tensor(kind: str) -> None:
    """Its tensors are others on the same memory, so that a step need not look for others in the place of its own. To
    write to a master through one of them is as to write to the master."""
    optimizer, twin = (torch_ext.AdamW(params_of(kind), lr=1e-2, policy=policy_of(kind)) for _ in range(2))
    for o in (optimizer, twin):
        steps(o, range(2))
    with torch.inference_mode():
        saved = optimizer.state_dict()["state"][1]
    ordinary = {key: value for key, value in saved.items() if isinstance(value, dense.SharingTensor)}
    assert "step" in ordinary and not any(map(Tensor.is_inference, ordinary.values()))
    if "master_param" in ordinary:
        own = twin.state[twin.param_groups[0]["params"][1]]["master_param"]
        for master in (ordinary["master_param"], own):
            master.mul_(2)
    for o in (optimizer, twin):
        train(o, range(2, 4))
    assert optimizer.external_writes() == twin.external_writes()
    for value in ordinary.values():
        value.data = torch.zeros(3)
    steps(optimizer, range(4, 5))
    train(twin, range(4, 5))
    assert everything(optimizer) == everything(twin)


def test_state_is_copied_and_pickled_as_torchs() -> None:
    optimizer = torch_ext.AdamW(params_of("fp32"), lr=1e-2)
    steps(optimizer, range(2))
    for copied in (pickle.loads(pickle.dumps(optimizer.state)), copy.deepcopy(optimizer.state)):
        assert type(copied) is defaultdict and copied.default_factory is dict
        pairs = zip(copied.values(), optimizer.state.values(), strict=True)
        assert all(bits(a[key]) == bits(b[key]) for a, b in pairs for key in b)


# -- a small state is pickled without the memory that it shares --------------------------------------------------------


def _through_torch_save(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# way -> to bytes, and back. A queue between processes moves tensors to shared memory.
PICKLED: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "pickle": (pickle.dumps, pickle.loads),
    "torch.save": (_through_torch_save, lambda data: torch.load(io.BytesIO(data), weights_only=True)),
    "a queue": (lambda value: bytes(ForkingPickler.dumps(value)), pickle.loads),
}


def trained(count: int, name: str) -> Any:
    """Returns an optimizer of `count` small parameters after two steps."""
    params = [nn.Parameter(torch.full((40,), i / 8).to(BF16)) for i in range(count)]
    optimizer = torch_ext.AdamW(params, policy=policy_of(name))
    train(optimizer, range(2))
    return optimizer


@pytest.mark.parametrize("way", PICKLED)
@pytest.mark.parametrize("name", ["bf16", "bf16_remainder", "8bit"])
def test_one_small_state_is_pickled_without_the_others(name: str, way: str) -> None:
    there, back = PICKLED[way]
    few, many = trained(2, name), trained(200, name)
    for get in (lambda o: list(o.state.values()), lambda o: list(o.state_dict()["state"].values())):
        assert len(there(get(many)[1])) <= len(there(get(few)[1])) + 64
        for key, value in get(many)[7].items():
            found = back(there(value))
            assert type(found) is Tensor and bits(found) == bits(value.clone()), key
            assert found.untyped_storage().nbytes() == found.nbytes, key
            assert not value.untyped_storage().is_shared(), "ours stays where it is"
    if way != "a queue":  # a queue opens a file for each tensor
        assert len(there(many.state_dict())) < 100 * 2 * len(there(few.state_dict())), "the parts, and not their square"


def test_small_states_share_memory_when_they_are_copied_together_and_train_on() -> None:
    optimizer = trained(5, "bf16")
    copied = copy.deepcopy(optimizer)
    for key in (MOMENT, "step"):
        assert len(set(memories(copied, key))) == 1
        assert set(memories(copied, key)).isdisjoint(memories(optimizer, key))
    unpickled = pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, copied, unpickled):
        train(each, range(2, 4))
    assert everything(optimizer) == everything(copied) == everything(unpickled)
