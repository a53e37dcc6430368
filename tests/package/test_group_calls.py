"""Tests that the package communicates over process groups only through comm/group_calls.py, which turns errors of
collectives into messages that name the lost ranks."""

import ast
import pathlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

FOLDER = pathlib.Path(__file__).parent.parent.parent / "torch_ext"
PLACES = ("comm/group_calls.py", "comm/lost_ranks.py")  # lost_ranks.py finds out whose connection broke
FILES = [f for f in sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py")) if f not in PLACES]

# Functions of torch.distributed and methods of process groups that wait for other ranks.
_ROOTS = (
    "all_",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend",
    "barrier",
)
COLLECTIVES = {name for name in dir(dist) if name.startswith(_ROOTS)} | {"monitored_barrier", "new_group", "allreduce"}
COLLECTIVES |= {"allgather", "alltoall", "alltoall_base", "reduce_scatter", "_allgather_base", "_reduce_scatter_base"}
# Methods of DTensor that communicate. They are legal inside `with group_calls.translated...`.
OF_TENSORS = {"full_tensor", "redistribute"}


def _names(node: ast.expr) -> list[str]:
    """Returns the names of an expression: ["a", "b", "c"] for a.b.c."""
    if isinstance(node, ast.Attribute):
        return [*_names(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def _translates(node: ast.AST) -> bool:
    """Whether a node is `with group_calls.translated...`."""
    return isinstance(node, ast.With) and any(
        isinstance(i.context_expr, ast.Call) and _names(i.context_expr.func)[-1].startswith("translated")
        for i in node.items
    )


def _collectives_in(node: ast.AST, translated: bool = False) -> Iterator[str]:
    """Yields the line and the name of each use of a collective. translated: whether the node is inside
    `with group_calls.translated...`."""
    translated = translated or _translates(node)
    if isinstance(node, ast.Attribute):
        *owner, name = _names(node)
        theirs = bool({"dist", "distributed", "group", "_group", "process_group"} & set(owner))
        if (theirs and name in COLLECTIVES) or (name in OF_TENSORS and not translated):
            yield f"line {node.lineno}: {'.'.join([*owner, name])}"
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
        yield from (f"line {node.lineno}: import of {a.name}" for a in node.names if a.name in COLLECTIVES)
    for child in ast.iter_child_nodes(node):
        yield from _collectives_in(child, translated)


@pytest.mark.parametrize("name", FILES)
def test_only_one_file_speaks_over_process_groups(name: str) -> None:
    assert not list(_collectives_in(ast.parse((FOLDER / name).read_text())))


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.all_reduce(x, group=g)",
        "dist.broadcast(x)",
        "self.group.send([x], 1, 2)",
        "distributed.new_group([0])",
        "from torch.distributed import all_gather",
        "value.full_tensor()",
        "send = dist.isend",
    ],
)
def test_it_would_be_noticed(line: str) -> None:
    assert list(_collectives_in(ast.parse(line)))
