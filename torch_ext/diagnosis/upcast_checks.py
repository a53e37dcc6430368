"""Checks whether masters, moments and gradients are in fp32 if that was asked for."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.diagnosis import master_copies, optimizer_layers
from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.model_parameters import is_narrow
from torch_ext.diagnosis.optimizer_layers import attribute_of
from torch_ext.diagnosis.trained_parameters import Reading
from torch_ext.optim.optimizer_base import OptimizerBase


def check(reading: Reading) -> Iterator[Finding]:
    """Yields findings where a configuration or a mixed-precision policy asks for fp32 and the tensors are narrower."""
    cast = dict(reading.model.wanted_precision())
    kept = {name for t in reading.trained if not t.narrow for name in t.names}
    same = [n for n, dtype in cast.items() if reading.model.named[n].dtype == dtype and n not in kept]
    same = [n for n in same if is_narrow(reading.model.named[n])]
    if same:
        yield finding(
            "upcast_missing",
            f"A mixed-precision policy casts these parameters to {cast[same[0]]} for forward and backward, but they "
            "are in that dtype already: there are no fp32 weights, and the optimizer steps the 16-bit ones.",
            same,
            "model.float()  # before fully_shard(model, mp_policy=...), which then casts for forward and backward",
            *_elements(reading, same),
        )
    yield from _missing_masters(reading, set(same))
    yield from _narrow_states(reading)
    yield from _narrow_grads(reading)


def _elements(reading: Reading, names: Sequence[str]) -> tuple[float, str]:
    return float(sum(reading.model.named[name].numel() for name in names)), "elements"


def asked(reading: Reading, optimizer: Any, weight: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the dtypes that were asked for: of "master", "exp_avg", "exp_avg_sq" and "main_grad".

    Sources, from strong to weak: the policy that diagnose was given, Megatron-LM's configuration, the optimizer's own
    attributes.
    """
    found: dict[str, Any] = {}
    if not isinstance(optimizer, OptimizerBase):  # our optimizers accept only states of their policy's dtypes
        if master_copies.promises_masters(optimizer):
            found["master"] = getattr(optimizer, "master_weight_dtype", torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            found[key] = attribute_of(optimizer, f"{key}_dtype")
        for layer in reading.layers:
            inner = optimizer_layers.layers(layer)
            config = attribute_of(layer, "config")
            if attribute_of(config, "use_precision_aware_optimizer") and any(one is optimizer for one in inner):
                found |= _of_fields(config)
    if reading.policy is not None:
        found |= _of_fields(reading.policy.row(weight))
    return {key: dtype for key, dtype in found.items() if isinstance(dtype, torch.dtype)}


def _of_fields(config: Any) -> dict[str, Any]:
    fields = {"master": "main_params_dtype", "main_grad": "main_grads_dtype"}
    fields |= {key: f"{key}_dtype" for key in ("exp_avg", "exp_avg_sq")}
    return {key: value for key, name in fields.items() if (value := attribute_of(config, name)) is not None}


def _missing_masters(reading: Reading, but: set[str]) -> Iterator[Finding]:
    """Yields a finding about 16-bit weights whose masters have 16 bits, or that have no master although one was asked
    for. Without a policy, weights without a state are left out: their first step may still create the master."""
    found: dict[str, None] = {}
    narrow_copies = {id(c.weight) for c in reading.copies if c.copy.is_floating_point() and c.copy.dtype.itemsize <= 2}
    for t in reading.trained:
        if not t.narrow or not but.isdisjoint(t.names):
            continue
        wanted = asked(reading, t.optimizer, t.root.dtype).get("master")
        made = bool(t.state) or reading.policy is not None
        if (wanted is not None and wanted.itemsize > 2 and made) or id(t.root) in narrow_copies:
            found |= dict.fromkeys(t.names)
    if found:
        yield finding(
            "upcast_missing",
            "fp32 masters were asked for, and none are kept for these 16-bit parameters, or they are in 16 bits "
            "themselves: a load casts them to the parameter's dtype, or the optimizer ignores the option.",
            list(found),
            "optimizer = torch_ext.AdamW(model.parameters(), lr=lr)  # fp32 masters for 16-bit parameters",
            *_elements(reading, list(found)),
        )


def _narrow_states(reading: Reading) -> Iterator[Finding]:
    """Yields findings about moments in fewer bits than were asked for."""
    found: dict[str, dict[str, None]] = {}
    for t in reading.trained:
        wanted = asked(reading, t.optimizer, t.root.dtype)
        for key in ("exp_avg", "exp_avg_sq"):
            value = t.state.get(key)
            if key in wanted and isinstance(value, Tensor) and value.dtype.itemsize < wanted[key].itemsize:
                said = f"{key} in {value.dtype}, where {wanted[key]} was asked for"
                found.setdefault(said, {}).update(dict.fromkeys(t.names))
    for said, names in found.items():
        yield finding(
            "upcast_missing",
            f"{said}: torch.optim.Optimizer.load_state_dict casts states to the parameter's dtype.",
            list(names),
            "for s in optimizer.state.values(): s.update({k: s[k].float() for k in ('exp_avg', 'exp_avg_sq')})",
            *_elements(reading, list(names)),
        )


def _narrow_grads(reading: Reading) -> Iterator[Finding]:
    """Yields a finding about gradients that are accumulated in fewer bits than were asked for."""
    found: dict[str, torch.dtype] = {}
    ddp_flags = [getattr(attribute_of(m, "ddp_config"), "grad_reduce_in_fp32", False) for m in reading.model.models]
    for t in reading.trained:
        wanted = asked(reading, t.optimizer, t.root.dtype).get("main_grad")
        if wanted is None and any(flag is True for flag in ddp_flags):
            wanted = torch.float32
        for name in t.names if wanted is not None else ():
            grad = _main_grad(reading.model.named[name], reading.policy is not None)
            if wanted is not None and grad is not None and grad.dtype.itemsize < wanted.itemsize:
                found[name] = grad.dtype
    if found:
        yield finding(
            "upcast_missing",
            f"Gradients are kept in {next(iter(found.values()))}, where fp32 was asked for: what micro-batches add is "
            "rounded to 16 bits each time.",
            list(found),
            "torch_ext.parallelize(model, torch_ext.load_policy(model, override_optimizer_config="
            '{"main_grads_dtype": "fp32"}))',
            *_elements(reading, list(found)),
        )


def _main_grad(p: Any, ordinary: bool) -> Tensor | None:
    """Returns the tensor in which gradients of micro-batches are accumulated. ordinary: whether that may be `.grad`."""
    grad = attribute_of(p, "main_grad")
    grad = p.grad if grad is None and ordinary else grad
    return grad if isinstance(grad, Tensor) else None
