"""Names of dtypes in configurations: torch_ext.coerce_dtypes (semantics.md, C)."""

import copy
import json

import pytest
import torch

import torch_ext

NAMES = {
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half"),
    torch.uint8: ("fp8", "float8", "uint8"),
    None: ("auto",),
}
KEYS = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "other_dtype")
LEGAL = {
    "main_params_dtype": {torch.float32, torch.float16, None},
    "exp_avg_dtype": {torch.float32, torch.float16, torch.bfloat16, torch.uint8, None},
    "exp_avg_sq_dtype": {torch.float32, torch.float16, torch.bfloat16, torch.uint8, None},
    "other_dtype": set(NAMES),
}


def test_C1_only_dtype_keys_a_new_mapping_none_is_empty() -> None:
    given = {"exp_avg_dtype": "bf16", "dtype": "bf16", "exp_avg_dtypes": "bf16", "lr": 0.1, 7: "bf16"}
    before = copy.deepcopy(given)
    result = torch_ext.coerce_dtypes(given)
    assert result == before | {"exp_avg_dtype": torch.bfloat16}
    assert given == before
    assert result is not given
    assert torch_ext.coerce_dtypes(None) == {}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for dtype, names in NAMES.items() for name in names], ids=lambda x: str(x)
)
@pytest.mark.parametrize(
    "spell", [str, str.upper, lambda name: f"\t {name.title()} \n"], ids=["as is", "upper", "spaces"]
)
def test_C2_names(name: str, dtype: torch.dtype | None, spell: object) -> None:
    assert torch_ext.coerce_dtypes({"other_dtype": spell(name)}) == {"other_dtype": dtype}


@pytest.mark.parametrize("as_dtype", [False, True], ids=["name", "torch.dtype"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_C3_legal_sets(key: str, dtype: torch.dtype | None, as_dtype: bool) -> None:
    value = dtype if as_dtype else NAMES[dtype][0]
    if dtype in LEGAL[key]:
        assert torch_ext.coerce_dtypes({key: value}) == {key: dtype}
    else:
        with pytest.raises(ValueError, match=key) as refusal:
            torch_ext.coerce_dtypes({key: value})
        assert any(name in str(refusal.value) for name in NAMES[dtype])
        assert "fp32" in str(refusal.value)


def test_C3_master_in_fp16_is_a_legal_name_that_the_optimizer_refuses() -> None:
    policy = torch_ext.load_policy(torch.bfloat16, override_optimizer_config={"main_params_dtype": "fp16"})
    with pytest.raises(ValueError, match=r"main_params_dtype.*torch\.float32"):
        torch_ext.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], policy=policy)


@pytest.mark.parametrize(
    "value",
    ["bf17", "", "torch.bfloat16", "bf16\0", torch.int64, torch.float64, torch.quint8],
    ids=repr,
)
def test_C4_unknown_or_illegal_names_key_value_and_legal(value: object) -> None:
    with pytest.raises(ValueError) as refusal:
        torch_ext.coerce_dtypes({"exp_avg_dtype": value})
    message = str(refusal.value)
    assert "exp_avg_dtype" in message
    assert "bf16" in message
    assert "fp8" in message
    if value == "bf17":
        assert value in message


@pytest.mark.parametrize("value", [None, 3, 0.5, True, ["bf16"]], ids=repr)
def test_C4_none_and_other_types_pass_through(value: object) -> None:
    assert torch_ext.coerce_dtypes({"exp_avg_dtype": value}) == {"exp_avg_dtype": value}


def test_C5_configuration_stays_serialisable() -> None:
    config = {"exp_avg_dtype": "bf16", "lr": 0.1}
    policy = torch_ext.load_policy(torch.bfloat16, override_optimizer_config=config)
    assert config == {"exp_avg_dtype": "bf16", "lr": 0.1}
    assert json.loads(json.dumps(policy.optimizer_config))["exp_avg_dtype"] == "bf16"
    assert torch_ext.coerce_dtypes(policy.optimizer_config)["exp_avg_dtype"] == torch.bfloat16


def test_C6_without_dtype_keys_nothing_changes() -> None:
    config = {"lr": 0.1, "betas": (0.9, 0.999), "name": " BF16 "}
    assert json.dumps(torch_ext.coerce_dtypes(config)) == json.dumps(config)
