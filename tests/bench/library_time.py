"""The time that a step spends in the C library; the rest of it is Python's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_ext.native import direct_call


@contextmanager
def noting(seconds: list[float]) -> Iterator[None]:
    """While it lasts, appends the seconds of every operator call that bypasses torch's dispatcher. An operator on a GPU
    returns when its kernels are launched."""
    known = {name: getattr(direct_call, name) for name in ("caller", "repeater")}

    def timing(find: Callable[[], Callable[..., int] | None]) -> Callable[[], Callable[..., int] | None]:
        call = find()

        def timed(*arguments: Any) -> int:
            assert call is not None
            begin = time.perf_counter()
            status = call(*arguments)
            seconds.append(time.perf_counter() - begin)
            return status

        return lambda: None if call is None else timed

    vars(direct_call).update({name: timing(find) for name, find in known.items()})
    try:
        yield
    finally:
        vars(direct_call).update(known)
