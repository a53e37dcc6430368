"""The loss scale of a policy. The rule by which it grows and falls is in C (csrc/core/scale.c)."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch_ext.native import library, structs
from torch_ext.policy.policy import Policy


@structs.mirror("tx_scale")
class _Scale(library.Struct):
    """The state of the loss scale."""


@functools.cache
def _update() -> Callable[[Any, int], None]:
    return library.function("tx_scale_update", ctypes.POINTER(_Scale), ctypes.c_int32)


# Key of a state_dict (torch's, and ours) -> field.
_FIELDS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "clean_steps",
    "min_scale": "min_scale",
    "hysteresis": "hysteresis",
    "_hysteresis_left": "hysteresis_left",
}


class LossScale:
    """The scale and the state of its rule: factors, window, hysteresis, counts."""

    def __init__(self, policy: Policy) -> None:
        self._values = _Scale(size=ctypes.sizeof(_Scale))
        struct, _ = policy._as_c()
        library.function("tx_scale_from_policy", ctypes.c_void_p, ctypes.POINTER(_Scale))(
            ctypes.byref(struct), ctypes.byref(self._values)
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns torch.amp.GradScaler's keys, and min_scale, hysteresis and _hysteresis_left."""
        return {key: getattr(self._values, field) for key, field in _FIELDS.items()}

    @property
    def value(self) -> float:
        return float(self._values.scale)

    def update(self, found_inf: bool) -> None:
        """Updates the scale after a step. found_inf: whether a gradient was not finite."""
        _update()(ctypes.byref(self._values), found_inf)

    def set(self, **values: Any) -> None:
        """Sets values by keys of `state_dict`. Raises ValueError, and changes nothing, for an unknown key or where the
        library rejects the result."""
        if unknown := values.keys() - _FIELDS.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is not a key of a GradScaler's state_dict")
        changed = _Scale.from_buffer_copy(self._values)
        for key, value in values.items():
            setattr(changed, _FIELDS[key], value)
        _update()(ctypes.byref(_Scale.from_buffer_copy(changed)), 1)
        self._values = changed
