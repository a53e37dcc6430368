"""The exponential moving average of masters that an optimizer keeps: its values, swapping it in, saving and loading it,
and the errors."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim import swa_utils

import torch_ext

BF16, F32 = torch.bfloat16, torch.float32
STATES = [(BF16, "bf16"), (BF16, "bf16_remainder"), (BF16, "8bit"), (F32, "fp32"), (torch.float16, "bf16")]


def model_in(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.ReLU(), torch.nn.Linear(70, 5)).to(dtype)


def optimizer_of(model: torch.nn.Module, states: str | None = None, **options: Any) -> torch_ext.AdamW:
    given: dict[str, Any] = {"lr": 1e-2, "ema_decay": 0.9} | options
    return torch_ext.AdamW(model.named_parameters(), states=states, **given)  # type: ignore[arg-type]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    model(torch.randn(8, 40, generator=generator).to(dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits_equal(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """Whether the mappings have the same keys and equal tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def clones(named: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value.detach().clone() for key, value in named.items()}


@pytest.mark.parametrize("every", [1, 3])
def test_fp32_is_what_swa_utils_keeps(every: int) -> None:
    """An fp32 average has the values of torch's AveragedModel with the same decay."""
    model = model_in(F32)
    optimizer = optimizer_of(model, ema_decay=0.97, ema_dtype=F32, ema_every=every)
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.97))
    for i in range(30):
        step(model, optimizer, i)
        if (i + 1) % every == 0:
            theirs.update_parameters(model)
    wanted = dict(theirs.module.named_parameters())
    for name, average in optimizer.ema_state_dict().items():
        torch.testing.assert_close(average, wanted[str(name)].detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype, states", STATES)
@pytest.mark.parametrize("ema_dtype, most", [(BF16, 0.02), ("24bit", 1e-4), (F32, 1e-6)])
def test_it_is_the_average_of_masters(dtype: torch.dtype, states: str, ema_dtype: Any, most: float) -> None:
    model = model_in(dtype)
    optimizer = optimizer_of(model, states, ema_dtype=ema_dtype)
    wanted: dict[Any, Any] = {}
    for i in range(20):
        step(model, optimizer, i)
        found = {key: value.double() for key, value in optimizer.master_state_dict().items()}
        wanted = {key: value if i == 0 else wanted[key] + 0.1 * (value - wanted[key]) for key, value in found.items()}
    averages = optimizer.ema_state_dict()
    assert averages.keys() == wanted.keys()
    for key, average in averages.items():
        assert average.dtype == F32
        assert float((average - wanted[key]).norm() / wanted[key].norm()) < most


def test_an_average_changes_no_bit_of_the_step() -> None:
    with_average, without = model_in(BF16), model_in(BF16)
    a, b = optimizer_of(with_average, "8bit"), optimizer_of(without, "8bit", ema_decay=None)
    for i in range(5):
        step(with_average, a, i)
        step(without, b, i)
    assert bits_equal(with_average.state_dict(), without.state_dict())


@pytest.mark.parametrize("dtype, states", STATES)
def test_weights_are_averages_inside_and_what_they_were_afterwards(dtype: torch.dtype, states: str) -> None:
    """ema_weights(): inside, weights are the averages rounded to their dtype; afterwards they and training are
    unchanged, also after an exception."""
    model = model_in(dtype)
    optimizer = optimizer_of(model, states, ema_dtype="24bit")
    for i in range(5):
        step(model, optimizer, i)
    before, averages = clones(model.state_dict()), optimizer.ema_state_dict()
    masters = clones(optimizer.master_state_dict())
    with pytest.raises(KeyError), optimizer.ema_weights():
        assert bits_equal(model.state_dict(), {key: value.to(dtype) for key, value in averages.items()})
        with pytest.raises(RuntimeError, match=r"step\(\) within ema_weights\(\)"):
            optimizer.step()
        raise KeyError("of the user")
    assert bits_equal(model.state_dict(), before)
    step(model, optimizer, 9)
    assert optimizer.external_writes() == 0
    again = model_in(dtype)
    other = optimizer_of(again, states, ema_dtype="24bit")
    for i in (0, 1, 2, 3, 4, 9):
        step(again, other, i)
    assert bits_equal(again.state_dict(), model.state_dict())
    assert not bits_equal(masters, optimizer.master_state_dict())


def test_before_the_first_step_it_is_the_weights() -> None:
    model = model_in(BF16)
    optimizer = optimizer_of(model)
    assert bits_equal(optimizer.ema_state_dict(), {key: p.detach().float() for key, p in model.named_parameters()})


@pytest.mark.parametrize(("dtype", "states"), STATES)
def test_it_is_the_weights_that_were_loaded_since_its_state_was_made(dtype: torch.dtype, states: str) -> None:
    """Frameworks call state_dict before training, which creates the state, and load the model afterwards. The average
    must begin with the loaded weights."""
    model = model_in(dtype)
    optimizer = optimizer_of(model, states)
    optimizer.state_dict()
    loaded = {key: torch.full_like(p, 0.5) for key, p in model.named_parameters()}
    model.load_state_dict(loaded)
    assert bits_equal(clones(optimizer.ema_state_dict()), {key: p.float() for key, p in loaded.items()})
    with optimizer.ema_weights():
        assert bits_equal(dict(model.named_parameters()), loaded)
    step(model, optimizer, 0)
    averages = clones(optimizer.ema_state_dict())
    assert all(torch.allclose(averages[key], p.float(), rtol=0, atol=0.02) for key, p in model.named_parameters())


@pytest.mark.parametrize("ema_dtype", [BF16, "24bit", F32])
@pytest.mark.parametrize("way", ["state_dict", "torch.save", "pickle", "deepcopy"])
def test_a_saved_average_goes_on_bit_for_bit(ema_dtype: Any, way: str) -> None:
    model = model_in(BF16)
    optimizer = optimizer_of(model, "8bit", ema_dtype=ema_dtype)
    for i in range(3):
        step(model, optimizer, i)
    twin, other = (
        copy.deepcopy((model, optimizer)) if way == "deepcopy" else pickle.loads(pickle.dumps((model, optimizer)))
    )
    if way in ("state_dict", "torch.save"):
        saved = copy.deepcopy(optimizer.state_dict())
        if way == "torch.save":
            torch.save(saved, file := io.BytesIO())
            file.seek(0)
            saved = torch.load(file)
        other = optimizer_of(twin, "8bit", ema_dtype=ema_dtype)
        other.load_state_dict(saved)
    for i in range(3, 6):
        step(model, optimizer, i)
        step(twin, other, i)
    assert bits_equal(optimizer.ema_state_dict(), other.ema_state_dict())


def test_a_checkpoint_without_an_average_begins_one_and_one_too_many_is_dropped() -> None:
    """Either way load_state_dict warns and loads the rest of the state."""
    model = model_in(BF16)
    without = optimizer_of(model, "bf16", ema_decay=None)
    for i in range(3):
        step(model, without, i)
    optimizer = optimizer_of(model, "bf16", ema_dtype=F32)
    with pytest.warns(UserWarning, match="there is no ema_param of '0.weight'.*the average begins with the master"):
        optimizer.load_state_dict(without.state_dict())
    assert bits_equal(optimizer.ema_state_dict(), without.master_state_dict())
    with pytest.warns(UserWarning, match="ema_param of .* is dropped: there is no ema_decay"):
        without.load_state_dict(optimizer.state_dict())
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all("ema_param" not in entry for entry in theirs.state.values())


def test_states_on_the_host_average_as_others() -> None:
    models = [model_in(BF16) for _ in range(2)]
    optimizers = [
        optimizer_of(m, "bf16_remainder", offload_fraction=f) for m, f in zip(models, (0.0, 1.0), strict=True)
    ]
    for i in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, i)
    assert bits_equal(optimizers[0].ema_state_dict(), optimizers[1].ema_state_dict())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ema_dtype": torch.float8_e4m3fn}, "ema_dtype is torch.float8_e4m3fn; torch.bfloat16, '24bit'"),
    ({"ema_dtype": "bf16"}, "ema_dtype is 'bf16'"),
    ({"ema_decay": 1.0}, r"ema_decay is 1.0; a number in \[0, 1\)"),
    ({"ema_decay": "0.9"}, "ema_decay is '0.9'"),
    ({"ema_every": 0}, "ema_every is 0; a whole number from 1 on"),
    ({"policy": {"main_params_dtype": None}}, "ema_decay: '0.weight' is in torch.bfloat16 without a master"),
]


