"""torch.distributed.checkpoint loads what another optimizer saved: torch.optim.AdamW's state into ours, without masters
into with masters, without names into with names, between strategies. A seeded table of savers and loaders."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from gradients import BF16, FP32, Given, bits, noise
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import torch_ext

SHAPES: list[Any] = [(3, 5), (129,), (16, 130)]
IDIOMS = ["objects", "state dicts", "get and set", "flattened"]
STRATEGIES = ["none", "no_shard", "optim", "optim_grads", "optim_grads_params"]
STATES = {
    "fp32": (FP32, {}),
    "masters": (BF16, {}),
    "remainders": (BF16, {"store_param_remainders": True}),
    "8 bits": (BF16, {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
    "no master": (BF16, {"main_params_dtype": None}),
}


class Side(NamedTuple):
    """The model and optimizer that save, or that load. named: from named_parameters()."""

    kind: str
    states: str
    named: bool
    strategy: str


def _build(side: Side, seed: int) -> tuple[Any, Any]:
    """Returns the side's model, with weights drawn from `seed`, and its optimizer."""
    dtype, config = STATES[side.states]
    model: Any = Given(SHAPES, dtype)
    weights = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=weights))
    policy = torch_ext.load_policy(dtype, override_optimizer_config=config)
    if side.strategy != "none":
        torch_ext.parallelize(model, policy, strategy=side.strategy)
    params = model.named_parameters() if side.named else model.parameters()
    if side.kind == "torch":
        return model, torch.optim.AdamW(params, lr=0.1, weight_decay=0.2)
    return model, torch_ext.AdamW(params, lr=0.1, weight_decay=0.2, policy=policy)


