"""Imports public names when they are first used.

Note: one table of public names

Importing every module takes longer than most programs that need only one name. So `import torch_ext` reads a table of
names and modules, and imports a module when one of its names is looked up. The table is the package's stub,
__init__.pyi, which type checkers and editors read, too: each of its lines
`from torch_ext.optim.adamw import AdamW as AdamW` is a public name and the module that has it.
"""

import ast
import importlib
from collections.abc import Callable
from typing import Any


def table(stub: str) -> dict[str, str]:
    """Returns name -> module of the stub at this path, in the stub's order."""
    with open(stub, encoding="utf-8") as file:
        tree = ast.parse(file.read(), stub)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def importer(modules: dict[str, str], namespace: dict[str, Any]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__` for these public names. It stores each value that it imports in `namespace`."""

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        namespace[name] = value
        return value

    return __getattr__
