"""Decides which parameters Muon updates, and as which matrices."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torch_ext.params import param_groups
from torch_ext.params.keep_32bit import Kept, Selection

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Split: TypeAlias = int | Sequence[int]


class MatrixForm(NamedTuple):
    """How a parameter is viewed as matrices. Lists of forms have None for parameters that AdamW updates.

    Two dimensions are one matrix, three a batch of matrices (a stack of experts). More dimensions are one matrix: the
    first dimension by the product of all others."""

    flattened: bool  # one matrix even with three dimensions (a convolution)
    split: tuple[int, ...] | None  # rows of the parts of each matrix; the parts are orthogonalised separately


class Matrix(NamedTuple):
    """One of a parameter's matrices; its rows are consecutive in memory."""

    begin: int  # index of its first element in the parameter
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


def matrices(shape: Sequence[int], form: MatrixForm) -> list[Matrix]:
    """Returns the matrices of a parameter of this shape, which must have elements."""
    batch, rows, columns = _dimensions(shape, form)
    cuts = form.split or (rows,)
    found, begin = [], 0
    for _ in range(batch):
        for size in cuts:
            found.append(Matrix(begin, size, columns))
            begin += size * columns
    return found


def _dimensions(shape: Sequence[int], form: MatrixForm) -> tuple[int, int, int]:
    """Returns the number of matrices, and the rows and columns of each."""
    if len(shape) == 3 and not form.flattened:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], torch.Size(shape[1:]).numel()


class Chooser:
    """Decides by the constructor's arguments which parameters are matrices. Holds no module (see `Selection`)."""

    def __init__(
        self, of_adamw: Kept | Iterable[Kept], split: Mapping[str, Split] | None, model: nn.Module | None
    ) -> None:
        """of_adamw: matrices that AdamW updates. split: pattern of names -> number of equal parts, or the rows of each
        part. model: its output layer is left to AdamW; None if the model is not known."""
        self._given = Selection(of_adamw, "adamw_params")
        self._heads = Selection(_heads(model), "adamw_params")
        if split is not None and not isinstance(split, Mapping):
            raise TypeError(f"split is a {type(split).__name__}; a mapping of names (or patterns) to parts is legal")
        self._split = {pattern: (Selection((pattern,), "split"), parts) for pattern, parts in (split or {}).items()}

    def forms(self, group: dict[str, Any], where: str) -> list[MatrixForm | None]:
        """Returns the form of each of a group's parameters, None for AdamW's. Raises ValueError, naming the parameter,
        if Muon cannot update it as `algorithm` or `split` demands."""
        params: list[Tensor] = group["params"]
        names = group.get("param_names") or [None] * len(params)
        shown = [f"parameter {i} of the group" if name is None else repr(name) for i, name in enumerate(names)]
        if group["algorithm"] == "adamw":
            return [None] * len(params)
        if group["algorithm"] == "muon":
            for p, name in zip(params, shown, strict=True):
                if p.dim() < 2:
                    raise ValueError(
                        f"{where}algorithm is 'muon', and {name} is {tuple(p.shape)}: Muon steps matrices; put it into "
                        "a group with algorithm='adamw', or leave algorithm out, and AdamW steps it"
                    )
            left_out = [False] * len(params)
        elif any(p.dim() > 1 for p in params):
            left_out = self._left_out(params, names)
        else:
            return [None] * len(params)
        flattened = _are_of(params, (nn.modules.conv._ConvNd,)) if any(p.dim() == 3 for p in params) else left_out
        splits = self._splits(params, names)
        return [
            None
            if left_out[i] or p.dim() < 2 or p.numel() == 0
            else _form_of(p, flattened[i], splits[i], where, shown[i])
            for i, p in enumerate(params)
        ]

    def _left_out(self, params: Sequence[Tensor], names: Sequence[str | None]) -> list[bool]:
        flags = [s.flags(params, names, complete=False) for s in (self._given, self._heads)]
        return [any(of_one) for of_one in zip(_are_of(params, _EMBEDDINGS), *flags, strict=True)]

    def _splits(self, params: Sequence[Tensor], names: Sequence[str | None]) -> list[Split | None]:
        found: list[Split | None] = [None] * len(params)
        for selection, parts in self._split.values():
            for i, selected in enumerate(selection.flags(params, names, complete=False)):
                found[i] = parts if selected else found[i]
        return found

    def refuse_unused(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError for a name, a pattern, a module or a type that selects none of the parameters."""
        params, keys = param_groups.all_params(list(groups)), param_groups.keys(list(groups))
        names = [key if isinstance(key, str) else None for key in keys]
        for selection in (self._given, *(selection for selection, _ in self._split.values())):
            selection.flags(params, names, complete=True)


def _are_of(params: Sequence[Tensor], kinds: Sequence[type[nn.Module]]) -> list[bool]:
    """Returns for each parameter whether it belongs to a module of one of these types. A parameter does not know its
    module, so this searches all objects of the process. Comparing exact types keeps that to a few milliseconds."""
    exact = set(kinds)
    for kind in list(exact):
        exact |= _subclasses(kind)
    everything: list[Any] = gc.get_objects()
    modules: list[nn.Module] = [one for one in everything if type(one) in exact]
    held = {id(p) for module in modules for p in module._parameters.values()}
    return [id(p) in held for p in params]


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    found: set[type[Any]] = set()
    direct: list[type[Any]] = kind.__subclasses__()
    for one in direct:
        found |= {one} | _subclasses(one)
    return found


def _heads(model: nn.Module | None) -> list[nn.Module]:
    """Returns the model's output layer if it has Hugging Face's get_output_embeddings(). A head that is tied to an
    embedding needs no entry: it is the embedding's parameter."""
    tell = getattr(model, "get_output_embeddings", None)
    head = tell() if callable(tell) else None
    return [head] if isinstance(head, nn.Module) else []


def _form_of(p: Tensor, flattened: bool, split: Split | None, where: str, name: str) -> MatrixForm:
    form = MatrixForm(flattened or p.dim() > 3, None)
    if split is None:
        return form
    rows = _dimensions(p.shape, form)[1]
    sizes = _sizes(split, rows)
    if sizes is None:
        raise ValueError(
            f"{where}split of {name} is {split!r}, and its matrices have {rows} rows: a number that divides them, or "
            f"positive numbers of rows whose sum is {rows}, is legal"
        )
    return form._replace(split=sizes)


def _sizes(split: Any, rows: int) -> tuple[int, ...] | None:
    if isinstance(split, int) and not isinstance(split, bool):
        return (rows // split,) * split if split > 0 and rows % split == 0 else None
    if isinstance(split, str | bytes) or not isinstance(split, Sequence):
        return None
    sizes = tuple(split)
    legal = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    return sizes if legal and sum(sizes) == rows else None
