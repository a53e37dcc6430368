"""Checks of master weights: whether they have the size of their weights, and round to them."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.master_copies import Copy
from torch_ext.diagnosis.model_parameters import readable
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
    """Yields findings about masters that do not round to their weights, or have another number of elements."""
    by_where: dict[tuple[str, str], dict[str, int]] = {}
    misshapen: dict[str, None] = {}
    source = {id(copy.copy): copy.weight for copy in reading.copies}
    stepped = {(id(t.param), id(t.optimizer)): t.stepped for t in reading.trained}  # sharded: this rank's part
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
            "Masters with another number of elements than their weights: they belong to another parameter.",
            list(misshapen),
            "optimizer.load_state_dict(state)  # of an optimizer whose parameters have this order and these shapes",
        )


def _parts(reading: Reading, weight: Tensor, source: Mapping[int, Tensor]) -> list[tuple[str, slice]]:
    """Returns the model's parameters whose memory the weight is, with their elements in the weight. If the weight is a
    copy itself, looks at what it was copied from."""
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
    """Returns how many elements of a flat master do not round to their weight. -0 equals 0, and NaN equals NaN."""
    changed = 0
    for begin in range(0, weight.numel(), _CHUNK):
        rounded = master[begin : begin + _CHUNK].to(weight.dtype)
        there = weight[begin : begin + _CHUNK].to(rounded.device)
        if not torch.equal(rounded, there):  # the usual case needs only this one pass
            changed += int(((rounded != there) & ~(rounded.isnan() & there.isnan())).sum())
    return changed


def _stale(where: str, consequence: str, found: Mapping[str, int]) -> Finding:
    counted = float(sum(found.values()))
    if consequence in ("resync", "error"):
        return finding(
            "stale_masters",
            f"Weights that are not what their masters ({where}) round to: written outside the optimizer. The next step "
            + (
                "takes these weights as the new masters."
                if consequence == "resync"
                else "raises an error that names them."
            ),
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
