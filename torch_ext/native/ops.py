"""Registers and calls the operators torch.ops.torch_ext.*.

Importing this module registers everything, once. C registers schemas and kernels. This module adds, for each operator
of C's table, the fake kernel (for tracing) and the kernels that autograd needs.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_ext.native import direct_call, library

NAMESPACE = "torch_ext"


def _fake(name: str) -> Any:
    """Returns the fake kernel. Operators return () and only write memory, so there is nothing to compute in tracing."""

    def kernel(*_arguments: Any, **_options: Any) -> None:
        try:
            torch.library.get_ctx()  # raises outside of tracing, where meta tensors are a mistake
        except RuntimeError:
            raise RuntimeError(
                f"{NAMESPACE}::{name}: meta tensors hold no data, so there is nothing to update; materialise them "
                "first (module.to_empty(device=...))"
            ) from None

    return kernel


def _versioned(overload: Any, written: tuple[int, ...]) -> Any:
    """Returns the ADInplaceOrView kernel, which increments the version counters of written tensors.

    torch's own in-place operators do the same, so that a backward that saved the old value fails instead of using the
    new one. Not in C: no function of torch's C ABI increments a version counter, and an in-place operator that does
    nothing else (conj_physical_) takes 0.33 us per tensor, three times as long as our operator itself.
    """

    def kernel(keys: Any, *arguments: Any) -> None:
        tensors = _written(overload, written, arguments)
        overload.redispatch(keys & _AFTER_ADINPLACE, *arguments)
        torch.autograd.graph.increment_version(tensors)

    return kernel


def _written(overload: Any, written: tuple[int, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns the tensors at the positions `written`. Raises RuntimeError if the first of these arguments has inference
    tensors."""
    tensors: list[torch.Tensor] = []
    for i in written:
        value = arguments[i]
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            tensors.extend(value)
        if i == written[0]:
            _refuse_inference_tensors(overload, i, tensors)
    return tensors


_AFTER_ADINPLACE = torch._C._after_ADInplaceOrView_keyset
_ADINPLACE = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class _Operator(NamedTuple):
    """A registered operator."""

    row: int  # row of the operator in C's table
    overload: Any  # torch._ops.OpOverload
    written: tuple[int, ...]  # positions of the arguments that the schema marks as written


def _register() -> tuple[dict[str, _Operator], list[torch.library.Library]]:
    """Registers C's operators with torch, and the kernels that C cannot register. Returns the operators by name, and
    the torch.library.Library objects that own the registrations."""
    library.register()
    # A Library owns its registrations: both live as long as this module.
    fakes = torch.library.Library(NAMESPACE, "FRAGMENT")
    kernels = torch.library.Library(NAMESPACE, "IMPL")
    table: dict[str, _Operator] = {}
    for row, name in enumerate(library.operators()):
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(name), lib=fakes)
        # These operators update leaf parameters, and have no derivative: autograd is skipped.
        kernels.impl(name, torch.library.fallthrough_kernel, "Autograd")
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        arguments = overload._schema.arguments
        written = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
        if written:
            kernels.impl(name, _versioned(overload, written), "ADInplaceOrView", with_keyset=True)
        table[name] = _Operator(row, overload, written)
    return table, [fakes, kernels]


_OPERATORS, _LIBRARIES = _register()


def call(name: str, *arguments: Any) -> None:
    """Runs torch.ops.torch_ext.<name>, arguments in the order of its schema. Empty lists are fine.

    Raises RuntimeError with the library's message; nothing was written then.
    """
    row, overload, positions = _operator(name)
    written = _written(overload, positions, arguments)
    if not direct_call.run(row, name, arguments):
        with torch._C._ExcludeDispatchKeyGuard(_ADINPLACE):  # a third faster than with its kernel
            overload(*arguments)
    torch.autograd.graph.increment_version(written)


def call_unversioned(name: str, *arguments: Any, notes: direct_call.Notes | None = None) -> None:
    """Like `call`, but increments no version counter. For calls that write no weights (they only count or measure), and
    for callers that increment versions themselves. notes: see `direct_call.run`."""
    row, overload, _ = _operator(name)
    if not direct_call.run(row, name, arguments, notes):
        with torch._C._ExcludeDispatchKeyGuard(_ADINPLACE):
            overload(*arguments)


def call_directly(name: str, *arguments: Any) -> bool:
    """Runs the operator without torch's dispatcher, and returns True; False if that is not possible, and nothing was
    written. Increments no version counter."""
    return direct_call.run(_operator(name).row, name, arguments)


def repeat(
    name: str,
    arguments: Sequence[Any],
    params: list[torch.Tensor],
    versions: "array[int] | None",
    own: int,
    notes: direct_call.Notes,
) -> bool:
    """Runs the operator as `direct_call.repeat` does. Increments no version counter."""
    return direct_call.repeat(_operator(name).row, arguments, params, versions, own, notes)


def _operator(name: str) -> _Operator:
    try:
        return _OPERATORS[name]
    except KeyError:
        raise library.other_build(f"{NAMESPACE}::{name}") from None


def _refuse_inference_tensors(overload: Any, position: int, targets: list[torch.Tensor]) -> None:
    """Raises RuntimeError for inference tensors, as torch does for `tensor.add_(1)`.

    Only the first written argument is checked: it is the user's, the others are optimizer state. Checking a tensor
    takes as long as the operator itself takes for it."""
    if torch.is_inference_mode_enabled() or not any(map(torch.Tensor.is_inference, targets)):
        return
    index = [t.is_inference() for t in targets].index(True)
    argument = overload._schema.arguments[position]
    which = argument.name if str(argument.type) == "Tensor" else f"{argument.name}[{index}]"
    raise RuntimeError(
        f"{overload._schema.name}: {which} is an inference tensor, which is read-only outside of "
        "torch.inference_mode(); pass a clone"
    )
