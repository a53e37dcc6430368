"""The post-accumulate hooks of one reducer's parameters, which run Python as seldom as they can."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch


class NotedGradients:
    """Gradients that are ready, until the reducer is told of them.

    Note [noted gradients]

    A hook that runs Python for each gradient costs more than all that is done about it. So within a backward that is
    known, most gradients are only noted: their hook is `list.append`. The reducer is told of all that are noted by
    those that completed a bucket in an earlier backward, each of which has a second hook, and at the end, also where
    that is an exception. A bucket that another one completes is sent later than it could be, and that one has a second
    hook from then on; where ranks had different gradients, these are others on each of them.

    What a parameter's hook calls is one object for all of them, whose function is exchanged: between backwards the
    reducer is told of each, as the first gradient is how it learns of a backward.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], each: Callable[[torch.Tensor], None], noted: Callable[..., None]
    ) -> None:
        """each: is told of a gradient that was not noted; noted: that there may be some that were. Neither may hold the
        reducer."""
        self._params, self._each, self._tell_noted = params, each, noted
        self._noted: list[torch.Tensor] = []
        self._hook = partial(each)
        self._hooks: list[Any] = [p.register_post_accumulate_grad_hook(self._hook) for p in params]
        self._completing: set[int] = set()
        self.bare = False
        """Whether no parameter had a gradient when this backward began, so that none has to be prepared for more."""

    def note(self) -> None:
        """From here on gradients are noted, where it is known which complete buckets; until `tell`."""
        if self._completing:
            self._call(self._noted.append)

    def tell(self) -> None:
        """From here on the reducer is told of each gradient at once."""
        self.bare = False
        self._call(self._each)

    def _call(self, function: Callable[[torch.Tensor], None]) -> None:
        # No Python runs where `function` is a builtin, as partial is one.
        self._hook.__setstate__((function, (), {}, None))  # type: ignore[attr-defined]

    def put_back(self, params: Iterable[torch.Tensor]) -> None:
        """They were not told of."""
        self._noted[:0] = params

    def take(self) -> list[torch.Tensor]:
        """Those that are noted, in the order in which they were ready; no longer noted."""
        taken = self._noted[:]
        del self._noted[: len(taken)]
        return taken

    def completed(self, positions: Iterable[int]) -> None:
        """The gradients of these parameters completed buckets."""
        for i in positions:
            if i not in self._completing:
                self._completing.add(i)
                self._hooks.append(self._params[i].register_post_accumulate_grad_hook(self._tell_noted))

    def remove(self) -> None:
        """The parameters forget their hooks."""
        for handle in self._hooks:
            handle.remove()
