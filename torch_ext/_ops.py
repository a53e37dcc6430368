"""torch.ops.torch_ext from Python: what the C side cannot register, and one way to call an operator.

Importing this module registers everything, once. C registers schemas and kernels; here come the fake kernels (tracing)
and the autograd keys. The names are C's table; nothing is listed twice.
"""

from typing import Any, NamedTuple

import torch

from torch_ext import _library

NAMESPACE = "torch_ext"


class _Operator(NamedTuple):
    overload: Any  # torch._ops.OpOverload
    written: tuple[int, ...]  # positions of the arguments that the schema marks as written


def _fake(name: str) -> Any:
    """Every operator returns () and has its effect on memory only: under tracing there is nothing to compute."""

    def kernel(*_arguments: Any, **_options: Any) -> None:
        try:
            torch.library.get_ctx()  # raises outside of tracing, where meta tensors are somebody's mistake
        except RuntimeError:
            raise RuntimeError(
                f"{NAMESPACE}::{name}: meta tensors hold no data, so there is nothing to update; materialise them "
                "first (module.to_empty(device=...))"
            ) from None

    return kernel


def _register() -> tuple[dict[str, _Operator], list[torch.library.Library]]:
    _library.register()
    # A Library owns its registrations: both live as long as this module.
    fakes = torch.library.Library(NAMESPACE, "FRAGMENT")
    autograd = torch.library.Library(NAMESPACE, "IMPL", "Autograd")
    table: dict[str, _Operator] = {}
    for name in _library.operators():
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(name), lib=fakes)
        # Updates of leaf parameters are the purpose of these operators and have no derivative: autograd looks away.
        autograd.impl(name, torch.library.fallthrough_kernel)
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        arguments = overload._schema.arguments
        table[name] = _Operator(
            overload,
            tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write),
        )
    return table, [fakes, autograd]


_OPERATORS, _LIBRARIES = _register()


def call(name: str, *arguments: Any) -> None:
    """Runs torch.ops.torch_ext.<name>, arguments in the order of its schema, and tells autograd what was written.

    The version counter of every written tensor goes up, as after torch's own in-place operators, so that a backward
    that saved the old value fails instead of using the new one; the bare operators cannot do that. Empty lists are
    fine. Raises RuntimeError with the library's message, after which nothing was written.
    """
    operator = _operator(name)
    written: list[torch.Tensor] = []
    for i in operator.written:
        value = arguments[i]
        if isinstance(value, torch.Tensor):
            written.append(value)
        else:
            written.extend(value)
        if i == operator.written[0]:
            _refuse_inference_tensors(operator, i, written)
    operator.overload(*arguments)
    torch.autograd.graph.increment_version(written)


def look(name: str, *arguments: Any) -> None:
    """As `call`, for an operator that is asked to count and to change nothing else: no version counter goes up, by
    which somebody would take it for a write."""
    _operator(name).overload(*arguments)


def _operator(name: str) -> _Operator:
    try:
        return _OPERATORS[name]
    except KeyError:
        raise _library.other_build(f"{NAMESPACE}::{name}") from None


def _refuse_inference_tensors(operator: _Operator, position: int, targets: list[torch.Tensor]) -> None:
    """What torch says to `tensor.add_(1)`. Looked at only in the first argument that is written, which is the caller's
    (the others are state beside it): it takes as long as a tensor's way through the operator."""
    if torch.is_inference_mode_enabled() or not any(map(torch.Tensor.is_inference, targets)):
        return
    index = [t.is_inference() for t in targets].index(True)
    argument = operator.overload._schema.arguments[position]
    which = argument.name if str(argument.type) == "Tensor" else f"{argument.name}[{index}]"
    raise RuntimeError(
        f"{operator.overload._schema.name}: {which} is an inference tensor, which is read-only outside of "
        "torch.inference_mode(); pass a clone"
    )
