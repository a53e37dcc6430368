"""diagnose: reads a model and its optimizers, and reports what silently loses updates."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_ext.diagnosis import (
    group_checks,
    master_checks,
    moment_checks,
    optimizer_layers,
    stall_checks,
    upcast_checks,
    update_checks,
)
from torch_ext.diagnosis.findings import SEVERITIES, Finding, Report, finding
from torch_ext.diagnosis.model_parameters import ModelParameters
from torch_ext.diagnosis.trained_parameters import Reading, read
from torch_ext.policy.loader import load_policy
from torch_ext.policy.policy import Policy

_CHECKS = (
    group_checks.check,
    upcast_checks.check,
    update_checks.check,
    stall_checks.check,
    master_checks.check,
    moment_checks.check,
)


def diagnose(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    policy: Policy | Mapping[str, Any] | None = None,
) -> Report:
    """Reports what silently loses updates in any optimizer. Call it between steps; it steps and changes nothing.

    model: the module that is trained; a list of modules if one optimizer has the parameters of all of them.
    optimizer: torch.optim's, apex's, Transformer Engine's, bitsandbytes', ours; a mixed-precision wrapper (Megatron-LM,
        DeepSpeed), a framework's wrapper (Accelerate, Lightning), a chain; or a list, if several update one model.
    policy: the dtypes that were asked for, if the optimizer does not record them itself: the result of
        `torch_ext.load_policy`, or keys of its override_optimizer_config, such as {"main_params_dtype": "fp32"}.

    Reads this rank's weights, states and hyper-parameters: all elements to compare masters with weights, and at most
    2^18 elements of each parameter to measure shares. Not collective. Waits for a device when it reads from it.

    Raises TypeError for an illegal model or optimizer, and ValueError if no parameter of the model requires a gradient.
    """
    models = _models(model)
    optimizers = _optimizers(optimizer)
    parameters = ModelParameters(models)
    trainable = parameters.trainable()
    if not trainable:
        raise ValueError(
            f"diagnose: no parameter of {', '.join(type(m).__name__ for m in models)} requires a gradient; pass the "
            "module that is trained"
        )
    asked = _policy(policy, trainable)
    with torch.no_grad():
        reading = read(parameters, optimizers, asked)
        found = list(_findings(reading))
    found.sort(key=lambda f: SEVERITIES.index(f.severity))
    names = " of ".join(dict.fromkeys(map(optimizer_layers.class_name, reading.layers)))
    elements = sum(p.numel() if t is None else t.numel() for p, t in _parts(reading, trainable))
    return Report(names, len(trainable), elements, tuple(found))


def _parts(reading: Reading, trainable: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yields each trainable parameter with the part of it that this rank updates; None if that is unknown."""
    here = {id(t.root): t.weight for t in reading.trained}
    for p in trainable.values():
        yield p, here.get(id(p))


def _findings(reading: Reading) -> Iterator[Finding]:
    for check in _CHECKS:
        yield from check(reading)
    yield from _not_read(reading)


def _not_read(reading: Reading) -> Iterator[Finding]:
    names = [name for t in reading.trained if t.weight is None for name in t.names]
    if names:
        yield finding(
            "not_read",
            "Weights that cannot be read here: on the meta device, sparse, offloaded or quantized.",
            list(dict.fromkeys(names)),
            "torch_ext.onload(model, optimizer)  # or what else moves them back; then diagnose again",
        )


def _models(model: Any) -> list[nn.Module]:
    models = list(model) if isinstance(model, list | tuple) else [model]
    for one in models:
        if not isinstance(one, nn.Module):
            raise TypeError(
                f"diagnose: model is a {type(one).__name__}; a torch.nn.Module, or a list of some, is legal"
                + (": the model comes first, then the optimizer" if optimizer_layers.is_optimizer(one) else "")
            )
    if not models:
        raise ValueError("diagnose: the list of models is empty; pass the module that is trained")
    return models


def _optimizers(optimizer: Any) -> list[Any]:
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers:
        if isinstance(one, type) or not optimizer_layers.is_optimizer(one):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(
                f"diagnose: optimizer is {what}; an object with param_groups, as torch.optim.Optimizer, or one that "
                "wraps such an object (.optimizer, .chained_optimizers), or a list of these, is legal"
            )
    if not optimizers:
        raise ValueError("diagnose: the list of optimizers is empty; pass what steps the model")
    return optimizers


def _policy(policy: Any, trainable: Mapping[str, torch.Tensor]) -> Policy | None:
    if policy is None or isinstance(policy, Policy):
        return policy
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"diagnose: policy is a {type(policy).__name__}; what torch_ext.load_policy returns, or a mapping of its "
            "keys, is legal"
        )
    elements: dict[torch.dtype, int] = {}
    for p in trainable.values():
        elements[p.dtype] = elements.get(p.dtype, 0) + p.numel()
    return load_policy(max(elements, key=elements.__getitem__), override_optimizer_config=dict(policy))
