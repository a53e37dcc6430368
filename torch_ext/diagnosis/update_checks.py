"""Checks how many updates of weights without masters are lost by rounding."""

from collections.abc import Iterator

from torch_ext.diagnosis import next_update
from torch_ext.diagnosis.findings import Finding, finding
from torch_ext.diagnosis.next_update import Lost
from torch_ext.diagnosis.trained_parameters import Reading, Trained

_OF_ALL, _OF_ONE = 0.2, 0.5
"""Shares of lost updates that are errors: of all of these weights together (_OF_ALL), of one parameter (_OF_ONE)."""
_WRITE = "optimizer = torch_ext.AdamW(model.parameters(), lr=lr)  # fp32 masters, whatever dtype the model has"


def check(reading: Reading) -> Iterator[Finding]:
    """Yields findings about weights whose updates are lost by rounding."""
    narrow = [t for t in reading.trained if t.narrow]
    if narrow:
        yield from _check_narrow(narrow)
    wide = [t for t in reading.trained if t.weight is not None and t.param is t.root and t.weight.dtype.itemsize == 4]
    yield from _check_wide(wide)


def _check_narrow(narrow: list[Trained]) -> Iterator[Finding]:
    found = [(t, lost) for t in narrow if (lost := next_update.lost_updates(t)) is not None and lost.updates]
    dtype = narrow[0].root.dtype
    if not found:
        yield finding(
            "lost_updates",
            f"Weights in {dtype} without masters. How many of their updates are lost to rounding is known only once "
            "there are gradients or momentum.",
            [name for t in narrow for name in t.names],
            _WRITE,
            severity="note",
        )
        return
    whole = Lost(sum(lost.updates for _, lost in found), sum(lost.lost for _, lost in found))
    mostly = [(t, lost) for t, lost in found if lost.share >= _OF_ONE]
    serious = whole.share >= _OF_ALL or bool(mostly)
    shown = mostly if mostly and whole.share < _OF_ALL else [pair for pair in found if pair[1].lost] or found
    if whole.share < _OF_ALL and mostly:
        whole = Lost(sum(lost.updates for _, lost in mostly), sum(lost.lost for _, lost in mostly))
    rates = sorted({next_update.learning_rate(t) for t, _ in shown})
    yield finding(
        "lost_updates",
        f"Weights in {dtype} without masters, at lr = {', '.join(f'{rate:g}' for rate in rates)}: what the next step "
        "would add to these weights is less than half of the distance to their neighbours, and rounding undoes it. "
        + ("More updates will be lost as lr falls." if not serious else "The weights stay where they are."),
        list(dict.fromkeys(name for t, _ in sorted(shown, key=lambda pair: -pair[1].share) for name in t.names)),
        _WRITE,
        whole.share,
        "of updates",
        "error" if serious else "note",
    )


def _check_wide(wide: list[Trained]) -> Iterator[Finding]:
    """Yields a note about fp32 weights that lose most updates, because lr is almost 0."""
    found = [(t, lost) for t in wide if (lost := next_update.lost_updates(t)) is not None and lost.share >= _OF_ONE]
    names = list(dict.fromkeys(name for t, _ in found for name in t.names))
    if names:
        whole = Lost(sum(lost.updates for _, lost in found), sum(lost.lost for _, lost in found))
        rates = sorted({next_update.learning_rate(t) for t, _ in found})
        yield finding(
            "lost_updates",
            f"Weights in fp32 at lr = {', '.join(f'{rate:g}' for rate in rates)}: the next step is too small even for "
            "fp32, as at the end of a schedule.",
            names,
            "scheduler.last_epoch  # where the schedule should not have ended",
            whole.share,
            "of updates",
            "note",
        )
