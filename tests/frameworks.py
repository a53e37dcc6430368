"""Imports the frameworks of tests/requirements.txt, or skips tests if they are not installed."""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import types
from typing import Any

import pytest
from torch.torch_version import TorchVersion

# Set before a framework is imported: no network access, no progress bars, no telemetry.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1")

_PINS = pathlib.Path(os.path.abspath(__file__)).parent / "requirements.txt"


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips tests where one of the modules is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    why = f"{', '.join(missing)} not installed (python -m pip install -r {_PINS.parent.name}/{_PINS.name})"
    return pytest.mark.skipif(bool(missing), reason=why)


def older(module: str, version: str) -> bool:
    """Whether the installed version of `module` is older than `version`; False if it is not installed."""
    if importlib.util.find_spec(module) is None:
        return False
    return TorchVersion(importlib.metadata.version(module)) < version


def module(name: str) -> Any:
    """Returns the module; an empty one if it is not installed, for files whose tests `needs` skips."""
    if importlib.util.find_spec(name) is None:
        return types.ModuleType(name)
    return importlib.import_module(name)