@pytest.mark.parametrize("options, says", WRONG, ids=lambda value: str(value)[:40])
def test_what_is_not_legal_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        optimizer_of(model_in(BF16), **options)


@pytest.mark.parametrize("kind", [torch_ext.AdamW, torch_ext.Adam, torch_ext.Muon, torch_ext.AdamW8bit])
@pytest.mark.parametrize(
    "options", [{"ema_dtype": F32}, {"ema_dtype": "24bit"}, {"ema_every": 4}, {"ema_every": 0}], ids=str
)
def test_how_to_keep_an_average_that_is_not_kept_is_refused(kind: Any, options: dict[str, Any]) -> None:
    """Options of an average without ema_decay are an error, as SGD's nesterov=True without momentum is."""
    (key,) = options
    named = list(model_in(BF16).named_parameters())
    with pytest.raises(ValueError, match=f"^{key}=.* without ema_decay keeps no average"):
        kind(named, **options)
    with pytest.raises(ValueError, match=f"group 0: '{key}' is one per optimizer, not per group"):
        kind([{"params": [p for _, p in named], **options}])


def test_without_ema_decay_there_is_none() -> None:
    # As scripts do that pass every option.
    optimizer = optimizer_of(model_in(BF16), ema_decay=None, ema_dtype=BF16, ema_every=1)
    with pytest.raises(
        RuntimeError, match=r"ema_state_dict\(\): there is no average; make the optimizer with ema_decay"
    ):
        optimizer.ema_state_dict()
    with pytest.raises(RuntimeError, match=r"ema_weights\(\): there is no average"), optimizer.ema_weights():
        pass


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda both: pickle.loads(pickle.dumps(both)),
    "torch.save": lambda both: torch.save(both, io.BytesIO()),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("opened", ["ema_weights", "master_weights"])
