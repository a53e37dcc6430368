"""docs/recipes/verl.md: its configuration lines, used as verl creates an optimizer."""

import importlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import recipes
import torch
from training import bits, everything
from verl_rebuilt import build_optimizer, configured

import torch_ext

BF16, FP32 = torch.bfloat16, torch.float32


def _verls(params: Any, config: dict[str, Any]) -> Any:
    """Creates the optimizer with verl itself."""
    theirs = importlib.import_module("verl.workers.config.optimizer")
    return theirs.build_optimizer(params, theirs.FSDPOptimizerConfig(**config))


BUILDERS = [
    pytest.param(build_optimizer, id="rebuilt"),
    pytest.param(_verls, id="verl", marks=recipes.needs("verl")),
]


def _model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 16)).to(dtype)
    with torch.no_grad():
        # Not near zero, where bf16 numbers are so close together that any update would move the weight.
        for p in model.parameters():
            p.copy_(torch.where(p.abs() < 0.02, torch.full_like(p, 0.02), p))
    return model


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Like verl's FSDP engine: clips with torch's function and steps if the norm is finite."""
    params = list(model.parameters())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            signal = torch.linspace(-1, 1, p.numel()).reshape(p.shape) + (0.1 if i % 2 else -0.1)
            p.grad = (signal + 0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype)
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        if bool(torch.isfinite(norm)):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("build", BUILDERS)
def test_two_words_of_verls_configuration_make_our_optimizer(build: Callable[..., Any]) -> None:
    lines, others = recipes.blocks("verl", "text")
    *lines_without_states, states = lines.strip().splitlines()
    in_its_place = "\n".join([*lines_without_states, others])
    assert states.endswith("states=bf16_remainder")
    for text, exp_avg, remainders in ((lines, BF16, True), (in_its_place, torch.uint8, False)):
        optimizer = build(_model(BF16).parameters(), configured(text, lr=1e-6, betas=[0.9, 0.95]))
        assert isinstance(optimizer, torch_ext.Adam)
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-6, (0.9, 0.95), 0.01)
        assert (optimizer.policy.exp_avg_dtype, optimizer.policy.store_param_remainders) == (exp_avg, remainders)


@pytest.mark.parametrize("build", BUILDERS)
def test_at_the_learning_rates_of_reinforcement_learning_the_weights_move(build: Callable[..., Any]) -> None:
    """How far weights move in 100 steps at lr 1e-6. The fp32 model shows how far they should move."""
    lines = recipes.blocks("verl", "text")[0]
    runs: dict[str, tuple[torch.nn.Module, Any]] = {}
    for name, text, dtype in (("ours", lines, BF16), ("torch, bf16", "", BF16), ("torch, fp32", "", FP32)):
        model = _model(dtype)
        if dtype == FP32:
            model.load_state_dict(_model(BF16).state_dict())
        runs[name] = model, build(model.parameters(), configured(text, lr=1e-6, weight_decay=0.0))
        _train(*runs[name], range(100))
    start = [p.detach().float() for p in _model(BF16).parameters()]
    right = [p.detach() - s for p, s in zip(runs["torch, fp32"][0].parameters(), start, strict=True)]
    ours = [m - s for m, s in zip(runs["ours"][1].master_state_dict().values(), start, strict=True)]
    nothing = [p.detach().float() - s for p, s in zip(runs["torch, bf16"][0].parameters(), start, strict=True)]
    length = torch.cat([r.flatten() for r in right]).norm()
    error = torch.cat([(o - r).flatten() for o, r in zip(ours, right, strict=True)]).norm()
    assert not any(bool(n.any()) for n in nothing), "no bf16 weight without a master has moved"
    assert float(error / length) < 0.02
    for p, master in zip(runs["ours"][0].parameters(), runs["ours"][1].master_state_dict().values(), strict=True):
        assert torch.equal(p, master.bfloat16())


def test_offload_and_checkpoint_as_verl_does_them_lose_no_bit() -> None:
    """verl's optimizer_offload replaces every tensor of the state; its checkpoints are state_dict() written by
    torch.save."""
    for states in ("bf16", "bf16_remainder", "8bit"):
        config = configured(recipes.blocks("verl", "text")[0])
        config["override_optimizer_config"]["states"] = states
        models = [_model(BF16) for _ in range(3)]
        plain, moved, resumed = (build_optimizer(model.parameters(), config) for model in models)
        _train(models[0], plain, range(6))
        _train(models[1], moved, range(3))
        for group in moved.param_groups:
            for p in group["params"]:
                for key, value in moved.state[p].items():
                    moved.state[p][key] = value.clone()
        file = io.BytesIO()
        torch.save(moved.state_dict(), file)
        assert sorted(moved.state_dict()["state"][0]) == ["exp_avg", "exp_avg_sq", "master_param", "step"]
        models[2].load_state_dict(models[1].state_dict())
        _train(models[1], moved, range(3, 6))
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        _train(models[2], resumed, range(3, 6))
        assert everything(plain) == everything(moved) == everything(resumed), states
        assert [bits(p) for p in models[0].parameters()] == [bits(p) for p in models[2].parameters()]


# -- the settings of a Megatron run -----------------------------------------------------------------------------------

ALWAYS = {"optimizer": "adam", "lr": 1e-5, "min_lr": 1e-6, "clip_grad": 1.0, "weight_decay": 0.1}
OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}
AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
# run -> the model's dtype; the options that verl passes to Megatron-LM's OptimizerConfig; the dtypes of exp_avg,
# masters and main gradients; the fraction on the host
RUNS: dict[str, tuple[torch.dtype, dict[str, Any], tuple[Any, ...], float]] = {
    "bf16": (BF16, {"bf16": True, "params_dtype": BF16}, (FP32, FP32, FP32), 0.0),
    "bf16, precision-aware": (
        BF16,
        {"bf16": True, "params_dtype": BF16, "main_grads_dtype": FP32, **AWARE},
        (BF16, FP32, FP32),
        0.0,
    ),
    "bf16, half of it on the host": (BF16, {"bf16": True, "params_dtype": BF16, **OFFLOADED}, (FP32, FP32, FP32), 0.5),
    "bf16, a fraction without the switch": (
        BF16,
        {"bf16": True, "optimizer_cpu_offload": False, "optimizer_offload_fraction": 0.5},
        (FP32, FP32, FP32),
        0.0,
    ),
    "fp16": (
        torch.float16,
        {
            "bf16": False,
            "fp16": True,
            "params_dtype": torch.float16,
            "initial_loss_scale": 32768,
            "min_loss_scale": 1,
            "use_precision_aware_optimizer": True,
            "store_param_remainders": False,
        },
        (FP32, FP32, FP32),
        0.0,
    ),
    "fp32": (FP32, {"bf16": False, "fp16": False, "params_dtype": FP32}, (FP32, FP32, FP32), 0.0),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_keys_of_a_megatron_run_decide_the_same_dtypes(name: str) -> None:
    dtype, keys, (exp_avg, master, main_grads), fraction = RUNS[name]
    names: dict[str, Any] = {
        "model": _model(dtype),
        "megatron": {**ALWAYS, "use_distributed_optimizer": True, **keys},
    }
    recipes.run("verl", 0, names)
    policy, optimizer = names["policy"], names["optimizer"]
    assert (policy.exp_avg_dtype, policy.main_params_dtype, policy.main_grads_dtype) == (exp_avg, master, main_grads)
    assert (policy.min_lr, policy.clip_grad, policy.data_parallel_sharding_strategy) == (1e-6, 1.0, "optim")
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-5, 0.1, (0.9, 0.999))
    params = list(names["model"].parameters())
    on_host = [p.numel() for p, there in zip(params, optimizer.on_host(params), strict=True) if there]
    assert abs(sum(on_host) - fraction * sum(p.numel() for p in params)) <= max(p.numel() for p in params) / 2
    assert bool(on_host) == bool(fraction)
    if dtype != torch.float16:
        _train(names["model"], optimizer, range(2))


def test_no_key_of_megatron_is_dropped_in_silence() -> None:
    for key in ("decoupled_lr", "muon_momentum", "optimizer_cuda_graph"):
        with pytest.raises(ValueError, match=key):
            recipes.run("verl", 0, {"model": _model(BF16), "megatron": {**ALWAYS, key: 1}})
    with pytest.raises(ValueError, match="sgd"):
        recipes.run("verl", 0, {"model": _model(BF16), "megatron": ALWAYS | {"optimizer": "sgd"}})


def test_every_key_of_the_pages_table_is_taken() -> None:
    table = (recipes.PAGES / "verl.md").read_text().split("| verl's key |")[1].split("\n\n")[0]
    keys: set[str] = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    values = {**torch_ext.load_policy(BF16).optimizer_config, **RUNS["bf16"][1], **OFFLOADED, "lr": 1e-5, "min_lr": 0.0}
    assert len(keys) == 25
    for key in keys:
        recipes.run("verl", 0, {"model": _model(BF16), "megatron": {key: values[key]}})
