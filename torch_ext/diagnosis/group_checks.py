"""Checks of parameter groups: parameters that are in no group or in two, and tensors that are not the model's."""

from collections.abc import Iterator, Sequence

from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.trained_parameters import Reading, Trained


def check(reading: Reading) -> Iterator[Finding]:
    """Yields findings about the membership of parameters in groups."""
    missing = [name for name in reading.model.trainable() if name not in reading.in_groups]
    if reading.partial:
        missing = []  # some parameters are in another rank's optimizer
    if missing and _are_stale(reading, missing):
        yield _stale(reading, missing)
    else:
        if missing:
            yield _in_no_group(missing)
        if reading.foreign:
            yield _foreign(reading.foreign)
    yield from _twice(reading.trained)


def _are_stale(reading: Reading, missing: Sequence[str]) -> bool:
    """Whether the groups' foreign tensors are probably replaced parameters: they have the shapes of the missing ones,
    or no parameter of the model is in any group."""
    wanted = sorted(tuple(reading.model.named[name].shape) for name in missing)
    have = sorted(tuple(t.param.shape) for t in reading.foreign)
    everything = bool(have) and not reading.trained and len(missing) == len(reading.model.trainable())
    return everything or (bool(have) and _contains(wanted, have))


def _contains(wanted: Sequence[tuple[int, ...]], have: Sequence[tuple[int, ...]]) -> bool:
    left = list(have)
    for shape in wanted:
        if shape not in left:
            return False
        left.remove(shape)
    return True


def _stale(reading: Reading, missing: Sequence[str]) -> Finding:
    n = len(reading.foreign)
    return finding(
        "stale_references",
        f"The optimizer steps {n} tensors that are not the model's, and not these parameters of the model: it was "
        "made from parameters that have been replaced since (the model was built, wrapped, sharded or moved again). "
        "Its updates do not reach the model.",
        missing,
        "optimizer = type(optimizer)(model.parameters(), **optimizer.defaults)  # after the model's last change",
        figure=sum(reading.model.named[name].numel() for name in missing),
        unit="elements",
    )


def _in_no_group(missing: Sequence[str]) -> Finding:
    return finding(
        "in_no_group",
        "Parameters of the model that require a gradient but are in no optimizer: they keep their initial values. "
        "If another optimizer steps them, pass it too: diagnose(model, [first, second]).",
        missing,
        f'optimizer.add_param_group({{"params": [model.get_parameter({missing[0]!r})]}})'
        if len(missing) == 1
        else "optimizer = type(optimizer)(model.parameters(), ...)  # or p.requires_grad_(False), if they are frozen",
    )


def _foreign(foreign: Sequence[Trained]) -> Finding:
    names = [f"{tuple(t.param.shape)} in {t.param.dtype}" for t in foreign]
    return finding(
        "not_of_the_model",
        "Tensors in the optimizer's groups that are not parameters of the model. If they belong to another module, "
        "pass it too; if the model was built again, make the optimizer again.",
        names,
        "report = torch_ext.diagnose([model, other_model], optimizer)",
    )


def _twice(trained: Sequence[Trained]) -> Iterator[Finding]:
    """Yields a finding if a tensor is in two groups, or twice in one, and so is updated twice."""
    seen: set[int] = set()
    twice: dict[str, None] = {}
    for t in trained:
        if id(t.param) in seen:
            twice |= dict.fromkeys(t.names)
        seen.add(id(t.param))
    if twice:
        yield finding(
            "in_two_groups",
            "Parameters that are stepped twice with the same gradient: they are in two groups, in two optimizers, or "
            "twice in one group.",
            list(twice),
            "params = list(dict.fromkeys(params))  # each parameter in one group; model.parameters() has each once",
        )
