"""Nothing of the library speaks over a process group but through comm/group_calls.py, where errors become messages."""

import ast
import pathlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

FOLDER = pathlib.Path(__file__).parent.parent.parent / "torch_ext"
PLACES = ("comm/group_calls.py", "comm/lost_ranks.py")  # the other one finds out whose connection broke
FILES = [f for f in sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py")) if f not in PLACES]

# Of torch.distributed, and methods of a process group: whatever waits for other ranks.
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
# Of DTensor: legal inside `with group_calls.translated...`.
OF_TENSORS = {"full_tensor", "redistribute"}


def _names(node: ast.expr) -> list[str]:
    """a.b.c -> [a, b, c]."""
    if isinstance(node, ast.Attribute):
        return [*_names(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def _translates(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        isinstance(i.context_expr, ast.Call) and _names(i.context_expr.func)[-1].startswith("translated")
        for i in node.items
    )


def _spoken(node: ast.AST, translated: bool = False) -> Iterator[str]:
    """Where the library speaks, and how."""
    translated = translated or _translates(node)
    if isinstance(node, ast.Attribute):
        *owner, name = _names(node)
        theirs = bool({"dist", "distributed", "group", "_group", "process_group"} & set(owner))
        if (theirs and name in COLLECTIVES) or (name in OF_TENSORS and not translated):
            yield f"line {node.lineno}: {'.'.join([*owner, name])}"
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
        yield from (f"line {node.lineno}: import of {a.name}" for a in node.names if a.name in COLLECTIVES)
    for child in ast.iter_child_nodes(node):
        yield from _spoken(child, translated)


@pytest.mark.parametrize("name", FILES)
def test_only_one_file_speaks_over_process_groups(name: str) -> None:
    assert not list(_spoken(ast.parse((FOLDER / name).read_text())))


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
    assert list(_spoken(ast.parse(line)))
