"""Checks Python code of a page: whether the names and arguments of torch_ext that it uses exist."""

import ast
import inspect
from collections.abc import Iterator

import torch_ext


def _public(node: ast.expr) -> str | None:
    """Returns "AdamW" for the expression torch_ext.AdamW, None for other expressions."""
    found = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch_ext"
    return node.attr if found and isinstance(node, ast.Attribute) else None


def _missing(tree: ast.AST) -> Iterator[str]:
    """Yields the missing names and arguments, as described at missing_names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch_ext":
            yield from (alias.name for alias in node.names if not hasattr(torch_ext, alias.name))
        name = _public(node) if isinstance(node, ast.expr) else None
        if name is not None and name not in torch_ext.__all__ and not hasattr(torch_ext, name):
            yield name
        called = _public(node.func) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and called is not None and hasattr(torch_ext, called):
            legal = inspect.signature(getattr(torch_ext, called)).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in legal):
                given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
                yield from (f"{called}({arg}=)" for arg in given if arg not in {p.name for p in legal})


def missing_names(text: str) -> list[str]:
    """Returns what a text uses of torch_ext that does not exist: "AdamW8bit" for a name, "AdamW(states=)" for an
    argument of a function. Raises SyntaxError if the text is not Python.
    """
    return sorted(set(_missing(ast.parse(text))))
