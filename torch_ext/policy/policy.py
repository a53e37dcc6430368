"""The loader: a model's dtype decides every other dtype, overrides win over each decision.

All decisions are made in C (csrc/core/policy.c). Python finds the model's dtype, hands over mappings and hooks, and
shows the result with torch's dtypes. The fields are the rows of csrc/core/policy.def, read from the library.
"""

import ctypes
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch

from torch_ext.native import constants, dtypes, library
from torch_ext.policy import policy_source
from torch_ext.policy.policy_struct import (
    _HOOK,
    PolicyStruct,
    _Arguments,
    _decode,
    _encode,
    _Origin,
    _Overrides,
    _Setting,
    rows,
)

Overrides: TypeAlias = Mapping[str, Any] | Callable[["Policy"], Mapping[str, Any] | None]


_FORMER_COMPRESSION = "compress_below_gbps"
_PRESETS = {"seed": constants.PRESET_SEED, "conservative": constants.PRESET_CONSERVATIVE}


_EXPLICIT = (constants.SOURCE_CONFIG, constants.SOURCE_OVERRIDE, constants.SOURCE_HOOK)


# -- the policy ---------------------------------------------------------------------------------------------------


class Policy:
    """What a model trains with. Frozen; made by `load_policy`.

    Attributes are the rows of csrc/core/policy.def under Megatron-LM's names: dtypes are torch dtypes or None
    (`param_dtype`, `main_params_dtype`, `exp_avg_dtype`, `exp_avg_sq_dtype`, `main_grads_dtype`, `grad_comm_dtype`),
    choices are names (`moment_rounding == "dithered"`), absent numbers are None. `main_params_dtype` None means that
    the weights are their own masters. `print(policy)` shows every value and where it came from.
    """

    __slots__ = ("_origins", "_values")
    _values: dict[str, Any]
    _origins: dict[str, tuple[int, int]]

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, tuple[int, int]]) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_origins", dict(origins))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        raise AttributeError(f"a policy has no {name!r}; it has {', '.join(self._values)}" if name[:1] != "_" else name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a policy is frozen: give {name!r} to load_policy as an override")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a policy is frozen")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

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
        """What somebody set, in a configuration, an override or a hook's answer; None where nobody did."""
        return self._values[name] if self._origins[name][0] in _EXPLICIT else None

    # Set by torch_ext/__init__.py: the scaler stands above this package.
    _make_grad_scaler: ClassVar[Callable[..., torch.amp.GradScaler]]

    def grad_scaler(self, device: str = "cpu", process_group: Any = None) -> "torch.amp.GradScaler":
        """The dynamic loss scale of this policy, as a torch.amp.GradScaler; disabled unless the policy is fp16.

        device: type of the device that losses and gradients are on. process_group: of the ranks that skip the same
        steps: all that hold replicas or parts of the model; None: the default group, where there is one.
        """
        return self._make_grad_scaler(self, device=device, process_group=process_group)

    def row(self, dtype: torch.dtype, computed: torch.dtype | None = None) -> "Policy":
        """The policy for those parameters of the model that have another dtype (fp32 norms in a bf16 model).

        Explicit values stay, all others are those of a model in `dtype`; where that is `shard_dtype`, parameters in it
        are masters of what is computed in `param_dtype`, and all values stay. computed: what FSDP2 computes these
        parameters in, where that is known: shards that are computed in their own dtype are nobody's masters. Raises
        ValueError where there is none.
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


# -- the loader ---------------------------------------------------------------------------------------------------


def load_policy(
    model: Any = None,
    *,
    bf16: bool | None = None,
    fp16: bool | None = None,
    preset: str = "seed",
    full_shard: bool = False,
    optimizer_config: Mapping[str, Any] | None = None,
    override_optimizer_config: Overrides | None = None,
    override_ddp_config: Overrides | None = None,
) -> Policy:
    """Decides every dtype from the model's; see csrc/torch_ext.h, tx_policy_resolve, for the rules.

    model: a Module (the dtype of most of its trainable elements counts), a dtype or its name, None (bf16 unless a flag
        says otherwise), or any configuration object with `bf16` and `fp16` attributes (an absent one is False). Of fp32
        parameters that FSDP2's fully_shard shards under a MixedPrecisionPolicy, its `param_dtype` counts: moments and
        wire follow it, and the fp32 shards are the masters (`shard_dtype`).
    bf16, fp16: flags instead of, or in agreement with, the model; where both are true fp16 wins.
    preset: "seed": a bf16 model has bf16 moments, gradients and buckets beside fp32 masters; "conservative": every
    state
        is fp32 unless asked otherwise.
    full_shard: the defaults of full sharding (distributed optimizer, NaN check, optim_grads_params, overlap).
    optimizer_config: of lr, weight_decay, adam_beta1, adam_beta2, adam_eps, clip_grad, optimizer what is set here, or
        by an override, is what an optimizer of this policy starts from (see Adam); min_lr is carried for schedulers.
        Weaker than the dtype.
    override_optimizer_config, override_ddp_config: a mapping whose keys win one by one, or a hook: called once with the
        resolved policy, it returns such a mapping (or None).

    Raises ValueError for unknown keys (naming the nearest), illegal values and explicit values that contradict each
    other (naming both keys); TypeError for a model that is none. An exception raised by a hook comes out as it is.
    """
    if preset not in _PRESETS:
        raise ValueError(f"preset is {preset!r}; {' and '.join(map(repr, _PRESETS))} are legal")
    source = policy_source.of(model, bf16, fp16)
    keep: list[Any] = []  # whatever C borrows until the call returns
    raised: list[BaseException] = []
    arguments = _Arguments(
        size=ctypes.sizeof(_Arguments),
        optimizer=_overrides("override_optimizer_config", override_optimizer_config, keep, raised),
        ddp=_overrides("override_ddp_config", override_ddp_config, keep, raised),
        model_dtype=source.dtype,
        bf16=constants.UNSET if source.bf16 is None else int(source.bf16),
        fp16=constants.UNSET if source.fp16 is None else int(source.fp16),
        preset=_PRESETS[preset],
        full_shard=int(full_shard),
        shard_dtype=source.shards,
    )
    arguments.n_config, arguments.config = _settings("optimizer_config", optimizer_config, keep)
    struct = PolicyStruct(size=ctypes.sizeof(PolicyStruct))
    origins = (_Origin * len(rows()))()
    resolve = library.function(
        "tx_policy_resolve", ctypes.POINTER(_Arguments), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    )
    try:
        resolve(ctypes.byref(arguments), ctypes.byref(struct), origins, len(rows()))
    except (ValueError, RuntimeError):
        if raised:
            raise raised[0] from None
        raise
    return Policy(_decode(struct), {row.name: (o.source, o.cause) for row, o in zip(rows(), origins, strict=True)})


def _settings(what: str, mapping: Mapping[str, Any] | None, keep: list[Any]) -> tuple[int, Any]:
    if mapping is None:
        return 0, None
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{what} is a {type(mapping).__name__}; a mapping is legal")
    if _FORMER_COMPRESSION in mapping:
        warnings.warn(
            f"{what}: {_FORMER_COMPRESSION} is now grad_comm_compression, which is 'off' (formerly 0), 'on' (formerly "
            "inf) or 'auto' (any other number)",
            FutureWarning,
            stacklevel=4,
        )
    array = (_Setting * len(mapping))(*(_setting(what, key, value) for key, value in mapping.items()))
    keep.append(array)
    return len(mapping), ctypes.cast(array, ctypes.POINTER(_Setting))


def _setting(what: str, key: Any, value: Any) -> _Setting:
    if not isinstance(key, str):
        raise TypeError(f"{what} has the key {key!r}; keys are names")
    setting = _Setting(key=dtypes.c_text(key))
    if value is None:
        setting.kind = constants.VALUE_NONE
    elif isinstance(value, bool):
        setting.kind, setting.integer = constants.VALUE_BOOL, value
    elif isinstance(value, torch.dtype):
        code = dtypes.code_of(value)
        if code is None:
            raise ValueError(f"{what}: {key} is {value}, which torch_ext does not know")
        setting.kind, setting.integer = constants.VALUE_DTYPE, code
    elif isinstance(value, str):
        setting.kind, setting.text = constants.VALUE_TEXT, dtypes.c_text(value)
    elif hasattr(value, "__index__"):
        integer = value.__index__()
        if not -(2**63) <= integer < 2**63:
            raise ValueError(f"{what}: {key} is {value}, which 64 bits do not hold")
        setting.kind, setting.integer = constants.VALUE_INT, integer
    elif hasattr(value, "__float__"):
        setting.kind, setting.number = constants.VALUE_FLOAT, float(value)
    else:
        raise TypeError(
            f"{what}: {key} is a {type(value).__name__}; a number, a name, a bool, a torch dtype or None is legal"
        )
    return setting


def _overrides(what: str, given: Overrides | None, keep: list[Any], raised: list[BaseException]) -> _Overrides:
    overrides = _Overrides()
    if callable(given) and not isinstance(given, Mapping):
        overrides.hook = _hook(what, given, keep, raised)
        keep.append(overrides.hook)
    else:
        overrides.n, overrides.settings = _settings(what, given, keep)
    return overrides


def _hook(what: str, ask: Callable[[Policy], Any], keep: list[Any], raised: list[BaseException]) -> Any:
    def hook(_ctx: Any, address: Any, settings: Any, n: Any, error: Any) -> int:
        try:
            struct = PolicyStruct.from_address(address)
            # What a hook sees has been decided, but not yet by whom: the origins are known at the end.
            answer = ask(Policy(_decode(struct), {row.name: (0, -1) for row in rows()}))
            count, array = _settings(f"the answer of {what}", answer, keep)
        except BaseException as problem:  # C has no exceptions: it comes out of load_policy
            raised.append(problem)
            error.contents.message = b"the hook raised an exception"
            return constants.ERROR_INVALID_ARGUMENT
        n[0] = count
        if count:
            settings[0] = array
        return 0

    return _HOOK(hook)
