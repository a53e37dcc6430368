"""The settings of the average that an optimizer keeps of its masters: ema_decay, ema_dtype and ema_every."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

DTYPES = (torch.bfloat16, "24bit", torch.float32)


class Averaging(NamedTuple):
    """In every `every`-th step: average += (1 - decay) * (master - average)."""

    dtype: "torch.dtype | str | None" = None
    """The dtype in which the average is stored; None: there is no average."""
    decay: float = 0.0
    every: int = 1

    @classmethod
    def of(cls, decay: Any, dtype: Any, every: Any) -> "Averaging":
        """Returns the settings for the arguments of an optimizer. ValueError, naming the argument, for one that is not
        legal, and for ema_dtype or ema_every without ema_decay."""
        if decay is None:
            for name, value, default in (("ema_dtype", dtype, torch.bfloat16), ("ema_every", every, 1)):
                if value != default:
                    raise ValueError(
                        f"{name}={value!r} without ema_decay keeps no average: pass ema_decay=0.9999, say, or leave "
                        f"{name} out"
                    )
            return NO_AVERAGING
        if dtype not in DTYPES:
            raise ValueError(
                f"ema_dtype is {dtype!r}; torch.bfloat16, '24bit' (bfloat16 and 8 more bits) and torch.float32 are "
                "legal: an average at a decay of 0.999 moves by less than the distance between 8-bit numbers"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"ema_every is {every!r}; a whole number from 1 on is legal")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"ema_decay is {decay!r}; a number in [0, 1), 0.9999 say, or None (no average) is legal")
        return cls(dtype, float(decay), every)

    def has_begun(self, state: Mapping[str, Any]) -> bool:
        """Whether a step has started the average of the parameter with this state. Waits for its device."""
        return float(state.get("step", 0)) >= self.every


NO_AVERAGING = Averaging()
