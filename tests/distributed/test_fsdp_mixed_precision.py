"""FSDP2's MixedPrecisionPolicy: param_dtype decides the dtypes of moments and wire, fp32 shards are masters."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, bits
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import torch_ext

WORLD = 2


def _model(dtype: torch.dtype = FP32) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def _sharded(dtype: torch.dtype, *precisions: MixedPrecisionPolicy, root: MixedPrecisionPolicy | None = None) -> Any:
    """Returns a model in `dtype` under FSDP2. precisions: one for each inner unit; root: for the rest."""
    model = _model(dtype)
    for layer, precision in zip(model, precisions, strict=False):
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=root or precisions[-1])


def _bf16(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=BF16, **options)


# By name: (a function that builds the model, (param_dtype, moments, wire, main gradients, dtype of the shards)).
CASES: dict[str, Any] = {
    "bf16 everywhere": (lambda: _sharded(FP32, _bf16(), _bf16()), (BF16, BF16, BF16, FP32, FP32)),
    "reduced in fp32": (
        lambda: _sharded(FP32, _bf16(reduce_dtype=FP32), _bf16(reduce_dtype=FP32)),
        (BF16, BF16, BF16, FP32, FP32),
    ),
    "the root alone": (lambda: _sharded(FP32, root=_bf16()), (BF16, BF16, BF16, FP32, FP32)),
    "most of it": (
        lambda: _sharded(FP32, _bf16(), _bf16(), root=MixedPrecisionPolicy()),
        (BF16, BF16, BF16, FP32, FP32),
    ),
    "little of it": (
        lambda: _sharded(FP32, MixedPrecisionPolicy(), MixedPrecisionPolicy(), root=_bf16()),
        (FP32, FP32, FP32, FP32, None),
    ),
    "fp16": (
        lambda: _sharded(FP32, root=MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)),
        (FP16, FP32, FP32, FP32, FP32),
    ),
    "no param_dtype": (lambda: _sharded(FP32, root=MixedPrecisionPolicy()), (FP32, FP32, FP32, FP32, None)),
    "param_dtype fp32": (
        lambda: _sharded(FP32, root=MixedPrecisionPolicy(param_dtype=FP32)),
        (FP32, FP32, FP32, FP32, None),
    ),
    "bf16 shards": (lambda: _sharded(BF16, root=_bf16()), (BF16, BF16, BF16, BF16, None)),
    "bf16 shards, computed in fp32": (
        lambda: _sharded(BF16, root=MixedPrecisionPolicy(param_dtype=FP32)),
        (BF16, BF16, BF16, BF16, None),
    ),
    "not sharded": (lambda: _model(FP32), (FP32, FP32, FP32, FP32, None)),
}


def _decided(rank: int, world: int) -> None:
    """Every policy must be the expected one, also while the weights are unsharded."""
    for case, (make, expected) in CASES.items():
        model = make()
        for gathered in (False, True):
            if gathered and hasattr(model, "unshard"):
                for module in model.modules():
                    if hasattr(module, "unshard"):
                        module.unshard()
            policy = torch_ext.load_policy(model)
            param, moment, wire, main, shards = expected
            assert policy.param_dtype == param, case
            assert policy.exp_avg_dtype == policy.exp_avg_sq_dtype == moment, case
            assert (policy.grad_comm_dtype, policy.main_grads_dtype) == (wire, main), (case, policy)
            assert policy.grad_reduce_in_fp32 == (wire == FP32), case
            assert (policy.main_params_dtype, policy.shard_dtype) == (FP32, shards), case
            if shards is not None:
                rows = {line.split()[0]: line.split()[1:] for line in str(policy).splitlines()}
                assert rows["shard_dtype"] == ["fp32", "dtype"], case


def test_the_policy_follows_param_dtype() -> None:
    ranks.run(WORLD, _decided)


def _without_policies_of_groups(rank: int, world: int) -> None:
    """Removes the groups' mp_policy: load_policy must decide the same dtypes."""
    for case, (make, expected) in CASES.items():
        model = make()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
                    vars(group).pop("mp_policy", None)
        policy = torch_ext.load_policy(model)
        assert (policy.param_dtype, policy.shard_dtype) == (expected[0], expected[-1]), case


