"""Models that are converted, or given other tensors, after their optimizer took steps. The next call raises, or does
what a new optimizer with the same state would do; moments are never applied to elements that they do not belong to."""

import copy
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from training import POLICIES, bits, everything, params_of, policy_of, set_grads, train

import torch_ext

SQUARE, WIDE = (12, 12), (6, 40)


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.square, self.wide, self.bias = params_of(name, [SQUARE, WIDE, (130,)])


def made(name: str, steps: int = 2, **options: Any) -> tuple[Model, torch_ext.AdamW]:
    """Returns a model and its optimizer after `steps` steps."""
    model = Model(name)
    optimizer = optimizer_of(model, name, **options)
    train(optimizer, range(steps))
    return model, optimizer


def optimizer_of(model: nn.Module, name: str, **options: Any) -> torch_ext.AdamW:
    options = {"lr": 1e-2, "policy": policy_of(name)} | options
    return torch_ext.AdamW(model.named_parameters(), **options)


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else torch.bfloat16


def reinterpreted(model: Model) -> None:
    """Gives a weight another dtype of equal size over the same memory; an fp32 weight another shape."""
    p = model.wide
    p.data = p.data.view({torch.float32: torch.float32, torch.bfloat16: torch.float16}.get(p.dtype, torch.bfloat16))
    if p.dtype == torch.float32:
        p.data = p.data.view(-1)


def written_and_reshaped(model: Model) -> None:
    with torch.no_grad():
        model.wide.mul_(2)
    model.wide.data = model.wide.data.view(-1)


def overwrite(p: nn.Parameter, value: Tensor) -> None:
    p.data = value


CONVERSIONS: dict[str, Callable[[Model], Any]] = {
    "model.to(dtype)": lambda m: m.to(other_dtype(m.wide.dtype)),
    "model.half() or float()": lambda m: m.float() if m.wide.dtype == torch.float16 else m.half(),
    "one parameter's dtype": lambda m: overwrite(m.wide, m.wide.data.to(other_dtype(m.wide.dtype))),
    "transposed copy": lambda m: overwrite(m.wide, m.wide.data.t().contiguous()),
    "transposed view": lambda m: overwrite(m.wide, m.wide.data.t()),
    "flattened view": lambda m: overwrite(m.wide, m.wide.data.view(-1)),
    "flattened copy": lambda m: overwrite(m.wide, m.wide.data.flatten().clone()),
    "written and flattened": written_and_reshaped,
    "another dimension": lambda m: overwrite(m.wide, m.wide.data.unsqueeze(0)),
    "fewer rows": lambda m: overwrite(m.wide, m.wide.data[:3]),
    "more rows": lambda m: overwrite(m.wide, torch.cat([m.wide.data, m.wide.data])),
    "empty": lambda m: overwrite(m.wide, m.wide.data.new_empty(0)),
    "the same memory in another dtype": reinterpreted,
}
# Each kind of state, and each option that changes what the optimizer does: name -> policy, options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in POLICIES},
    "on the host": ("bf16", {"offload_fraction": 1.0}),
    "a part on the host": ("bf16_remainder", {"offload_fraction": 0.4}),
    "error on writes": ("bf16", {"on_external_write": "error"}),
    "error on writes beside remainders": ("bf16_remainder", {"on_external_write": "error"}),
    "writes ignored": ("8bit", {"on_external_write": "ignore"}),
}


