"""Loads the function that MODULE:FUNCTION names on a command line."""

import importlib
from collections.abc import Callable
from typing import Any


def load(text: str, what: str, example: str) -> Callable[..., Any]:
    """Returns the function that the text names. Raises ValueError if there is none. what: the option, which begins the
    message ("--model", say)."""
    module, colon, name = text.partition(":")
    if not module or not colon or not name:
        raise ValueError(f"{what} is {text!r}; MODULE:CALLABLE is legal, such as {example}")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {text}: {error}") from None
    if not callable(found):
        raise ValueError(f"{what} {text} is a {type(found).__name__}; something that can be called is legal")
    return found
