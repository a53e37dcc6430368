"""Maps elements of the trainer's parameters to elements of an engine's tensors."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class WeightSlice(NamedTuple):
    """Where a parameter, or a part of it, is in a tensor of an engine: for `WeightSubscriber(mapping=...)`.

        WeightSlice("qkv_proj.weight", at=slice(0, 512))                    rows of a fused tensor
        WeightSlice("up_proj.weight", of=slice(512, 1024), shape=(2048, 64))  what this rank has of 2048 rows
        WeightSlice("fc.weight_t", transposed=True)

    tensor: the name of the engine's tensor.
    at: the part of that tensor, as an index expression: a slice, an index, or a tuple of them; (): all of it.
    of: the part of the parameter that is there, as slices of step 1; (): all of it.
    shape: the shape of the whole parameter. Needed if `of` is given; otherwise it follows from the tensor.
    transposed: whether the last two dimensions of the parameter are exchanged in the tensor.
    """

    tensor: str
    at: int | slice | tuple[int | slice, ...] = ()
    of: slice | tuple[slice, ...] = ()
    shape: tuple[int, ...] | None = None
    transposed: bool = False


Place: TypeAlias = str | WeightSlice | Sequence[WeightSlice] | Tensor
"""A value of `mapping`, the place of a parameter: the name of its tensor; its slices; or, if an engine holds nothing of
it, a meta tensor of its shape and dtype."""

Box: TypeAlias = tuple[tuple[int, int], ...]  # [begin, end) in each dimension


class Piece(NamedTuple):
    """A rectangle of a parameter and its place in memory: tx_delta_piece without the parameter. Numbers count elements.
    An address of 0 means that the engine does not hold these elements."""

    first: int
    rows: int
    columns: int
    step: int
    address: int
    row_stride: int
    column_stride: int


def table_key(name: str, shape: Sequence[int]) -> str:
    """Returns a parameter's key in the table of parameters: name and shape. The table itself has only the number of
    elements. Without the shape in the key, an engine with the transposed matrix would accept the trainer's bytes."""
    return f"{name}[{', '.join(map(str, shape))}]"


def name_and_shape(key: str, numel: int) -> tuple[str, tuple[int, ...]]:
    """Returns the name and shape in a key of `table_key`. For any other key: the key itself and the shape (numel,)."""
    found = re.fullmatch(r"(.*)\[([0-9]{1,18}(?:, [0-9]{1,18})*)?\]", key, re.DOTALL)
    shape = tuple(map(int, found[2].split(", "))) if found and found[2] else ()
    return (found[1], shape) if found and math.prod(shape) == numel else (key, (numel,))


class Placed(NamedTuple):
    """A parameter of the trainer, and the places of all of its elements in the engine's tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]
    held: list[tuple[str, int]]  # (name of an engine's tensor, number of elements of this parameter in it)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        return table_key(self.name, self.shape)


def placed(name: str, place: Place, tensors: Mapping[str, Tensor]) -> Placed:
    """Resolves a parameter's place. Raises ValueError, with the parameter's name, if the place is not valid."""
    if isinstance(place, Tensor):
        if not place.is_meta:
            raise ValueError(
                f"mapping[{name!r}] is a tensor: pass the name of one of tensors, or, for a parameter of which the "
                "engine has no part, torch.empty(shape, dtype=..., device='meta')"
            )
        return Placed(name, tuple(place.shape), place.dtype, _pieces(tuple(place.shape), []), [])
    slices = _slices(name, place)
    views = [_view(name, one, tensors) for one in slices]
    dtypes = {view.dtype for view in views}
    if len(dtypes) > 1:
        raise ValueError(f"mapping[{name!r}] has tensors of {' and '.join(map(str, dtypes))}; one dtype is legal")
    shape = _shape_of(name, slices, views)
    boxes = [_box(name, one, view, shape) for one, view in zip(slices, views, strict=True)]
    _refuse_overlap(name, shape, boxes)
    held = [(one.tensor, view.numel()) for one, view in zip(slices, views, strict=True)]
    return Placed(name, shape, views[0].dtype, _pieces(shape, list(zip(boxes, views, strict=True))), held)


def _slices(name: str, place: str | WeightSlice | Sequence[WeightSlice]) -> list[WeightSlice]:
    if isinstance(place, str):
        return [WeightSlice(place)]
    several = isinstance(place, Sequence) and not isinstance(place, WeightSlice)
    found: list[object] = list(place) if several else [place]
    slices = [one for one in found if isinstance(one, WeightSlice)]
    if not slices or len(slices) != len(found):
        raise ValueError(
            f"mapping[{name!r}] is {place!r}; a name, a WeightSlice, several of them, or a meta tensor are legal"
        )
    return slices


def _view(name: str, one: WeightSlice, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the slice's view of the engine's tensor, with its dimensions in the parameter's order."""
    if one.tensor not in tensors:
        raise ValueError(f"mapping[{name!r}] is in {one.tensor!r}, which is not among tensors")
    try:
        view = tensors[one.tensor].detach()[one.at]
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"mapping[{name!r}]: {one.tensor!r} has no part {one.at!r}: {error}") from None
    if one.transposed and view.dim() < 2:
        raise ValueError(
            f"mapping[{name!r}]: that part of {one.tensor!r} has {view.dim()} dimensions; transposed needs 2"
        )
    return view.transpose(-1, -2) if one.transposed else view


