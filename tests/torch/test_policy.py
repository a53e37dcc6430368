"""torch_ext.load_policy from Python (semantics.md, A and B1). tests/core/policy_test.cc covers the rules; these tests
cover what Python adds."""

import copy
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torch_ext

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def linear(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(4, 4).to(dtype)


# A2: mode -> the policy's values
MATRIX = {
    "bf16": dict(
        param_dtype=torch.bfloat16,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.bfloat16,
        grad_comm_dtype=torch.bfloat16,
        grad_reduce_in_fp32=False,
        use_precision_aware_optimizer=True,
        bf16=True,
        fp16=False,
    ),
    "fp16": dict(
        param_dtype=torch.float16,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=torch.float32,
        grad_reduce_in_fp32=True,
        use_precision_aware_optimizer=True,
        store_param_remainders=False,
        initial_loss_scale=32768.0,
        min_loss_scale=1.0,
        bf16=False,
        fp16=True,
    ),
    "fp32": dict(
        param_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=torch.float32,
        grad_reduce_in_fp32=True,
        use_precision_aware_optimizer=False,
        bf16=False,
        fp16=False,
    ),
}
# A1: ways to ask for a mode
SOURCES = {
    "nothing": ("bf16", lambda: torch_ext.load_policy()),
    "bf16 flag": ("bf16", lambda: torch_ext.load_policy(bf16=True)),
    "fp16 flag": ("fp16", lambda: torch_ext.load_policy(fp16=True)),
    "both flags: fp16 wins": ("fp16", lambda: torch_ext.load_policy(bf16=True, fp16=True)),
    "no flag": ("fp32", lambda: torch_ext.load_policy(bf16=False, fp16=False)),
    **{
        f"{name} model": (name, lambda dtype=dtype: torch_ext.load_policy(linear(dtype)))
        for name, dtype in DTYPES.items()
    },
    **{f"{name} dtype": (name, lambda dtype=dtype: torch_ext.load_policy(dtype)) for name, dtype in DTYPES.items()},
    **{f"{name} name": (name, lambda name=name: torch_ext.load_policy(f" {name.upper()}")) for name in DTYPES},
    "configuration, bf16": ("bf16", lambda: torch_ext.load_policy(SimpleNamespace(bf16=True, fp16=False))),
    "configuration, neither": ("fp32", lambda: torch_ext.load_policy(SimpleNamespace(bf16=False, fp16=False))),
}


@pytest.mark.parametrize("source", SOURCES)
def test_A1_A2_mode(source: str) -> None:
    mode, load = SOURCES[source]
    policy = load()
    assert {key: getattr(policy, key) for key in MATRIX[mode]} == MATRIX[mode]


def test_A1_no_bf16_field_is_set_where_fp16_wins() -> None:
    policy = torch_ext.load_policy(bf16=True, fp16=True)
    assert "bf16" not in [value for key, value in policy.optimizer_config.items()]
    assert policy.bf16 is False


@pytest.mark.parametrize(
    ("source", "expected"),
    [(dict(bf16=True), False), (dict(bf16=False), True)],
    ids=["bf16", "not bf16"],
)
def test_A3_bucket_follows_bf16(source: dict[str, bool], expected: bool) -> None:
    assert torch_ext.load_policy(**source).grad_reduce_in_fp32 is expected


def test_A3_source_without_bf16_attribute() -> None:
    assert torch_ext.load_policy(SimpleNamespace(fp16=False)).grad_reduce_in_fp32 is True


def test_A4_overrides_win_key_by_key_and_the_rest_survives() -> None:
    policy = torch_ext.load_policy(
        torch.bfloat16,
        optimizer_config={"lr": 1e-3, "clip_grad": 0.5},
        override_optimizer_config={"exp_avg_sq_dtype": "fp32", "lr": 2e-3},
    )
    assert policy.exp_avg_sq_dtype == torch.float32
    assert policy.exp_avg_dtype == torch.bfloat16
    assert (policy.lr, policy.clip_grad) == (2e-3, 0.5)


@pytest.mark.parametrize(
    ("former", "now"), [(0, "off"), (0.0, "off"), (math.inf, "on"), (2.5, "auto"), (10, "auto"), (None, "auto")]
)
def test_former_name_of_grad_comm_compression_is_taken_with_a_warning(former: float | None, now: str) -> None:
    with pytest.warns(FutureWarning, match=r"override_ddp_config: compress_below_gbps is now grad_comm_compression"):
        loaded = torch_ext.load_policy(override_ddp_config={"compress_below_gbps": former})
    assert loaded.grad_comm_compression == now and not hasattr(loaded, "compress_below_gbps")
    with pytest.warns(FutureWarning, match="grad_comm_compression"):
        hooked = torch_ext.load_policy(override_ddp_config=lambda _: {"compress_below_gbps": former})
    assert hooked.grad_comm_compression == now


@pytest.mark.parametrize("missing", [None, {}], ids=["None", "empty"])
def test_A4_missing_mapping_is_an_empty_one(missing: dict[str, object] | None) -> None:
    policy = torch_ext.load_policy(
        override_optimizer_config=missing, override_ddp_config=missing, optimizer_config=missing
    )
    assert policy == torch_ext.load_policy()


def test_A4_one_resolution_from_both_sides() -> None:
    policy = torch_ext.load_policy(torch.bfloat16, override_optimizer_config={"main_grads_dtype": torch.float32})
    assert policy.grad_comm_dtype == torch.float32
    assert policy.grad_reduce_in_fp32 is True
    policy = torch_ext.load_policy(torch.bfloat16, override_ddp_config={"grad_reduce_in_fp32": True})
    assert policy.main_grads_dtype == torch.float32


def test_A5_hook_sees_the_resolved_policy_once_and_wins() -> None:
    seen: list[torch_ext.Policy] = []

    def hook(policy: torch_ext.Policy) -> dict[str, object]:
        seen.append(policy)
        return {"exp_avg_dtype": torch.float32 if policy.param_dtype == torch.bfloat16 else "bf16"}

    policy = torch_ext.load_policy(torch.bfloat16, override_optimizer_config=hook)
    assert len(seen) == 1
    assert seen[0].exp_avg_dtype == torch.bfloat16
    assert policy.exp_avg_dtype == torch.float32
    assert policy.exp_avg_sq_dtype == torch.bfloat16
    assert [line.split()[-1] for line in str(policy).splitlines() if line.startswith("exp_avg_dtype")] == ["hook"]


def test_A5_hook_may_have_nothing_to_say_on_either_side() -> None:
    policy = torch_ext.load_policy(override_optimizer_config=lambda _: None, override_ddp_config=lambda _: {})
    assert policy == torch_ext.load_policy()


def test_A5_exception_of_a_hook_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        torch_ext.load_policy(override_ddp_config=lambda policy: {"bucket_size": 1 // 0})
    with pytest.raises(TypeError, match="answer of override_ddp_config"):
        torch_ext.load_policy(override_ddp_config=lambda policy: 3)


CONTRADICTIONS = {
    "precision-aware off, bf16 moment": (
        dict(override_optimizer_config={"use_precision_aware_optimizer": False, "exp_avg_dtype": "bf16"}),
        ("use_precision_aware_optimizer", "exp_avg_dtype"),
    ),
    "flag against model": (dict(model=torch.float32, bf16=True), ("bf16", "model")),
    "grads on one side, bucket on the other": (
        dict(
            override_optimizer_config={"main_grads_dtype": "bf16"},
            override_ddp_config={"grad_reduce_in_fp32": True},
        ),
        ("main_grads_dtype", "grad_reduce_in_fp32"),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_A6_contradiction_names_both(case: str) -> None:
    arguments, keys = CONTRADICTIONS[case]
    with pytest.raises(ValueError) as refusal:
        torch_ext.load_policy(**arguments)
    assert all(key in str(refusal.value) for key in keys)


@pytest.mark.parametrize(
    ("precision_aware", "grads", "expected"),
    [(False, "fp32", True), (False, "bf16", True), (True, "fp32", True), (True, "bf16", False)],
)
def test_A7_conservative_preset(precision_aware: bool, grads: str, expected: bool) -> None:
    overrides = {"use_precision_aware_optimizer": precision_aware, "main_grads_dtype": grads}
    policy = torch_ext.load_policy(torch.bfloat16, preset="conservative", override_optimizer_config=overrides)
    assert policy.grad_reduce_in_fp32 is expected
    assert policy.exp_avg_dtype == torch.float32


def test_A7_explicit_value_wins() -> None:
    policy = torch_ext.load_policy(
        torch.bfloat16, preset="conservative", override_ddp_config={"grad_reduce_in_fp32": False}
    )
    assert policy.grad_reduce_in_fp32 is False


def test_A8_bf16_pins_three_dtypes_and_leaves_the_master() -> None:
    assert {k: MATRIX["bf16"][k] for k in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")} == {
        k: torch.bfloat16 for k in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")
    }
    assert torch_ext.load_policy(bf16=True).main_params_dtype == torch.float32


@pytest.mark.parametrize("value", [False, True])
def test_A8_use_distributed_optimizer_passes_through(value: bool) -> None:
    policy = torch_ext.load_policy(override_ddp_config={"use_distributed_optimizer": value})
    assert policy.use_distributed_optimizer is value
    assert policy.optimizer_config["use_distributed_optimizer"] is value
    assert policy.ddp_config["use_distributed_optimizer"] is value


def test_A8_optimizer_configuration_passes_verbatim() -> None:
    config = {"optimizer": "adam", "lr": 3e-4, "min_lr": 3e-5, "clip_grad": 0.7, "weight_decay": 0.03}
    policy = torch_ext.load_policy(optimizer_config=config)
    assert {key: policy.optimizer_config[key] for key in config} == config


def test_B1_full_sharding_and_overrides() -> None:
    policy = torch_ext.load_policy(full_shard=True)
    assert (
        policy.ddp_config
        | {
            "use_distributed_optimizer": True,
            "check_for_nan_in_grad": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "overlap_grad_reduce": True,
        }
        == policy.ddp_config
    )
    policy = torch_ext.load_policy(full_shard=True, override_ddp_config={"data_parallel_sharding_strategy": "optim"})
    assert policy.data_parallel_sharding_strategy == "optim"


BAD = {
    "unknown key": (dict(override_optimizer_config={"exp_avg_dtyp": "bf16"}), ValueError, "exp_avg_dtype"),
    "key of the other side": (dict(override_optimizer_config={"bucket_size": 3}), ValueError, "bucket_size"),
    "unknown dtype": (dict(override_optimizer_config={"exp_avg_dtype": "bf17"}), ValueError, "bf17"),
    "illegal master": (dict(override_optimizer_config={"main_params_dtype": "bf16"}), ValueError, "main_params_dtype"),
    "bucket cap": (dict(override_ddp_config={"bucket_size": 0}), ValueError, "bucket_size"),
    "NaN": (dict(optimizer_config={"lr": float("nan")}), ValueError, "lr"),
    "65 bits": (dict(override_ddp_config={"bucket_size": 2**70}), ValueError, "bucket_size"),
    "value that is none": (dict(optimizer_config={"lr": [1]}), TypeError, "lr"),
    "key that is none": (dict(optimizer_config={3: 1}), TypeError, "3"),
    "no mapping": (dict(override_optimizer_config=3), TypeError, "override_optimizer_config"),
    "no model": (dict(model=3), TypeError, "int"),
    "fp64 model": (dict(model=nn.Linear(2, 2).double()), ValueError, "float64"),
    "empty model": (dict(model=nn.ReLU()), ValueError, "ReLU"),
    "preset": (dict(preset="sed"), ValueError, "conservative"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    arguments, error, named = BAD[case]
    with pytest.raises(error, match=named):
        torch_ext.load_policy(**arguments)


def test_model_dtype_is_that_of_most_trainable_elements() -> None:
    model = nn.ModuleDict(
        {"big": nn.Linear(64, 64).half(), "small": nn.Linear(8, 8).bfloat16(), "norm": nn.LayerNorm(8)}
    )
    model["big"].requires_grad_(False)
    assert torch_ext.load_policy(model).param_dtype == torch.bfloat16


def test_row_of_another_dtype_keeps_what_is_explicit() -> None:
    policy = torch_ext.load_policy(torch.bfloat16, override_optimizer_config={"exp_avg_dtype": "uint8"})
    row = policy.row(torch.float32)
    assert (row.exp_avg_dtype, row.exp_avg_sq_dtype) == (torch.uint8, torch.float32)
    assert policy.row(torch.bfloat16) is policy
    with pytest.raises(ValueError, match="float64"):
        policy.row(torch.float64)


def test_policy_is_frozen_plain_and_copyable() -> None:
    policy = torch_ext.load_policy(torch.bfloat16, override_optimizer_config={"store_param_remainders": True})
    with pytest.raises(AttributeError, match="load_policy"):
        policy.lr = 1.0
    with pytest.raises(AttributeError, match="frozen"):
        del policy.lr
    assert repr(policy).startswith("Policy(") and "store_param_remainders=True" in repr(policy)
    with pytest.raises(AttributeError, match="exp_avg_dtype"):
        _ = policy.exp_avg_dtyp
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert hash(policy) == hash(copy.deepcopy(policy))
    assert policy != torch_ext.load_policy(torch.bfloat16)
    for config in (policy.optimizer_config, policy.ddp_config):
        assert json.loads(json.dumps(config)) == config
    again = torch_ext.load_policy(
        override_optimizer_config=policy.optimizer_config, override_ddp_config=policy.ddp_config
    )
    assert again == policy


def test_printed_table_has_every_key_and_where_it_came_from() -> None:
    policy = torch_ext.load_policy(
        torch.bfloat16, optimizer_config={"lr": 1e-3}, override_ddp_config={"bucket_size": 1000}
    )
    lines = {line.split()[0]: line.split() for line in str(policy).splitlines()}
    assert set(policy.optimizer_config) | set(policy.ddp_config) <= set(lines)
    assert lines["bucket_size"][1:] == ["1000", "override"]
    assert lines["exp_avg_dtype"][1:] == ["bf16", "dtype"]
    assert lines["lr"][1] == "0.001"


def test_a_policy_from_before_a_field_has_its_default() -> None:
    """Such a policy comes from a pickle that is older than the field."""
    policy = torch_ext.load_policy(torch.bfloat16)
    older = copy.copy(policy)
    for new in ("states", "min_8bit_size"):
        del older._values[new], older._origins[new]
    older = pickle.loads(pickle.dumps(older))
    assert older == policy and older.row(torch.float32) == policy.row(torch.float32) and str(older) == str(policy)