def all_of(optimizer: torch_ext.AdamW) -> list[Any]:
    """Returns everything that the optimizer holds, on the device and on the host."""
    held = [
        {key: bits(value) for key, value in optimizer.stored_state(p).items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return [everything(optimizer), held, optimizer.external_writes()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_converted_model_is_refused_and_nothing_changes(conversion: str, kind: str) -> None:
    name, options = KINDS[kind]
    model, optimizer = made(name, **options)
    before = {key: p.data for key, p in model.named_parameters()}
    was = model.wide.dtype, tuple(model.wide.shape)
    CONVERSIONS[conversion](model)
    converted = all_of(optimizer)
    calls = [optimizer.step, optimizer.state_dict, optimizer.master_state_dict, optimizer.master_weights().__enter__]
    for call in [*calls, optimizer.resync_masters]:
        set_grads(model.parameters(), 2)
        with pytest.raises(ValueError, match="'(square|wide)' was .*needs a new optimizer") as refusal:
            call()
        if "'wide'" in str(refusal.value):
            assert f"was {was[1]} in {was[0]}" in str(refusal.value)
            assert f"is {tuple(model.wide.shape)} in {model.wide.dtype} now" in str(refusal.value)
        assert all_of(optimizer) == converted
    # Converted back, training goes on as if nothing had happened.
    if conversion == "written and flattened":
        return
    plain, twin = made(name, **options)
    for key, p in model.named_parameters():
        p.data, p.grad = before[key], None
    for o in (optimizer, twin):
        train(o, range(2, 4))
    assert everything(optimizer) == everything(twin)


@pytest.mark.parametrize("name", POLICIES)
def test_a_frozen_parameter_may_wait_in_another_dtype(name: str) -> None:
    """While it is frozen its dtype does not matter; the first step with a gradient raises."""
    model, optimizer = made(name)
    plain, twin = made(name)
    for m, o in ((model, optimizer), (plain, twin)):
        m.wide.requires_grad_(False)
        if m is model:
            m.wide.data = m.wide.data.to(other_dtype(m.wide.dtype))
        for step in range(2, 4):
            set_grads([m.square, m.bias], step)
            o.step()
    assert bits(model.square) == bits(plain.square)
    model.wide.requires_grad_(True)
    set_grads(model.parameters(), 4)
    with pytest.raises(ValueError, match="'wide' was .*needs a new optimizer"):
        optimizer.step()


def pickled(model: Model, optimizer: torch_ext.AdamW) -> tuple[Model, torch_ext.AdamW]:
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Model, torch_ext.AdamW], tuple[Model, torch_ext.AdamW]]] = {
    "deepcopy": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickle": pickled,
}


@pytest.mark.parametrize("name", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_knows_what_its_state_is_for(way: str, when: str, name: str) -> None:
    model, optimizer = made(name)
    if when == "before":
        model.half()
    model, optimizer = COPIES[way](model, optimizer)
    if when == "after":
        model.half()
    set_grads(model.parameters(), 2)
    with pytest.raises(ValueError, match="'square' was .* needs a new optimizer"):
        optimizer.step()


@pytest.mark.parametrize("name", ["fp32", "bf16", "8bit"])
def test_a_state_that_was_loaded_is_for_the_model_as_it_was_then(name: str) -> None:
    model, optimizer = made(name)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = optimizer_of(model, name)
    fresh.load_state_dict(saved)
    model.half()
    set_grads(model.parameters(), 2)
    with pytest.raises(ValueError, match="'square' was .* needs a new optimizer"):
        fresh.step()


@pytest.mark.parametrize("name", POLICIES)
def test_before_the_first_step_any_conversion_is_legal(name: str) -> None:
    model = Model(name)
    optimizer = optimizer_of(model, name)
    model.to(other_dtype(model.wide.dtype))
    model.wide.data = model.wide.data.t().contiguous()
    train(optimizer, range(2))
    fresh = Model(name).to(model.wide.dtype)
    fresh.wide.data = fresh.wide.data.t().contiguous()
    twin = optimizer_of(fresh, name)
    train(twin, range(2))
    assert everything(optimizer) == everything(twin)


@pytest.mark.parametrize("name", ["bf16", "bf16_remainder", "8bit"])
def test_what_is_done_within_master_weights_must_leave_masters_masters(name: str) -> None:
    """Inside the context a weight may not get another shape: leaving it raises and restores weights and state."""
    model, optimizer = made(name)
    before = all_of(optimizer)
    with pytest.raises(ValueError, match="within master_weights.*'wide' .*legal"), optimizer.master_weights():
        model.wide.data = model.wide.data.t().contiguous()
    assert all_of(optimizer) == before


def test_other_strides_are_a_write_as_for_torch() -> None:
    """With the same dtype and shape but other strides, moments stay with the elements of the same indices."""
    ours, theirs = Model("fp32"), Model("fp32")
    twin = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer = optimizer_of(ours, "fp32", lr=1e-2)
    for step in range(6):
        for model, o in ((ours, optimizer), (theirs, twin)):
            if step % 2:
                model.square.data = model.square.data.t()
            set_grads(model.parameters(), step)
            o.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- strategies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 12, bias=False), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def of_second(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Returns a conversion of the second layer's weight."""

    def convert(model: Any) -> None:
        model.second.weight.data = change(model.second.weight.data)

    return convert


RANK_CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "dtype": of_second(lambda t: t.half()),
    "the same memory in another dtype": of_second(lambda t: t.view(torch.float16)),
    "transposed": of_second(lambda t: t.t()),
    "transposed copy": of_second(lambda t: t.t().contiguous()),
    "flattened": of_second(lambda t: t.view(-1)),
}
# (strategy, when the model is converted). With step_in_backward, the step is over when backward returns, so only
# "before backward" is possible.
STRATEGIES = [
    *((name, when) for name in ("no_shard", "optim", "optim_grads") for when in ("before backward", "before step")),
    *((f"{name} in backward", "before backward") for name in ("optim", "optim_grads")),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("conversion", RANK_CONVERSIONS)
@pytest.mark.parametrize(("strategy", "when"), STRATEGIES)
def test_under_parallelize_nothing_is_stepped_either(strategy: str, conversion: str, when: str) -> None:
    """Under no_shard, optim and optim_grads a converted model makes backward or step raise, and no weight or state
    changes."""
    name, _, in_backward = strategy.partition(" ")
    model = Net().bfloat16()
    policy = torch_ext.load_policy(model, override_ddp_config={"step_in_backward": bool(in_backward)})
    torch_ext.parallelize(model, policy, strategy=name)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy)

    def backward() -> None:
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
        model(x).float().square().sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    if when == "before step":
        backward()
    RANK_CONVERSIONS[conversion](model)
    weights = [p.detach() for p in model.parameters()]

    def now() -> list[Any]:
        return [[bits(w) for w in weights], [state_bits(optimizer, p) for p in model.parameters()]]

    before = now()
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        if when == "before backward":
            backward()
        optimizer.step()
    if when == "before step":
        assert "second.weight" in str(refusal.value) or "first.weight" in str(refusal.value)
    assert now() == before


