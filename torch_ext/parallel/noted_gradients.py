"""The post-accumulate hooks of one reducer's parameters; they run Python as rarely as possible."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch


class NotedGradients:
    """A list of gradients that are ready and that the reducer was not told of yet.

    Note [noted gradients]

    A hook that runs Python for each gradient costs more than everything else that is done for it. So once the reducer
    knows that a backward is running, most gradients are only noted: their hook is `list.append`. The reducer processes
    the noted gradients when a bucket should be complete: a parameter whose gradient completed a bucket in an earlier
    backward has a second hook, which calls the reducer. It also processes them at the end of backward, even if that
    raised. If another parameter completes a bucket, that bucket is sent later than it could be, and that parameter gets
    a second hook, too. Ranks with different gradients may have second hooks on different parameters.

    All parameters share one hook object, whose function is exchanged. Between backwards it calls the reducer for each
    gradient: the first gradient is how the reducer learns of a new backward.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], each: Callable[[torch.Tensor], None], noted: Callable[..., None]
    ) -> None:
        """each: called with the parameter of each ready gradient, while these are not noted. noted: called when noted
        gradients should be processed. Neither may keep the reducer alive."""
        self._params, self._each, self._tell_noted = params, each, noted
        self._noted: list[torch.Tensor] = []
        self._hook = partial(each)
        self._hooks: list[Any] = [p.register_post_accumulate_grad_hook(self._hook) for p in params]
        self._completing: set[int] = set()
        self.started_without_grads = False
        """Whether no parameter had a gradient when this backward began: then none has to be prepared for the next
        sum."""

    def note(self) -> None:
        """Gradients are only noted from now on, until `stop_noting`. Does nothing while no parameter is known to
        complete a bucket."""
        if self._completing:
            self._call(self._noted.append)

    def stop_noting(self) -> None:
        """The hooks call the reducer for each gradient from now on."""
        self.started_without_grads = False
        self._call(self._each)

    def _call(self, function: Callable[[torch.Tensor], None]) -> None:
        # partial is a builtin: if `function` is one, too, the hook runs no Python.
        self._hook.__setstate__((function, (), {}, None))  # type: ignore[attr-defined]

    def put_back(self, params: Iterable[torch.Tensor]) -> None:
        """Notes these parameters again: the reducer could not process them."""
        self._noted[:0] = params

    def take(self) -> list[torch.Tensor]:
        """Returns the noted parameters in the order in which their gradients were ready, and clears the list."""
        taken = self._noted[:]
        del self._noted[: len(taken)]
        return taken

    def completed(self, positions: Iterable[int]) -> None:
        """Gives these parameters, whose gradients completed buckets, the second hook."""
        for i in positions:
            if i not in self._completing:
                self._completing.add(i)
                self._hooks.append(self._params[i].register_post_accumulate_grad_hook(self._tell_noted))

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._hooks:
            handle.remove()