def _shape_of(name: str, slices: Sequence[WeightSlice], views: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the shape of the whole parameter."""
    told = {tuple(one.shape) for one in slices if one.shape is not None}
    if len(told) > 1:
        raise ValueError(f"mapping[{name!r}] has slices of parameters of shapes {' and '.join(map(str, sorted(told)))}")
    if told:
        return told.pop()
    if len(slices) == 1 and slices[0].of == ():
        return tuple(views[0].shape)
    raise ValueError(
        f"mapping[{name!r}] has several slices, or a part of the parameter (of=): pass shape= too, the shape of the "
        "whole parameter"
    )


def _box(name: str, one: WeightSlice, view: Tensor, shape: tuple[int, ...]) -> Box:
    """Returns the slice's part of the parameter (`of`) as index ranges."""
    ranges = one.of if isinstance(one.of, tuple) else (one.of,)
    if len(ranges) > len(shape) or not all(isinstance(r, slice) and r.step in (None, 1) for r in ranges):
        raise ValueError(
            f"mapping[{name!r}]: of={one.of!r}; slices of step 1 are legal, at most one for each dimension of {shape}"
        )
    box = tuple(r.indices(size)[:2] for r, size in zip(ranges, shape, strict=False)) + tuple(
        (0, size) for size in shape[len(ranges) :]
    )
    extent = tuple(max(end - begin, 0) for begin, end in box)
    if extent != tuple(view.shape):
        raise ValueError(
            f"mapping[{name!r}]: its part {one.of or 'as a whole'} has shape {extent}, and {one.tensor!r} has "
            f"{tuple(view.shape)} there; they must be equal"
        )
    return box


def _refuse_overlap(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    for i, box in enumerate(boxes):
        for other in boxes[:i]:
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)):
                raise ValueError(
                    f"mapping[{name!r}]: slices {box} and {other} of {shape} overlap; each element may be in one slice"
                )


# -- pieces ------------------------------------------------------------------------------------------------------------


def _pieces(shape: tuple[int, ...], parts: Sequence[tuple[Box, Tensor]]) -> list[Piece]:
    """Returns the pieces of the parts, and pieces without an address for the rest of the parameter."""
    found = [piece for box, view in parts for piece in _pieces_of_box(shape, box, view)]
    return found + [
        piece
        for box in _uncovered_boxes(shape, [box for box, _ in parts])
        for piece in _pieces_of_box(shape, box, None)
    ]


def _uncovered_boxes(shape: tuple[int, ...], boxes: Sequence[Box]) -> Iterator[Box]:
    """Yields boxes that together cover what `boxes` do not: cells of the grid that the edges of `boxes` span."""
    edges = [sorted({0, size, *(edge for box in boxes for edge in box[dim])}) for dim, size in enumerate(shape)]
    for cell in product(*map(pairwise, edges)):
        if not any(all(a <= c and d <= b for (a, b), (c, d) in zip(box, cell, strict=True)) for box in boxes):
            yield cell


def _pieces_of_box(shape: tuple[int, ...], box: Box, view: Tensor | None) -> Iterator[Piece]:
    """Yields the pieces of a box. view: its place in the engine's memory; None: the engine does not hold it. Dimensions
    that are contiguous in the parameter and in the engine's memory are merged."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    sizes = [end - begin for begin, end in box]
    if 0 in sizes:
        return
    targets = [0] * len(shape) if view is None else list(view.stride())
    dims = _merge_dims(zip(sizes, strides, targets, strict=True), absent=view is None)
    if not dims or dims[-1][1] != 1:
        dims.append((1, 1, 1))
    columns, _, column_stride = dims.pop()
    rows, step, row_stride = dims.pop() if dims else (1, 0, 0)
    address, width = (0, 0) if view is None else (view.data_ptr(), view.element_size())
    for index in product(*(range(size) for size, _, _ in dims)):
        source = sum(i * stride for i, (_, stride, _) in zip(index, dims, strict=True))
        target = sum(i * stride for i, (_, _, stride) in zip(index, dims, strict=True))
        yield Piece(first + source, rows, columns, step, address + target * width, row_stride, column_stride)


def _merge_dims(
    dims: "Iterator[tuple[int, int, int]] | zip[tuple[int, int, int]]", absent: bool
) -> list[tuple[int, int, int]]:
    """Merges contiguous dimensions and drops those of size 1. dims, and the result: (size, stride in the parameter,
    stride in the engine's memory), outermost first. absent: the engine does not hold it, so its strides do not matter.
    """
    found: list[tuple[int, int, int]] = []
    for size, source, target in dims:
        if size == 1:
            continue
        if found and found[-1][1] == source * size and (absent or found[-1][2] == target * size):
            found[-1] = (found[-1][0] * size, source, target)
        else:
            found.append((size, source, target))
    return found