FSDP_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda t: t.half(),
    "shape": lambda t: t.flatten(),
    "the same memory in another dtype": lambda t: DTensor.from_local(t.to_local().view(torch.float16), t.device_mesh),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("conversion", FSDP_CONVERSIONS)
def test_dtensors_are_refused_likewise(conversion: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    p = nn.Parameter(distribute_tensor(torch.randn(12, 12).bfloat16(), mesh, [Shard(0)]))
    optimizer = torch_ext.AdamW([("w", p)], lr=1e-2, policy=policy_of("bf16"))

    def step() -> None:
        p.grad = distribute_tensor(torch.ones(p.shape, dtype=p.dtype), mesh, p.placements)  # type: ignore[attr-defined]
        optimizer.step()

    step()
    step()
    p.data = FSDP_CONVERSIONS[conversion](p.data)
    before = bits(_local(p)), state_bits(optimizer, p)
    with pytest.raises(ValueError, match=r"'w' was .* needs a new optimizer"):
        step()
    assert (bits(_local(p)), state_bits(optimizer, p)) == before


def _local(t: Any) -> Tensor:
    """Returns this rank's shard of a DTensor; other tensors unchanged."""
    return t.to_local() if hasattr(t, "to_local") else t


def state_bits(optimizer: torch_ext.AdamW, p: Tensor) -> dict[str, bytes]:
    """Returns the bytes of everything that is stored for the parameter."""
    return {key: bits(_local(value)) for key, value in optimizer.stored_state(p).items()}


# -- programs ----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Program:
    """Random calls on a model and its optimizer. The oracle knows the dtypes and shapes that the state was created for,
    and what a new optimizer does with the same weights and state."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.name = self.random.choice(list(POLICIES))
        self.options = {"offload_fraction": self.random.choice([0.0, 0.0, 0.0, 0.5, 1.0])}
        self.model = Model(self.name)
        self.optimizer = optimizer_of(self.model, self.name, **self.options)
        self.forms: dict[str, Any] | None = None  # dtype and shape of each weight when the state was created
        self.saved: Any = None
        self.steps = 0

    def run(self, length: int) -> list[str]:
        trace = [f"policy {self.name}, {self.options}"]
        for _ in range(length):
            action = self.random.choice([*["step"] * 4, "convert", "assign", "back", "write", "save", "load", "resync"])
            trace.append(action)
            try:
                getattr(self, action)()
            except Exception as failure:
                raise AssertionError("; ".join(trace)) from failure
        return trace

    def now(self) -> dict[str, Any]:
        return {key: (p.dtype, tuple(p.shape)) for key, p in self.model.named_parameters()}

    @property
    def fits(self) -> bool:
        return self.forms is None or self.forms == self.now()

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Makes the call and returns its result if it is legal. Otherwise asserts that it raises and changes nothing,
        and returns None."""
        if self.fits:
            return call()
        before = all_of(self.optimizer)
        with pytest.raises(ValueError, match="needs a new optimizer"):
            call()
        assert all_of(self.optimizer) == before
        return None

    def step(self) -> None:
        """Takes a step, and compares it with the twin's if it is legal."""
        self.steps += 1
        set_grads(self.model.parameters(), self.steps)
        fresh = self.twin() if self.fits else None
        self.attempt(self.optimizer.step)
        if fresh is not None:
            model, optimizer = fresh
            optimizer.step()
            self.forms = self.now()
            assert [bits(p) for p in self.model.parameters()] == [bits(p) for p in model.parameters()]
            assert logical(self.optimizer) == logical(optimizer)

    def twin(self) -> tuple[Model, torch_ext.AdamW]:
        """Returns a new model and a new optimizer with the same weights, gradients and state."""
        model = Model(self.name)
        for p, own in zip(model.parameters(), self.model.parameters(), strict=True):
            p.data = own.detach().clone(memory_format=torch.preserve_format)
            p.grad = None if own.grad is None else own.grad.clone()
        optimizer = optimizer_of(model, self.name, **self.options)
        if self.forms is not None:
            optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return model, optimizer

    def convert(self) -> None:
        self.model.to(self.random.choice(DTYPES))

    def assign(self) -> None:
        """Gives a weight other data: transposed, reshaped, converted or scaled."""
        p = self.random.choice([self.model.square, self.model.wide])
        changes: list[Callable[[Tensor], Tensor]] = [
            lambda t: t.t() if t.dim() == 2 else t,
            lambda t: t.t().contiguous() if t.dim() == 2 else t,
            lambda t: t.flatten(),
            lambda t: t.reshape(SQUARE if t.numel() == 144 else WIDE),
            lambda t: t.to(self.random.choice(DTYPES)),
            lambda t: t.clone() * 0.5,
        ]
        p.data = self.random.choice(changes)(p.data)

    def back(self) -> None:
        """Restores the dtypes and shapes that the state was created for."""
        for key, p in self.model.named_parameters():
            dtype, shape = (self.forms or self.now())[key]
            p.data = p.data.to(dtype).reshape(shape)

    def write(self) -> None:
        p = self.random.choice(list(self.model.parameters()))
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(self.random.randrange(99))))

    def save(self) -> None:
        saved = self.attempt(self.optimizer.state_dict)
        if saved is not None:
            self.forms = self.now()  # state_dict has created missing state
            self.saved = (copy.deepcopy(saved), self.forms)

    def load(self) -> None:
        """Loads a saved state. It must raise if the weights have other shapes now."""
        if self.saved is None:
            return
        saved, forms = self.saved
        shapes = [[shape for _, shape in of.values()] for of in (forms, self.now())]
        if shapes[0] != shapes[1]:
            before = all_of(self.optimizer)
            with pytest.raises(ValueError, match="equal shapes are legal"):
                self.optimizer.load_state_dict(copy.deepcopy(saved))
            assert all_of(self.optimizer) == before
            return
        self.optimizer.load_state_dict(copy.deepcopy(saved))
        self.forms = self.now()

    def resync(self) -> None:
        if self.attempt(self.optimizer.resync_masters) is not None:
            assert self.attempt(self.optimizer.resync_masters) == 0


def logical(optimizer: torch_ext.AdamW) -> list[Any]:
    """Returns the bytes of the optimizer's logical state."""
    return [
        {key: bits(value.detach().clone()) for key, value in entry.items()}
        for entry in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.filterwarnings("ignore:.*load_state_dict")
@pytest.mark.parametrize("block", range(8))
def test_programs(block: int) -> None:
    stepped = refused = 0
    for seed in range(25 * block, 25 * (block + 1)):
        program = Program(seed)
        program.run(14)
        stepped += program.steps
        refused += not program.fits
    assert stepped > 50 and refused > 0
