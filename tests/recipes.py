"""The pages of docs/recipes: their code, as it stands there."""

import importlib.util
import inspect
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest

import torch_ext

PAGES = pathlib.Path(os.path.abspath(__file__)).parents[1] / "docs" / "recipes"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of docs/recipes/PAGE.md in that language, in their order."""
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(page: str, block: int, names: dict[str, Any]) -> dict[str, Any]:
    """Runs that Python block of the page, which sees and changes `names`."""
    source = blocks(page, "python")[block]
    exec(compile(source, f"docs/recipes/{page}.md, Python block {block}", "exec"), names)
    return names


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips a test with the framework itself where it is not installed: tests/requirements.txt has no heavy ones."""
    there = importlib.util.find_spec(framework) is not None
    return pytest.mark.skipif(not there, reason=f"{framework} is not installed; its part is rebuilt beside this test")


_STATES: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "bf16_remainder": {"store_param_remainders": True},
    "8bit": {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
}


def with_states_and_mappings() -> Any:
    """torch_ext.AdamW, which takes `states=` and a mapping as `policy=`.

    Without effect where it does already: then this function, and what calls it, can go.
    """
    plain = torch_ext.AdamW
    if "states" in inspect.signature(plain).parameters:
        return plain

    class AdamW(plain):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, *args: Any, policy: Any = None, states: Any = None, **options: Any) -> None:
            params = list(params)
            if states is not None or isinstance(policy, Mapping):
                first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
                dtype = (first[1] if isinstance(first, tuple) else first).dtype
                chosen = {**_STATES.get(states, {}), **(policy or {})}
                policy = torch_ext.load_policy(dtype, override_optimizer_config=chosen)
            super().__init__(params, *args, policy=policy, **options)

    AdamW.__init__.__signature__ = inspect.signature(plain.__init__)  # type: ignore[attr-defined]
    torch_ext.AdamW = AdamW  # type: ignore[misc]
    return AdamW