def _steps(model: Any, optimizer: Any, which: range) -> None:
    """Takes the training steps whose numbers are in `which`."""
    for step in which:
        model(noise(step, 0, SHAPES, BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: Any, optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """Returns weights and logical states by parameter, on every rank."""
    if isinstance(optimizer, torch_ext.AdamW):
        state = optimizer.consolidate_state_dict(to=None)["state"]
        optimizer.state_dict()
    else:
        state = optimizer.state_dict()["state"]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [
        {"weight": weight.detach().clone(), **{key: torch.as_tensor(value).clone() for key, value in entry.items()}}
        for weight, entry in zip(weights, state.values(), strict=True)
    ]


def _given(idiom: str, model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns what is given to dcp.save or dcp.load, by one of IDIOMS."""
    if idiom == "objects":
        return {"model": model, "optimizer": optimizer}
    if idiom == "state dicts":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    options = StateDictOptions(flatten_optimizer_state_dict=idiom == "flattened")
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": state, "optimizer": optimizer_state}


def _load(idiom: str, model: Any, optimizer: Any, folder: str) -> None:
    """Loads through our reader, and sets the states where the idiom does."""
    given = _given(idiom, model, optimizer)
    dcp.load(given, storage_reader=torch_ext.CheckpointReader(folder))
    if idiom == "state dicts":
        optimizer.load_state_dict(given["optimizer"])
    # Not for remainders: torch looks for flattened keys among the stored ones, where master_param is not.
    if idiom == "get and set" or (idiom == "flattened" and not optimizer.policy.store_param_remainders):
        options = StateDictOptions(flatten_optimizer_state_dict=idiom == "flattened")
        sets = {"model_state_dict": given["model"], "optim_state_dict": given["optimizer"]}
        set_state_dict(model, optimizer, **sets, options=options)


def _differs(saved: dict[str, torch.Tensor], found: dict[str, torch.Tensor], states: str) -> Iterator[str]:
    """Yields the keys whose values differ from those that were saved, in the loader's dtypes."""
    dtype, _ = STATES[states]
    if bits([found["weight"]]) != bits([saved["weight"].to(dtype)]):
        yield "weight"
    for key in ("exp_avg", "exp_avg_sq"):
        if states == "8 bits" and found[key].numel() > 1:
            close = torch.allclose(found[key], saved[key].float(), rtol=0.3, atol=float(saved[key].abs().max()) / 50)
        else:
            close = bits([found[key]]) == bits([saved[key].to(found[key].dtype)])
        if not close:
            yield key
    if "master_param" in found:
        master = saved.get("master_param", saved["weight"]).float()
        if bits([found["master_param"]]) != bits([master]):
            yield "master_param"
    if float(found["step"]) != float(saved["step"]):
        yield "step"


def _cases(seed: int, n: int) -> list[tuple[Side, Side, str, bool]]:
    """Draws `n` cases: saver, loader, idiom, and whether the loader has taken a step before."""
    draw = random.Random(seed)
    found = []
    while len(found) < n:
        kind = draw.choice(["torch", "torch", "ours"])
        saver = Side(kind, draw.choice(["fp32", "masters"]), draw.random() < 0.3, "none")
        if kind == "ours":
            saver = Side(kind, draw.choice(list(STATES)), draw.random() < 0.3, draw.choice(STRATEGIES))
        idiom = draw.choice(IDIOMS)
        # A loader without names finds a parameter's master only if torch puts the parameter's name into the keys.
        named = draw.random() < 0.5 or idiom in ("objects", "state dicts")
        states = draw.choice(list(STATES))
        if saver.states not in ("fp32", "no master") and states in ("fp32", "no master"):
            continue  # the loader has no place for masters: test_loading
        found.append((saver, Side("ours", states, named, draw.choice(STRATEGIES)), idiom, draw.random() < 0.5))
    return found


def _pairs(rank: int, world: int, seed: int, n: int, folder: str) -> list[str]:
    """Saves and loads each case; returns what is wrong."""
    wrong = []
    for i, (saver, loader, idiom, stepped) in enumerate(_cases(seed, n)):
        model, optimizer = _build(saver, 7)
        _steps(model, optimizer, range(2))
        saved = _whole(model, optimizer)
        at = f"{folder}/{i}"
        dcp.save(_given(idiom, model, optimizer), checkpoint_id=at)
        other_model, other = _build(loader, 8)
        if stepped:
            _steps(other_model, other, range(5, 6))
        case = f"{saver} -> {loader}, {idiom}, {'stepped' if stepped else 'fresh'}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                _load(idiom, other_model, other, at)
        except BaseException as error:
            wrong.append(f"{case}: {type(error).__name__}: {str(error)[-400:]}")
            continue
        for name, (there, here) in enumerate(zip(saved, _whole(other_model, other), strict=True)):
            wrong += [f"{case}: {key} of p{name}" for key in _differs(there, here, loader.states)]
        options = other.param_groups[0]
        if options["weight_decay"] != 0.2 or options["param_id"] not in ("name", "position"):
            wrong.append(f"{case}: {options}")
        _steps(other_model, other, range(2, 3))
        if any(bool(values.isnan().any()) for entry in _whole(other_model, other) for values in entry.values()):
            wrong.append(f"{case}: NaN after another step")
    return wrong


@pytest.mark.parametrize("seed", range(2))
def test_G5_what_others_saved_loads_through_our_reader(seed: int, tmp_path: Path) -> None:
    for wrong in ranks.run(2, _pairs, seed, 14, str(tmp_path), limit=100.0):
        assert not wrong, "\n".join(wrong)


WORDS = (
    r"Missing key.*master_param.*storage_reader=torch_ext\.CheckpointReader\(path\).*masters are made from the weights"
)


def _saved_by_torch(folder: Path) -> tuple[Any, Any]:
    """Saves a model with torch.optim.AdamW through torch's writer."""
    model, optimizer = _build(Side("torch", "masters", False, "none"), 7)
    _steps(model, optimizer, range(2))
    dcp.save(_given("get and set", model, optimizer), checkpoint_id=folder)
    return model, optimizer


@pytest.mark.parametrize("idiom", IDIOMS)
def test_torchs_planner_says_which_reader_loads_what_is_missing(idiom: str, tmp_path: Path) -> None:
    model, optimizer = _build(Side("torch", "masters", False, "none"), 7)
    _steps(model, optimizer, range(2))
    dcp.save(_given(idiom, model, optimizer), checkpoint_id=tmp_path)
    loader, ours = _build(Side("ours", "masters", True, "none"), 8)
    before = _whole(loader, ours)
    with pytest.raises(CheckpointException, match=WORDS):
        dcp.load(_given(idiom, loader, ours), checkpoint_id=tmp_path)
    for here, there in zip(_whole(loader, ours), before, strict=True):
        assert bits(list(here.values())) == bits(list(there.values()))


def test_a_planner_that_passes_over_what_is_missing_makes_masters_too(tmp_path: Path) -> None:
    saved = _whole(*_saved_by_torch(tmp_path))
    model, optimizer = _build(Side("ours", "remainders", False, "none"), 8)
    with pytest.warns(UserWarning, match="no 'optimizer.state.p0.master_param', .* made from the weights in it"):
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(_given("get and set", model, optimizer), checkpoint_id=tmp_path, planner=planner)
    for there, here in zip(saved, _whole(model, optimizer), strict=True):
        assert not list(_differs(there, here, "remainders"))


def test_masters_of_parameters_without_names_are_the_weights_that_were_loaded(tmp_path: Path) -> None:
    model, optimizer = _build(Side("torch", "fp32", False, "none"), 7)
    _steps(model, optimizer, range(2))
    dcp.save(_given("objects", model, optimizer), checkpoint_id=tmp_path)
    loader, ours = _build(Side("ours", "masters", False, "none"), 8)
    with pytest.warns(
        UserWarning, match="no 'optimizer.state.0.master_param', .*the weight is its master from the next"
    ):
        _load("objects", loader, ours, str(tmp_path))
    ours.resync_masters()  # as the next step would do
    for there, here in zip(_whole(model, optimizer), _whole(loader, ours), strict=True):
        assert not list(_differs({**there, "master_param": there["weight"].bfloat16()}, here, "masters"))


MISSING = {
    "a moment": "optimizer.state.p1.exp_avg_sq",
    "an option of torch's": "optimizer.param_groups.0.betas",
    "a weight": "model.p2",
}


@pytest.mark.parametrize("what", MISSING)
def test_keys_that_every_adam_has_stay_missed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved_by_torch(tmp_path)
    read = torch_ext.CheckpointReader.read_metadata

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = read(self, *args, **kwargs)
        del metadata.state_dict_metadata[MISSING[what]]
        return metadata

    monkeypatch.setattr(torch_ext.CheckpointReader, "read_metadata", without)
    model, optimizer = _build(Side("ours", "masters", True, "none"), 8)
    with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: {MISSING[what]}"):
        _load("get and set", model, optimizer, str(tmp_path))


def test_optimizers_of_others_are_left_alone(tmp_path: Path) -> None:
    model, optimizer = _saved_by_torch(tmp_path)
    optimizer.param_groups[0]["seed"] = 1
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer.param_groups.0.seed.$"
    ):
        _load("get and set", model, optimizer, str(tmp_path))
