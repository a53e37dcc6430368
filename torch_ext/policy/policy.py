"""The class Policy: every dtype that a model is trained with, and where each value came from.

All decisions are made in C (csrc/core/policy.c). The fields are the rows of csrc/policy.def, read from C.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_ext.native import constants, dtypes, library
from torch_ext.policy.policy_fields import PolicyFields
from torch_ext.policy.policy_struct import PolicyStruct, _decode, _encode, _Origin, rows

_EXPLICIT = (constants.SOURCE_CONFIG, constants.SOURCE_OVERRIDE, constants.SOURCE_HOOK)


class Policy(PolicyFields):
    """All dtypes and settings that a model is trained with. Frozen; created by `load_policy`.

    Attributes are the rows of csrc/policy.def under Megatron-LM's names. Dtypes are torch dtypes or None
    (`param_dtype`, `main_params_dtype`, `exp_avg_dtype`, `exp_avg_sq_dtype`, `main_grads_dtype`, `grad_comm_dtype`),
    choices are names (`moment_rounding == "dithered"`), absent numbers are None. `main_params_dtype` None means that
    the weights are their own masters. `print(policy)` shows every value and where it came from.
    """

    __slots__ = ("_origins", "_values")
    _values: dict[str, Any]
    _origins: dict[str, tuple[int, int]]

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, tuple[int, int]]) -> None:
        if len(values) < len(rows()):  # from a pickle that is older than some fields; these default to 0
            values = {**_decode(PolicyStruct(size=ctypes.sizeof(PolicyStruct))), **values}
            origins = {row.name: origins.get(row.name, (constants.SOURCE_DEFAULT, -1)) for row in rows()}
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_origins", dict(origins))

    def _value_of(self, name: str) -> Any:
        return self._values[name]

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name[:1] == "_":
                raise AttributeError(name)
            raise AttributeError(f"a policy has no {name!r}; it has {', '.join(self._values)}")

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"a policy is frozen: give {name!r} to load_policy as an override")

        def __delattr__(self, name: str) -> None:
            raise AttributeError("a policy is frozen")

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (self._values, self._origins)

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{key}={value!r}' for key, value in self._values.items())})"

    def __str__(self) -> str:
        struct, origins = self._as_c()
        describe = library.function(
            "tx_policy_describe",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int64,
            restype=ctypes.c_int64,
        )
        text = ctypes.create_string_buffer(describe(ctypes.byref(struct), origins, None, 0) + 1)
        describe(ctypes.byref(struct), origins, text, len(text))
        return text.value.decode().rstrip("\n")

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The optimizer's keys with plain values (dtypes as names): serialisable, and legal as an override."""
        return self._config(constants.SIDE_OPTIMIZER)

    @property
    def ddp_config(self) -> dict[str, Any]:
        """The data-parallel buckets' keys with plain values (dtypes as names): serialisable, and legal as an
        override.
        """
        return self._config(constants.SIDE_DDP)

    def _explicit(self, name: str) -> Any:
        """Returns the value if it was set by a configuration, an override or a hook; else None."""
        return self._values[name] if self._origins[name][0] in _EXPLICIT else None

    # Set by torch_ext/__init__.py, because this package must not import `amp`, which is above it.
    _make_grad_scaler: ClassVar[Callable[..., torch.amp.GradScaler]]

    def grad_scaler(self, device: str = "cpu", process_group: Any = None) -> "torch.amp.GradScaler":
        """Returns the dynamic loss scale of this policy, as a torch.amp.GradScaler; disabled unless the policy is fp16.

        device: type of the device that losses and gradients are on: "cpu" or "cuda".
        process_group: the ranks that have to skip the same steps: all that hold replicas or shards of the model. None:
            the default group, if there is one.
        """
        return self._make_grad_scaler(self, device=device, process_group=process_group)

    def row(self, dtype: torch.dtype, computed: torch.dtype | None = None) -> "Policy":
        """Returns the policy for those parameters of the model that have another dtype (fp32 norms in a bf16 model).

        Explicit values stay; all others become those of a model in `dtype`. If `dtype` is `shard_dtype`, all values
        stay: such parameters are the masters of weights that are computed in `param_dtype`. computed: the dtype in
        which FSDP2 computes with these parameters, if known; if it is `dtype`, the shards are not masters. Raises
        ValueError if there is no policy for `dtype`.
        """
        if dtype == self.param_dtype:
            return self
        code = dtypes.code_of(dtype)
        if code is None:
            raise ValueError(f"no policy for parameters of {dtype}; float32, bfloat16 and float16 are legal")
        struct, origins = self._as_c()
        if computed == dtype:
            struct.shard_dtype = 0
        row = PolicyStruct(size=ctypes.sizeof(PolicyStruct))
        library.function("tx_policy_row", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(
            ctypes.byref(struct), origins, code, ctypes.byref(row)
        )
        return Policy(_decode(row), self._origins)

    def _config(self, side: int) -> dict[str, Any]:
        plain = {row.name: self._values[row.name] for row in rows() if row.side & side}
        return {k: dtypes.name_of(v) if isinstance(v, torch.dtype) else v for k, v in plain.items()}

    def _as_c(self) -> tuple[ctypes.Structure, Any]:
        origins = (_Origin * len(rows()))(*(_Origin(*self._origins[row.name]) for row in rows()))
        return _encode(self._values), origins
