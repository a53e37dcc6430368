"""step_in_backward=True: the optimizer steps during backward, with the bits of a step after it, and gradients are freed
as backward proceeds."""

import contextlib
import copy
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupt_programs import Interrupt
from torch.utils.checkpoint import checkpoint

import torch_ext

BF16, FP32 = torch.bfloat16, torch.float32

SMALL, LARGE = 40, 520
"""Layer widths. SMALL layers are stepped together, LARGE ones one by one."""


class Net(torch.nn.Module):
    """A model with tied weights, a frozen parameter, a layer that only some batches use, and a weight that is not
    contiguous."""

    def __init__(self, dtype: torch.dtype = BF16, width: int = SMALL, layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.tied = torch.nn.Linear(width, width, bias=False)
        self.tied.weight = self.layers[0].weight
        self.sometimes = torch.nn.Linear(width, width)
        self.frozen = torch.nn.Parameter(torch.ones(width), requires_grad=False)
        self.strided = torch.nn.Parameter(torch.randn(width, 2 * width)[:, ::2])
        self.to(dtype)

    def forward(self, x: torch.Tensor, uses: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.frozen
        return (self.tied(self.sometimes(x) if uses else x) @ self.strided).float().square().mean()


def _net(seed: int = 1, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def _groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [{"params": named[:3], "lr": 0.02, "weight_decay": 0.1}, {"params": named[3:]}]


def _inputs(seed: int, dtype: torch.dtype = BF16, width: int = SMALL) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _bits(net: torch.nn.Module) -> list[bytes]:
    return [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in net.parameters()]


def _trained(
    early: bool, kind: Any = torch_ext.AdamW, dtype: torch.dtype = BF16, width: int = SMALL, **options: Any
) -> tuple[Any, Any]:
    """Returns a model and its optimizer after five steps. early: the optimizer steps in backward."""
    net = _net(dtype=dtype, width=width)
    optimizer = kind(_groups(net), lr=0.01, step_in_backward=early, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(5):
        net(_inputs(step, dtype, width), uses=step % 2 == 0).backward()
        left = [name for name, p in net.named_parameters() if p.grad is not None]
        assert not early or left in ([], ["strided"]), "what is stepped as a copy is left to step()"
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return net, optimizer


@pytest.mark.parametrize("width", [LARGE, SMALL], ids=["one by one", "together"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {"states": "fp32"}),
        (BF16, {"states": "bf16"}),
        (BF16, {"states": "bf16_remainder"}),
        (BF16, {"states": "8bit"}),
        (BF16, {"policy": {"main_params_dtype": None}, "weight_rounding": "stochastic", "seed": 3}),
        (BF16, {"states": "bf16", "moment_rounding": "stochastic", "on_external_write": "error"}),
        (FP32, {"maximize": True, "on_external_write": "ignore"}),
    ],
    ids=lambda value: "" if isinstance(value, torch.dtype) else "-".join(map(str, value)),
)
def test_bits_of_a_step_after_backward(dtype: torch.dtype, options: dict[str, Any], width: int) -> None:
    ours, early = _trained(True, dtype=dtype, width=width, **options)
    theirs, late = _trained(False, dtype=dtype, width=width, **options)
    assert _bits(ours) == _bits(theirs)
    torch.testing.assert_close(early.state_dict()["state"], late.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch_ext.Adam, torch_ext.AdamW8bit])
def test_every_class(kind: Any) -> None:
    assert _bits(_trained(True, kind)[0]) == _bits(_trained(False, kind)[0])


def test_gradients_that_exist_at_a_time() -> None:
    """At any time the gradients in memory are the largest one plus those of small parameters, which wait to be stepped
    together."""
    width, peak = 600, 0
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12)))
    optimizer = torch_ext.AdamW(net.parameters(), step_in_backward=True)

    def look(_: torch.Tensor) -> None:
        nonlocal peak
        peak = max(peak, sum(p.grad.numel() for p in net.parameters() if p.grad is not None))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        net(torch.ones(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    everything = sum(p.numel() for p in net.parameters())
    assert 0 < peak <= width * width + (1 << 18) < everything / 4


# -- random programs ---------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Raised within a backward."""


class _Random(torch.nn.Module):
    """A random model: layers that are used once, several times, in any order, or not at all."""

    def __init__(self, chosen: random.Random) -> None:
        super().__init__()
        width = self.width = chosen.choice([16, LARGE])
        sizes = [width] * chosen.randint(2, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, n, bias=chosen.random() < 0.7) for n in sizes)
        for layer in self.layers[1:]:
            if chosen.random() < 0.2:
                layer.weight = self.layers[0].weight
            layer.weight.requires_grad_(layer.weight is self.layers[0].weight or chosen.random() < 0.85)
        self.to(chosen.choice([BF16, FP32]))

    def forward(self, x: torch.Tensor, order: list[int], raises_at: int | None) -> torch.Tensor:
        for k, i in enumerate(order):
            x = torch.tanh(self.layers[i](x)) + x
            if k == raises_at:
                x.register_hook(_stop)
        return x.float().square().sum()


def _stop(_: torch.Tensor) -> None:
    raise _Stop


def _named_by(optimizer: Any) -> list[str]:
    """Returns the parameters that step()'s error says were stepped before the backward raised."""
    with pytest.raises(RuntimeError, match="after a backward that raised when it had stepped") as caught:
        optimizer.step()
    return re.findall(r"'(layers\.\d\.\w+)'", str(caught.value))


def _program(seed: int, early: bool, known: list[list[str]] | None = None) -> tuple[list[bytes], list[list[str]]]:
    """Runs a random training and returns its weights and, for each backward that raised, the names of the parameters
    that were already stepped. With early=False each such step is taken for the parameters in `known` only."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    net = _Random(chosen)
    dtype = next(net.parameters()).dtype
    states = chosen.choice(["fp32", "bf16", "bf16_remainder", "8bit"]) if dtype == BF16 else None
    groups = [{"params": [named], "lr": chosen.choice([0.01, 0.1])} for named in net.named_parameters()]
    optimizer = torch_ext.AdamW(groups, states=states, seed=seed, step_in_backward=early)
    names = {p: name for name, p in net.named_parameters()}
    partly: list[list[str]] = []
    for step in range(6):
        order = [chosen.randrange(len(net.layers)) for _ in range(chosen.randint(1, 8))]
        raises_at = chosen.randrange(len(order)) if chosen.random() < 0.25 else None
        for group in optimizer.param_groups:
            group["lr"] *= chosen.choice([1.0, 0.5])
        x = torch.randn(4, net.width, generator=torch.Generator().manual_seed(step)).to(dtype).requires_grad_()
        frees = chosen.random() < 0.5
        try:
            net(x, order, raises_at).backward()
        except _Stop:
            before = {p: float(optimizer.state[p]["step"]) for p in net.parameters() if p.requires_grad}
            partly.append(_named_by(optimizer) if early and optimizer.stepped_in_backward() else [])
            if early:
                assert all(before[p] >= 1 for p in before if names[p] in partly[-1])
                optimizer.zero_grad()
                continue
            assert known is not None
            for p, name in names.items():
                if name not in known[len(partly) - 1]:
                    p.grad = None
        if any(p.grad is not None for p in net.parameters()) or early:
            optimizer.step()
        if frees or not early:
            optimizer.zero_grad()
    return _bits(net), partly


def test_random_programs() -> None:
    raised = 0
    for seed in range(30):
        early, partly = _program(seed, True)
        late, _ = _program(seed, False, partly)
        assert early == late, f"seed {seed}"
        raised += sum(map(bool, partly))
    assert raised > 2, "else nothing was tried"


# -- what is refused ---------------------------------------------------------------------------------------------------


def _made(**options: Any) -> tuple[Net, Any]:
    net = _net()
    return net, torch_ext.AdamW(net.named_parameters(), lr=0.01, step_in_backward=True, **options)


@pytest.mark.parametrize(
    "options",
    [{"policy": {"clip_grad": 1.0}}, {"skip_nonfinite": True}, {"offload_fraction": 0.5}, {}],
    ids=lambda options: next(iter(options.get("policy", options)), "fp16"),
)
def test_settings_that_contradict_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"step_in_backward=True and .*leave out one of the two"):
        dtype = BF16 if options else torch.float16
        torch_ext.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=dtype))], step_in_backward=True, **options)


def _clip(net: Net, optimizer: Any) -> None:
    torch_ext.clip_grad_norm_(optimizer, 1.0)


def _clip_torch(net: Net, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def _closure(net: Net, optimizer: Any) -> None:
    optimizer.step(lambda: 0.0)


def _scaler(net: Net, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def _second(net: Net, optimizer: Any) -> None:
    net(_inputs(1)).backward()


def _assigned(net: Net, optimizer: Any) -> None:
    net.layers[1].weight.grad = torch.ones_like(net.layers[1].weight)
    optimizer.step()


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (_clip, "applied and freed before the norm of all is known"),
        (_clip_torch, "applied and freed before the norm of all is known"),
        (_closure, r"step\(closure\) with step_in_backward=True: call backward\(\) yourself"),
        (_scaler, "GradScaler with step_in_backward=True"),
        (_second, "a second backward before step"),
        (_assigned, "gradients of 'layers.1.weight', which were stepped in backward"),
    ],
)
def test_what_is_refused(does: Callable[[Net, Any], None], says: str) -> None:
    net, optimizer = _made()
    net(_inputs(0)).backward()
    before = _bits(net)
    with pytest.raises(RuntimeError, match=says):
        does(net, optimizer)
    assert _bits(net) == before
    net.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    net(_inputs(1)).backward()
    optimizer.step()
    assert float(optimizer.state[net.layers[1].weight]["step"]) == 2


@pytest.mark.parametrize("twice", [True, False], ids=["one parameter twice", "one after the other"])
def test_reentrant_checkpoints_are_backwards_of_their_own(twice: bool) -> None:
    """Activation checkpointing with use_reentrant=True runs backwards inside the backward. They count as further
    backwards before step(), so they raise."""
    net, optimizer = _made()
    x = _inputs(0).requires_grad_()
    for layer in net.layers[1], net.layers[1 if twice else 2]:
        x = checkpoint(layer, x, use_reentrant=True)
    says = r"'layers.1.\w+' got a second gradient" if twice else r"a second backward"
    with pytest.raises(RuntimeError, match=says + r".*use_reentrant=False"):
        (net.layers[3](x)).sum().backward() if twice else x.sum().backward()
    del optimizer


def test_one_parameter_of_two_optimizers() -> None:
    net, optimizer = _made()
    with pytest.raises(ValueError, match="is stepped by another optimizer"):
        torch_ext.AdamW(net.parameters(), step_in_backward=True)
    del optimizer
    torch_ext.AdamW(net.parameters(), step_in_backward=True)


def _raised() -> tuple[Net, Any]:
    """Returns a model of four layers and its optimizer after a backward that raised once layers 2 and 3 were
    stepped."""
    net = _net(width=LARGE)
    optimizer = torch_ext.AdamW(net.named_parameters(), lr=0.01, step_in_backward=True)
    hidden = net.layers[1](net.layers[0](_inputs(0, width=LARGE)))
    hidden.register_hook(_stop)
    with pytest.raises(_Stop):
        net.layers[3](net.layers[2](hidden)).sum().backward()
    return net, optimizer


def test_a_backward_that_raised_says_what_was_stepped() -> None:
    net, optimizer = _raised()
    says = r"when it had stepped ('layers\.[23]\.(weight|bias)'(, )?){3,4} .*load a checkpoint, or call zero_grad\(\)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"step\(\) after a backward that raised " + says):
            optimizer.step()
        with pytest.raises(RuntimeError, match="a backward after a backward that raised " + says):
            net(_inputs(1, width=LARGE)).backward()
    optimizer.zero_grad()
    net(_inputs(1, width=LARGE)).backward()
    optimizer.step()
    steps = [float(optimizer.state[layer.weight]["step"]) for layer in net.layers]
    assert steps == [1, 1, 2, 2], "what was stepped stays stepped"


def test_a_checkpoint_after_a_backward_that_raised() -> None:
    net, optimizer = _raised()
    saved, expected = _net(3, width=LARGE), _net(3, width=LARGE)
    other = torch_ext.AdamW(expected.named_parameters(), lr=0.01)
    net.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(torch_ext.AdamW(saved.named_parameters(), lr=0.01).state_dict())
    net.zero_grad()
    for trained, by in ((net, optimizer), (expected, other)):
        trained(_inputs(1, width=LARGE)).backward()
        by.step()
    assert _bits(net) == _bits(expected)


# -- copies, checkpoints, groups, interrupts ---------------------------------------------------------------------------


def _goes_on(net: Any, optimizer: Any) -> list[bytes]:
    """Takes three more steps and returns the weights."""
    for step in range(5, 8):
        optimizer.zero_grad()
        net(_inputs(step)).backward()
        optimizer.step()
    return _bits(net)


def _copied(net: Any, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy((net, optimizer))  # type: ignore[no-any-return]


def _pickled(net: Any, optimizer: Any) -> tuple[Any, Any]:
    return pickle.loads(pickle.dumps((net, optimizer)))  # type: ignore[no-any-return]


def _loaded(net: Any, optimizer: Any) -> tuple[Any, Any]:
    other = _net(2)
    other.load_state_dict(net.state_dict())
    made = torch_ext.AdamW(_groups(other), lr=0.01, states="8bit", step_in_backward=True)
    made.load_state_dict(optimizer.state_dict())
    return other, made


def _loaded_in_place(net: Any, optimizer: Any) -> tuple[Any, Any]:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return net, optimizer


@pytest.mark.parametrize("way", [_copied, _pickled, _loaded, _loaded_in_place])
def test_copies_and_checkpoints(way: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    expected = _goes_on(*_trained(False, states="8bit"))
    net, optimizer = _trained(True, states="8bit")
    net, optimizer = way(net, optimizer)
    assert _goes_on(net, optimizer) == expected
    assert optimizer.step_in_backward
    net(_inputs(0)).backward()
    assert all(p.grad is None for name, p in net.named_parameters() if name != "strided")


def test_a_shallow_copy_steps_nothing_twice() -> None:
    net, optimizer = _trained(True)
    other = copy.copy(optimizer)
    expected = _goes_on(*_trained(False))
    assert _goes_on(net, optimizer) == expected
    del other


def test_zero_grad_in_place_of_step() -> None:
    """After a backward that stepped, zero_grad() completes the step as step() does."""
    net, optimizer = _made()
    for step in range(2):
        net(_inputs(step)).backward()
        assert optimizer.stepped_in_backward()
        optimizer.zero_grad()
        assert not optimizer.stepped_in_backward()
    assert float(optimizer.state[net.layers[1].weight]["step"]) == 2


def test_parameters_that_are_thawed_or_added() -> None:
    net, optimizer = _made()
    net(_inputs(0)).backward()
    optimizer.step()
    net.frozen.requires_grad_(True)
    added = torch.nn.Parameter(torch.ones(40, dtype=BF16))
    optimizer.add_param_group({"params": [("added", added)]})
    for _ in range(2):
        optimizer.zero_grad()
        (net(_inputs(1)) * added.sum().float()).backward()
        assert added.grad is None and net.frozen.grad is None
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (added, net.frozen)] == [2, 2]


def test_a_write_between_backwards_is_noticed() -> None:
    net, optimizer = _made(states="fp32")
    net(_inputs(0)).backward()
    with torch.no_grad():
        net.layers[1].weight.mul_(2)
    optimizer.step()
    optimizer.zero_grad()
    net(_inputs(1)).backward()
    assert optimizer.external_writes() == net.layers[1].weight.numel()


def test_a_backward_within_master_weights() -> None:
    net, optimizer = _made(states="fp32")
    net(_inputs(0)).backward()
    optimizer.step()
    with optimizer.master_weights(), torch.enable_grad():
        with pytest.raises(RuntimeError, match=r"within master_weights\(\)"):
            net.layers[1].weight.sum().backward()


def _interrupted(at: int | None, width: int) -> tuple[dict[str, tuple[int, bytes]], int]:
    """Takes two steps, and a third whose backward is interrupted (Ctrl-C) at point `at`; at=0: not interrupted,
    at=None: no third step. Returns how often each parameter was stepped and its bytes, and the number of points."""
    net, points = _net(width=width, layers=2), Interrupt(at or 0)
    optimizer = torch_ext.AdamW(net.named_parameters(), lr=0.1, step_in_backward=True)
    for seed in range(2 if at is None else 3):
        loss = net(_inputs(seed, width=width))
        with points if seed == 2 else contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
            loss.backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        optimizer.zero_grad()
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    steps = [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
    bits = dict(zip((name for name, _ in net.named_parameters()), _bits(net), strict=True))
    return {name: (step, bits[name]) for name, step in zip(names, steps, strict=True)}, points.count


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_nothing_is_stepped_twice_after_an_interrupt(width: int) -> None:
    """A critical point is between the operator call and the record that the parameter was stepped."""
    (before, _), (after, count) = _interrupted(None, width), _interrupted(0, width)
    draw = random.Random(width)
    points = [draw.randint(1, count) for _ in range(5)] + list(range(count - 40, count, 1 if width == SMALL else 4))
    for at in points:
        found, _ = _interrupted(at, width)
        for name, entry in found.items():
            assert entry in (before[name], after[name]), (at, name, entry[0])
