"""Where batches lie on the host while they are stepped: buffers in slots, which batches use one after the other."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ext import _arguments, _tensors
from torch_ext._arguments import TensorArgument
from torch_ext._host_batches import Batch
from torch_ext._staging import Buffers, Layout


class Stage(NamedTuple):
    """A batch in the buffers of a slot."""

    grads: "ctypes.Array[TensorArgument]"
    grads_in: list[Tensor]  # the same memory, shaped like what is copied there
    weights: "ctypes.Array[TensorArgument]"
    weights_in: list[Tensor]


class _Place(NamedTuple):
    """Of a piece."""

    like: Tensor | None  # the whole weight, whose shape and memory order it has; None: a flat part of one
    grad: slice  # bytes
    grad_dtype: torch.dtype
    weight: slice
    weight_dtype: torch.dtype


class Stages:
    def __init__(
        self, batches: Sequence[Batch], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], buffers: Buffers
    ) -> None:
        """weights: of the members; dtypes: of their gradients."""
        self._buffers = buffers
        self._places: list[list[_Place]] = []
        self._keys: list[int] = []
        known: dict[tuple[object, ...], int] = {}
        self._nbytes = [0, 0]
        for batch in batches:
            grads, of_weights = Layout(), Layout()
            places = []
            for piece in batch.pieces:
                weight, dtype = weights[piece.member], dtypes[piece.member]
                where, of_weight = grads.place(piece.numel, dtype), of_weights.place(piece.numel, weight.dtype)
                places.append(_Place(weight if piece.whole else None, where, dtype, of_weight, weight.dtype))
            self._places.append(places)
            self._keys.append(known.setdefault(_key(places), len(known)))
            self._nbytes = [max(self._nbytes[0], grads.nbytes), max(self._nbytes[1], of_weights.nbytes)]
        self._made: dict[tuple[int, int], Stage] = {}
        for slot in range(min(buffers.lanes.workers, len(batches)) * buffers.lanes.slots):
            self._memories(slot)  # before the step, and none is made in it

    def _memories(self, slot: int) -> tuple[Tensor, Tensor]:
        """For gradients and for weights."""
        return self._buffers.take("grads", slot, self._nbytes[0]), self._buffers.take("weights", slot, self._nbytes[1])

    def at(self, k: int, slot: int) -> Stage:
        """Batch k in a slot. Parts of large parameters are mostly alike: their tensors are made once."""
        key = slot, self._keys[k]
        stage = self._made.get(key)
        if stage is None:
            stage = self._made[key] = self._make(k, slot)
        return stage

    def _make(self, k: int, slot: int) -> Stage:
        places = self._places[k]
        in_grads, in_weights = self._memories(slot)
        grads = [in_grads[place.grad].view(place.grad_dtype) for place in places]
        weights = [in_weights[place.weight].view(place.weight_dtype) for place in places]
        return Stage(
            _arguments.arguments(grads), _shaped(grads, places), _arguments.arguments(weights), _shaped(weights, places)
        )


def _shaped(memories: Sequence[Tensor], places: Sequence[_Place]) -> list[Tensor]:
    return [
        memory if place.like is None else _tensors.view_like(place.like, memory, 0)
        for memory, place in zip(memories, places, strict=True)
    ]


def _key(places: Sequence[_Place]) -> tuple[object, ...]:
    """Equal for batches of which one can lie where the other does."""
    return tuple(
        (
            None if place.like is None else (tuple(place.like.shape), place.like.stride()),
            (place.grad.start, place.grad.stop, place.grad_dtype),
            (place.weight.start, place.weight.stop, place.weight_dtype),
        )
        for place in places
    )
