"""What the optimizer rejects: an error that says what to do, raised before anything is written."""

import pytest
import torch
from torch import nn
from training import everything, params_of, policy_of, set_grads, train

import torch_ext


def one(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4, dtype=dtype))


def inference_parameter() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


def overlapping() -> list[nn.Parameter]:
    flat = torch.zeros(10)
    return [nn.Parameter(flat[:6]), nn.Parameter(flat[4:])]


# case -> parameters, options, exception, words of the message
CONSTRUCTOR = {
    "amsgrad": (lambda: [one()], dict(amsgrad=True), ValueError, r"amsgrad.*torch\.optim\.AdamW"),
    "differentiable": (lambda: [one()], dict(differentiable=True), ValueError, r"differentiable.*torch\.optim\.AdamW"),
    "negative lr": (lambda: [one()], dict(lr=-1.0), ValueError, "lr is -1"),
    "NaN lr": (lambda: [one()], dict(lr=float("nan")), ValueError, "lr is nan"),
    "infinite lr": (lambda: [one()], dict(lr=float("inf")), ValueError, "lr is inf"),
    "negative tensor lr": (lambda: [one()], dict(lr=torch.tensor(-1.0)), ValueError, "lr is -1"),
    "lr of two": (lambda: [one()], dict(lr=torch.ones(2)), ValueError, "2 elements"),
    "lr in bf16": (lambda: [one()], dict(lr=torch.ones(1).bfloat16()), ValueError, "bfloat16"),
    "beta 1": (lambda: [one()], dict(betas=(0.9, 1.0)), ValueError, r"betas\[1\] is 1"),
    "NaN beta": (lambda: [one()], dict(betas=(float("nan"), 0.9)), ValueError, r"betas\[0\]"),
    "three betas": (lambda: [one()], dict(betas=(0.9, 0.9, 0.9)), ValueError, "3 values"),
    "negative eps": (lambda: [one()], dict(eps=-1e-8), ValueError, "eps"),
    "NaN weight_decay": (lambda: [one()], dict(weight_decay=float("nan")), ValueError, "weight_decay"),
    "rounding": (lambda: [one()], dict(moment_rounding="up"), ValueError, "dithered"),
    "seed": (lambda: [one()], dict(seed=2**64), ValueError, "seed"),
    "on_external_write": (lambda: [one()], dict(on_external_write="warn"), ValueError, "resync"),
    "policy": (lambda: [one()], dict(policy=5), TypeError, "load_policy"),
    "unknown option": (lambda: [one()], dict(sharding=1), TypeError, "sharding"),
    "nothing": (lambda: [], {}, ValueError, "empty"),
    "a tensor": (lambda: one(), {}, TypeError, "iterable"),
    "complex": (lambda: [one(torch.complex64)], {}, TypeError, "view_as_real"),
    "double": (lambda: [one(torch.float64)], {}, TypeError, "float64.*bfloat16"),
    "sparse": (lambda: [nn.Parameter(torch.ones(3, 3).to_sparse())], {}, TypeError, "to_dense"),
    "meta": (lambda: [nn.Parameter(torch.empty(3, device="meta"))], {}, ValueError, "to_empty"),
    "inference": (lambda: [inference_parameter()], {}, ValueError, "inference_mode"),
    "expanded": (lambda: [nn.Parameter(torch.ones(1).expand(4))], {}, ValueError, "contiguous"),
    "twice in a group": (lambda: [p := one(), p], {}, ValueError, "twice"),
    "in two groups": (
        lambda: [{"params": [p := one()]}, {"params": [p]}],
        {},
        ValueError,
        "more than one parameter group",
    ),
    "overlapping": (overlapping, {}, ValueError, "parameter 0 of group 0 and parameter 1 of group 0 share memory"),
    "not a leaf": (lambda: [one() * 2], {}, ValueError, "non-leaf"),
    "two seeds": (
        lambda: [{"params": [one()], "seed": 1}, {"params": [one()], "seed": 2}],
        {},
        ValueError,
        "group 1: seed is 2",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTOR)
def test_constructor_refuses(case: str) -> None:
    params, options, error, message = CONSTRUCTOR[case]
    with pytest.raises(error, match=message):
        torch_ext.AdamW(params(), **options)


def test_names_are_used_where_they_are_known() -> None:
    with pytest.raises(TypeError, match=r"'head\.weight' is in torch\.float64"):
        torch_ext.AdamW([("head.weight", one(torch.float64))])


def test_refused_group_is_not_added() -> None:
    optimizer = torch_ext.AdamW([one()])
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [one(torch.float64)]})
    with pytest.raises(ValueError, match="group 1: lr"):
        optimizer.add_param_group({"params": [one()], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    train(optimizer, range(1))


def sparse(p: nn.Parameter) -> None:
    p.grad = torch.ones_like(p).to_sparse()


def double(p: nn.Parameter) -> None:
    p.grad = None
    p.grad_dtype = torch.float64
    p.grad = torch.ones(p.shape, dtype=torch.float64)


def shrunk(p: nn.Parameter) -> None:
    p.data = p.data[:2]


# what happens to one parameter after two steps -> words of step()'s error
AT_STEP = {
    "sparse gradient": (sparse, "gradient of parameter 3 of group 0 is sparse.*SparseAdam"),
    "gradient in float64": (double, "gradient of parameter 3 of group 0 is in torch.float64"),
    "parameter of another shape": (shrunk, "parameter 3 of group 0"),
}


@pytest.mark.parametrize("case", AT_STEP)
def test_step_refuses_and_changes_nothing(case: str) -> None:
    spoil, message = AT_STEP[case]
    params = params_of("fp32", [(5,), (6,), (7,), (8,), (9,)])
    optimizer = torch_ext.AdamW(params, lr=1e-2)
    train(optimizer, range(2))
    set_grads(params, 2)
    spoil(params[3])
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError), match=message):
            optimizer.step()
    assert everything(optimizer) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", -1.0), ("lr", float("nan")), ("betas", (0.9, 2.0)), ("eps", float("inf")), ("amsgrad", True)],
)
def test_step_refuses_hyper_parameters_that_became_illegal(key: str, value: object) -> None:
    params = params_of("bf16")
    optimizer = torch_ext.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=1e-2)
    train(optimizer, range(2))
    before = everything(optimizer)
    optimizer.param_groups[1][key] = value
    set_grads(params, 2)
    with pytest.raises(ValueError, match=f"group 1: .*{key}"):
        optimizer.step()
    assert everything(optimizer) == before


def test_model_converted_after_its_first_step() -> None:
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch_ext.AdamW(model.named_parameters())
    train(optimizer, range(1))
    model.float()
    set_grads(model.parameters(), 1)
    with pytest.raises(ValueError, match=r"'weight'.*new optimizer"):
        optimizer.step()


def test_state_of_another_shape_that_somebody_put_there() -> None:
    p = one(torch.bfloat16)
    optimizer = torch_ext.AdamW([p], policy=policy_of("bf16"))
    train(optimizer, range(1))
    optimizer.state[p]["exp_avg"] = torch.zeros(3)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="exp_avg must be"):
        optimizer.step()


def test_step_count_that_fp32_cannot_hold() -> None:
    p = one()
    optimizer = torch_ext.AdamW([("w", p)])
    train(optimizer, range(1))
    optimizer.state[p]["step"].fill_(2.0**24)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"2\^24.*'w'"):
        optimizer.step()


def test_tensor_that_wraps_others() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    p = torch.nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)))
    with pytest.raises(TypeError, match="TwoTensor, a tensor that wraps others"):
        torch_ext.AdamW([p])