def test_each_parameter_knows_what_it_is_computed_in() -> None:
    """torch 2.15's parameter groups have no mp_policy; in every torch each parameter has one."""
    ranks.run(WORLD, _without_policies_of_groups)


def _norms_in_fp32(rank: int, world: int) -> tuple[int, int]:
    """Returns the bytes sent with only the norms computed in fp32, and with everything in fp32."""
    sent = []
    for in_fp32 in (lambda p: p.ndim == 1, lambda p: True):
        precision = _bf16(param_dtype_override_fn=lambda p, in_fp32=in_fp32: FP32 if in_fp32(p) else None)
        model = _sharded(FP32, precision, precision)
        policy = torch_ext.load_policy(model)
        assert policy.param_dtype == (FP32 if in_fp32(model[0][1].weight) else BF16)
        torch_ext.parallelize(model, policy, strategy="optim_grads_params")
        with torch.autocast("cpu", BF16):
            _gradients(model, 0, rank)
        assert all(p.grad.dtype == FP32 for p in model.parameters())
        sent.append(model.wire_bytes())
    return sent[0], sent[1]


@pytest.mark.skipif(
    "param_dtype_override_fn" not in MixedPrecisionPolicy.__dataclass_fields__,
    reason=f"param_dtype_override_fn came with torch 2.15, this is {torch.__version__}",
)
def test_what_a_unit_computes_in_fp32_decides_its_wire() -> None:
    norms, everything = (sum(sent) for sent in zip(*ranks.run(WORLD, _norms_in_fp32), strict=True))
    gathered = 2 * (2 * 2 * 32 * 32 + 32 * 4)  # 2 B x half of the elements for forward; inner units' again for backward
    assert everything - norms == gathered, "two bytes more for the weights, but not for their gradients"


def _overridden(rank: int, world: int) -> None:
    """Overrides must win here, too, and a policy built from a policy's configs must be equal to it."""
    model = _sharded(FP32, root=_bf16())
    policy = torch_ext.load_policy(model, override_optimizer_config={"exp_avg_sq_dtype": "fp8"})
    assert (policy.exp_avg_dtype, policy.exp_avg_sq_dtype) == (BF16, torch.uint8)
    row = policy.row(FP32)
    assert (row.param_dtype, row.exp_avg_sq_dtype, row.grad_comm_dtype) == (FP32, torch.uint8, BF16)
    again = torch_ext.load_policy(
        override_optimizer_config=policy.optimizer_config, override_ddp_config=policy.ddp_config
    )
    assert again == policy and again.row(FP32) == row
    no_masters = torch_ext.load_policy(model, override_optimizer_config={"shard_dtype": None})
    assert no_masters.row(FP32).exp_avg_dtype == FP32
    with pytest.raises(ValueError, match="fp16=True contradicts the model's param_dtype=bf16"):
        torch_ext.load_policy(model, fp16=True)
    before = torch_ext.load_policy(BF16, override_optimizer_config={"shard_dtype": "fp32"})
    assert before == torch_ext.load_policy(model), "as before fully_shard"


def test_overrides_win_over_what_follows_param_dtype() -> None:
    ranks.run(1, _overridden)


def _gradients(model: Any, step: int, rank: int) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
    model(x).float().square().mean().backward()


