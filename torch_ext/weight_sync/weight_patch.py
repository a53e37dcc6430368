"""`WeightPatch`: what changed in one parameter, as positions and values, which most engines can apply."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_INT32 = 1 << 31


class WeightPatch(NamedTuple):
    """New values of some elements of one parameter. `WeightPublisher.publish_patches` returns a list of patches.

    The fields have the names that vLLM's sparse weight transfer reads: a list of patches can be passed to its
    `send_weights`.

    name: the parameter's name, as in `model.named_parameters()`.
    indices: positions of the elements in the flattened parameter, ascending, each once. int32, or int64 for parameters
        of 2**31 elements or more; one dimension, on the parameter's device.
    values: the new values of these elements, bit for bit; the parameter's dtype, as many as indices.
    full_shape: the shape of the whole parameter, even if the patch is one rank's part of it.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.full_shape)


def index_dtype(numel: int) -> torch.dtype:
    """Returns the dtype of positions in a parameter with `numel` elements."""
    return torch.int32 if numel < _INT32 else torch.int64


def refuse(patches: Iterable[WeightPatch]) -> None:
    """Raises ValueError or TypeError, with the parameter's name, if the fields of a patch do not fit each other. Reads
    the positions, and so waits for the device."""
    for patch in patches:
        name, indices, values, _ = patch
        if indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"the patch of {name} has indices in {indices.dtype}; int32 and int64 are legal")
        if indices.dim() != 1 or values.shape != indices.shape:
            raise ValueError(
                f"the patch of {name} has indices of shape {tuple(indices.shape)} and values of shape "
                f"{tuple(values.shape)}; one dimension and equal lengths are legal"
            )
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < patch.numel:
            raise ValueError(
                f"the patch of {name} has positions from {int(indices.min())} to {int(indices.max())}; the parameter "
                f"of shape {tuple(patch.full_shape)} has 0 to {patch.numel - 1}"
            )


def refuse_unlike(patches: Iterable[WeightPatch], weights: Mapping[str, Tensor], what: str) -> None:
    """Raises ValueError or TypeError, with the parameter's name, unless the weights to patch have the patches' shapes
    and dtypes and are contiguous on the host. what: the argument's name, for messages."""
    for patch in patches:
        name = patch.name
        if name not in weights:
            raise ValueError(f"{what} has no {name!r}; the whole weight of every parameter in patches is needed")
        own = weights[name]
        if own.dtype != patch.values.dtype:
            raise TypeError(f"{what}[{name!r}] is {own.dtype} and its patch {patch.values.dtype}; they must be equal")
        if tuple(own.shape) != tuple(patch.full_shape):
            raise ValueError(
                f"{what}[{name!r}] has shape {tuple(own.shape)} and the parameter {tuple(patch.full_shape)}; pass the "
                "whole parameter"
            )
        if own.device.type != "cpu" or not own.is_contiguous():
            raise ValueError(f"{what}[{name!r}] must be contiguous on the host; it is on {own.device}")


def by_name(patches: Iterable[WeightPatch]) -> dict[str, list[WeightPatch]]:
    """Groups the patches that have positions by parameter; a parameter may have patches of several ranks."""
    found: dict[str, list[WeightPatch]] = {}
    for patch in patches:
        if patch.indices.numel():
            found.setdefault(patch.name, []).append(patch)
    return found
