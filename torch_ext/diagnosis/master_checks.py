"""Masters: whether they are there, whether they are wider than the weight, and whether they round to it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.diagnosis import master_copies, optimizer_layers
from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.master_copies import Copy
from torch_ext.diagnosis.model_parameters import is_narrow, readable
from torch_ext.diagnosis.trained_parameters import Reading
from torch_ext.optim.optimizer_base import OptimizerBase

_CHUNK = 1 << 22  # elements

_REFRESH = {
    "shard_fp32_from_float16_groups": "optimizer.reload_model_params()  # after every load of weights alone",
    "fp32_from_float16_groups": "optimizer.reload_model_params()  # after every load of weights alone",
    "param_to_fp32_param": "for p, copy in hybrid.param_to_fp32_param.items(): copy.data.copy_(p)  # after a load",
    "gpu_params_map_cpu_copy": "for p, copy in hybrid.gpu_params_map_cpu_copy.items(): copy.data.copy_(p)",
}


def check(reading: Reading) -> Iterator[Finding]:
    by_where: dict[tuple[str, str], dict[str, int]] = {}
    misshapen: dict[str, None] = {}
    source = {id(copy.copy): copy.weight for copy in reading.copies}
    stepped = {(id(t.param), id(t.optimizer)): t.stepped for t in reading.trained}  # where ours cuts: its part
    for copy in reading.copies:
        parts = _parts(reading, copy.weight, source)
        weight = stepped.get((id(copy.weight), id(copy.holder)), readable(copy.weight))
        master = readable(copy.copy)
        if weight is None or master is None or master.dtype.itemsize < max(4, weight.dtype.itemsize):
            continue
        if weight.numel() != master.numel():
            misshapen |= dict.fromkeys(name for name, _ in parts)
            continue
        for name, part in parts:
            if changed := not_rounding(weight.reshape(-1)[part], master.reshape(-1)[part]):
                found = by_where.setdefault((copy.where, _consequence(copy)), {})
                found[name] = found.get(name, 0) + changed
    for (where, consequence), found in by_where.items():
        yield _stale(where, consequence, found)
    if misshapen:
        yield finding(
            "misshapen_moments",
            "Masters that have another number of elements than their weights: they are another parameter's.",
            list(misshapen),
            "optimizer.load_state_dict(state)  # of an optimizer whose parameters have this order and these shapes",
        )


def _parts(reading: Reading, weight: Tensor, source: Mapping[int, Tensor]) -> list[tuple[str, slice]]:
    """Which elements of the weight, or of what it is a copy of, are which parameter's."""
    for _ in range(8):
        if parts := reading.model.parts_in(weight):
            return parts
        if id(weight) not in source:
            break
        weight = source[id(weight)]
    return []


def _consequence(copy: Copy) -> str:
    return getattr(copy.holder, "on_external_write", "") if isinstance(copy.holder, OptimizerBase) else ""


def not_rounding(weight: Tensor, master: Tensor) -> int:
    """How many elements of a flat master do not round to their weight: -0 is 0, and NaN is NaN."""
    changed = 0
    for begin in range(0, weight.numel(), _CHUNK):
        rounded = master[begin : begin + _CHUNK].to(weight.dtype)
        there = weight[begin : begin + _CHUNK].to(rounded.device)
        if not torch.equal(rounded, there):  # one pass, where nothing is wrong
            changed += int(((rounded != there) & ~(rounded.isnan() & there.isnan())).sum())
    return changed


def _stale(where: str, consequence: str, found: Mapping[str, int]) -> Finding:
    counted = float(sum(found.values()))
    if consequence in ("resync", "error"):
        return finding(
            "stale_masters",
            f"Weights that are not what their masters ({where}) round to: written outside the optimizer. The next step "
            + ("takes the weights over." if consequence == "resync" else "refuses them by name."),
            list(found),
            "optimizer.resync_masters()  # at once, instead of in the next step",
            counted,
            "elements",
            "note",
        )
    fix = _REFRESH.get(where, f"master.data.copy_(weight)  # of each weight and its master ({where}), after a load")
    if consequence:
        fix = "optimizer.resync_masters()"
    return finding(
        "stale_masters",
        f"Masters ({where}) that do not round to their weights: the next step writes the masters over the weights, and "
        "what was loaded or written into the model is gone.",
        list(found),
        fix,
        counted,
        "elements",
    )


def check_upcasts(reading: Reading) -> Iterator[Finding]:
    """fp32 that was asked for, by a configuration or a mixed-precision policy, and is not there."""
    cast = dict(reading.model.wanted_precision())
    kept = {name for t in reading.trained if not t.narrow for name in t.names}
    same = [n for n, dtype in cast.items() if reading.model.named[n].dtype == dtype and n not in kept]
    same = [n for n in same if is_narrow(reading.model.named[n])]
    if same:
        yield finding(
            "upcast_missing",
            f"A mixed-precision policy casts these parameters to {cast[same[0]]} for forward and backward, but they "
            "are in it already: there is no fp32 behind it, and the optimizer steps the 16-bit weights.",
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
    """What a configuration says of the dtypes of a parameter's state: "master", "exp_avg", "exp_avg_sq", "main_grad".

    Of the policy that diagnose was given, of Megatron-LM's configuration, of the optimizer's own attributes.
    """
    found: dict[str, Any] = {}
    if not isinstance(optimizer, OptimizerBase):  # which refuses other states than those of its policy
        if master_copies.promises_masters(optimizer):
            found["master"] = getattr(optimizer, "master_weight_dtype", torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            found[key] = getattr(optimizer, f"{key}_dtype", None)
        for layer in reading.layers:
            inner = optimizer_layers.layers(layer)
            config = getattr(layer, "config", None)
            if getattr(config, "use_precision_aware_optimizer", False) and any(one is optimizer for one in inner):
                found |= _of_fields(config)
    if reading.policy is not None:
        found |= _of_fields(reading.policy.row(weight))
    return {key: dtype for key, dtype in found.items() if isinstance(dtype, torch.dtype)}


def _of_fields(config: Any) -> dict[str, Any]:
    fields = {"master": "main_params_dtype", "main_grad": "main_grads_dtype"}
    fields |= {key: f"{key}_dtype" for key in ("exp_avg", "exp_avg_sq")}
    return {key: value for key, name in fields.items() if (value := getattr(config, name, None)) is not None}


def _missing_masters(reading: Reading, but: set[str]) -> Iterator[Finding]:
    """Asked for, and not kept: of 16-bit weights that have been stepped, or have narrow masters."""
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
            "themselves: a load casts them to the parameter's dtype, or the optimizer ignores the option for it.",
            list(found),
            "optimizer = torch_ext.AdamW(model.parameters(), lr=lr)  # fp32 masters for 16-bit parameters",
            *_elements(reading, list(found)),
        )


def _narrow_states(reading: Reading) -> Iterator[Finding]:
    """Moments in fewer bits than were asked for."""
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
    """Gradients that are added up in fewer bits than were asked for."""
    found: dict[str, torch.dtype] = {}
    asked_of_ddp = [getattr(getattr(m, "ddp_config", None), "grad_reduce_in_fp32", False) for m in reading.model.models]
    for t in reading.trained:
        wanted = asked(reading, t.optimizer, t.root.dtype).get("main_grad")
        if wanted is None and any(flag is True for flag in asked_of_ddp):
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
    """What gradients of micro-batches are added up in."""
    grad = getattr(p, "main_grad", None)
    grad = p.grad if grad is None and ordinary else grad
    return grad if isinstance(grad, Tensor) else None