@pytest.mark.parametrize("states", ["bf16", "bf16_remainder", "8bit"])
def test_optimizers_are_not_copied_where_weights_are_others(states: str, opened: str, way: str) -> None:
    """Inside the contexts the weights are averages, which are not their masters rounded, or masters, whose dtype is not
    the weights': a copy of the optimizer would be wrong."""
    model = model_in(BF16)
    optimizer = optimizer_of(model, states)
    for i in range(3):
        step(model, optimizer, i)
    before = clones(optimizer.master_state_dict())
    with getattr(optimizer, opened)():
        alone = copy.deepcopy(model)  # saving the model alone is what the context is for
        with pytest.raises(RuntimeError, match=rf"an optimizer is pickled or copied within {opened}\(\)"):
            COPIES[way]((model, optimizer))
    assert [p.dtype for p in alone.parameters()] == [BF16 if opened == "ema_weights" else F32] * 4
    COPIES[way]((model, optimizer))
    assert bits_equal(optimizer.master_state_dict(), before)


@pytest.mark.parametrize("every", [2, 3])
def test_steps_of_a_parameter_are_those_in_which_it_has_a_gradient(every: int) -> None:
    """ema_every counts a parameter's own steps. Each parameter's average equals that of an optimizer that has this
    parameter only."""
    # One row per parameter: whether it has a gradient in each step.
    gradients = [(1, 1, 0, 1, 0, 0, 1), (1, 0, 1, 1, 1, 0, 1), (0, 0, 0, 1, 1, 1, 1)]
    params = [torch.nn.Parameter(torch.ones(5)) for _ in gradients]
    options: dict[str, Any] = {"lr": 0.1, "ema_decay": 0.5, "ema_every": every, "ema_dtype": F32}
    together = torch_ext.AdamW(params, **options)
    for at in range(7):
        for p, those in zip(params, gradients, strict=True):
            p.grad = torch.full((5,), 1.0 + at) if those[at] else None
        together.step()
    for i, those in enumerate(gradients):
        p = torch.nn.Parameter(torch.ones(5))
        alone = torch_ext.AdamW([p], **options)
        for at in (at for at in range(7) if those[at]):
            p.grad = torch.full((5,), 1.0 + at)
            alone.step()
        assert torch.equal(together.ema_state_dict()[i], alone.ema_state_dict()[0])


# -- together with other features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_before_it_begins_it_is_the_weights_as_they_are(states: str, every: int) -> None:
    """Calling state_dict() creates the state from weights that may still be loaded. Until the average begins, it is the
    current weights."""
    model = model_in(BF16)
    optimizer = optimizer_of(model, states, ema_every=every)
    optimizer.state_dict()
    for done in range(every):
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        wanted = clones(model.state_dict())
        assert bits_equal(optimizer.ema_state_dict(), {key: value.float() for key, value in wanted.items()})
        with optimizer.ema_weights():
            assert bits_equal(model.state_dict(), wanted)
        step(model, optimizer, done)
    masters = optimizer.master_state_dict()
    for key, average in optimizer.ema_state_dict().items():
        torch.testing.assert_close(average, masters[key], rtol=2**-7, atol=0)


def test_what_is_frozen_has_its_average_inside_as_in_the_state_dict() -> None:
    """A parameter that was frozen after some steps is its average inside ema_weights(), like the others."""
    model = model_in(BF16)
    optimizer = optimizer_of(model, "bf16_remainder", ema_dtype=F32)
    for i in range(3):
        step(model, optimizer, i)
    weight = next(model.parameters()).requires_grad_(False)
    averages = optimizer.ema_state_dict()
    assert not torch.equal(averages["0.weight"].to(BF16), weight)
    with optimizer.ema_weights():
        assert bits_equal(model.state_dict(), {key: value.to(BF16) for key, value in averages.items()})


@pytest.mark.parametrize("states", ["bf16", "bf16_remainder"])
@pytest.mark.parametrize("how", ["resync", "error", "ignore"])
def test_a_write_before_a_swap_is_what_it_is_without(how: str, states: str) -> None:
    """Swapping the average in does not hide an external write: it raises, is counted, or is overwritten by the next
    step, as without a swap."""
    found = []
    for swaps in (False, True):
        model = model_in(BF16)
        optimizer = optimizer_of(model, states, on_external_write=how)
        step(model, optimizer, 0)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        if swaps:
            with optimizer.ema_weights():
                pass
        said = ""
        try:
            step(model, optimizer, 1)
        except RuntimeError as error:
            said = str(error)
        assert ("on_external_write='error': '0.weight'" in said) == (how == "error")
        found.append((said, optimizer.external_writes(), clones(model.state_dict())))
    assert found[0][:2] == found[1][:2] and bits_equal(found[0][2], found[1][2])
    assert (found[0][1] > 0) == (how == "resync")