def _train(rank: int, ours: bool, policy: Any, steps: int = 6) -> tuple[Any, Any]:
    """Trains the sharded model. ours: with our exchange; policy: None: the one that follows from the model."""
    model = _sharded(FP32, _bf16(), _bf16())
    policy = torch_ext.load_policy(model) if policy is None else policy
    if ours:
        torch_ext.parallelize(model, policy, strategy="optim_grads_params")
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy)
    for step in range(steps):
        _gradients(model, step, rank)
        torch_ext.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _trained(rank: int, world: int) -> list[bytes]:
    """Moments are bf16, the fp32 shard is the only master, and weights stay close to those with fp32 moments."""
    answers = []
    for ours in (False, True):
        model, optimizer = _train(rank, ours, None)
        exact, _ = _train(rank, ours, torch_ext.load_policy(FP32))
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            state = optimizer.state[p]
            assert p.dtype == p.to_local().dtype == FP32
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == BF16
            assert not {"master_param", "master_remainder"} & set(state)
            assert torch.allclose(p.to_local(), q.to_local(), rtol=0, atol=2e-2)
        saved = optimizer.state_dict()
        assert "master_param" not in saved["state"][0]
        fresh = torch_ext.AdamW(model.named_parameters(), lr=1.0, policy=optimizer.policy)
        fresh.load_state_dict(saved)
        for each in (optimizer, fresh):
            _gradients(model, 9, rank)
            before = [p.detach().clone() for p in model.parameters()]
            each.step()
            each.zero_grad()
            answers.append(bits([p.to_local() for p in model.parameters()]))
            with torch.no_grad():
                for p, was in zip(model.parameters(), before, strict=True):
                    p.copy_(was)
        assert answers[-1] == answers[-2], "resumed bit for bit"
    return answers[-1]


def test_fp32_shards_are_trained_as_masters_with_bf16_moments() -> None:
    ranks.run(WORLD, _trained)


def _bytes_sent(rank: int, world: int, override: Any) -> int:
    model = _sharded(FP32, _bf16(), _bf16())
    policy = torch_ext.load_policy(model, override_ddp_config=override)
    torch_ext.parallelize(model, policy, strategy="optim_grads_params")
    _gradients(model, 0, rank)
    return model.wire_bytes()


def test_the_wire_is_param_dtypes() -> None:
    """A bf16 wire must carry one byte more than an 8-bit one for each gradient element that a rank sends."""
    elements = sum(p.numel() for p in _model().parameters())
    bf16, fp8 = (ranks.run(WORLD, _bytes_sent, wire)[0] for wire in ({}, {"grad_comm_dtype": "fp8"}))
    gathered = 3 * elements  # 2 B x half of the elements for forward; most of them again for backward
    assert elements * 0.8 < 2 * (bf16 - fp8) < elements * 1.2
    assert bf16 < elements + gathered


def _mixed_units(rank: int, world: int) -> list[int]:
    """Returns the bytes sent with all units in bf16, with one in fp32, and with a wire dtype set by override."""
    sent = []
    fp32 = MixedPrecisionPolicy(param_dtype=FP32)
    for precision, override in ((_bf16(), {}), (fp32, {}), (fp32, {"grad_comm_dtype": "bf16"})):
        model = _sharded(FP32, precision, _bf16())
        policy = torch_ext.load_policy(model, override_ddp_config=override)
        assert policy.param_dtype == BF16
        torch_ext.parallelize(model, policy, strategy="optim_grads_params")
        _gradients(model, 0, rank)
        sent.append(model.wire_bytes())
        assert all(p.grad.dtype == FP32 for p in model.parameters())
    return sent


def test_units_that_compute_in_fp32_have_the_wire_of_fp32() -> None:
    bf16, mixed, asked = (sum(sent) / WORLD for sent in zip(*ranks.run(WORLD, _mixed_units), strict=True))
    unit = 32 * 32 + 3 * 32
    gathered = 2 * unit // 2 * 2  # two more bytes for each of the unit's weights, for forward and again for backward
    assert mixed - asked == 2 * unit // 2, "two bytes more for each of its gradients"
    assert asked - bf16 == gathered


def _reduced_in_fp32(rank: int, world: int) -> int:
    """Returns the bytes sent with reduce_dtype=fp32."""
    precision = _bf16(reduce_dtype=FP32)
    model = _sharded(FP32, precision, precision)
    torch_ext.parallelize(model, torch_ext.load_policy(model), strategy="optim_grads_params")
    _gradients(model, 0, rank)
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    return model.wire_bytes()


def test_the_wire_is_param_dtypes_beside_a_reduction_in_fp32() -> None:
    """FSDP2 widens gradients before it requests the sum. They must still be sent in bf16; the sum is fp32 anyway."""
    assert ranks.run(WORLD, _reduced_in_fp32) == ranks.run(WORLD, _bytes_sent, {})
