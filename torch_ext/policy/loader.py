"""load_policy: derives every dtype from the model's dtype; overrides win over each decision.

All decisions are made in C (tx_policy_resolve). Python finds the model's dtype and passes mappings and hooks to C.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from torch_ext.native import constants, dtypes, library, warning
from torch_ext.policy import policy_source
from torch_ext.policy.policy import Policy
from torch_ext.policy.policy_struct import (
    _HOOK,
    PolicyStruct,
    _Arguments,
    _decode,
    _Origin,
    _Overrides,
    _Setting,
    rows,
)

Overrides: TypeAlias = Mapping[str, Any] | Callable[[Policy], Mapping[str, Any] | None]

_FORMER_COMPRESSION = "compress_below_gbps"
_PRESETS = {"seed": constants.PRESET_SEED, "conservative": constants.PRESET_CONSERVATIVE}


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
    """Returns the policy for a model: every dtype, derived from the model's dtype. The rules are in
    csrc/torch_ext_policy.h, tx_policy_resolve.

    model: a Module (the dtype of most of its trainable elements counts), a dtype or its name, None (bf16 unless a flag
        says otherwise), or any configuration object with `bf16` and `fp16` attributes (an absent one is False). For
        fp32 parameters that FSDP2's fully_shard shards under a MixedPrecisionPolicy, its `param_dtype` counts: moments
        and wire follow it, and the fp32 shards are the masters (`shard_dtype`).
    bf16, fp16: flags instead of a model, or in agreement with it; if both are true, fp16 wins.
    preset: "seed": a bf16 model has bf16 moments, gradients and buckets, and fp32 masters; "conservative": every
        state is fp32 unless asked otherwise.
    full_shard: the defaults of full sharding (distributed optimizer, NaN check, optim_grads_params, overlap).
    optimizer_config: settings of the optimizer. An optimizer with this policy starts from lr, weight_decay, adam_beta1,
        adam_beta2, adam_eps, clip_grad and optimizer, if set here or by an override (see Adam); min_lr is for
        schedulers. ValueError if a setting contradicts the model's dtype or full_shard: only an override may.
    override_optimizer_config, override_ddp_config: a mapping whose keys win one by one, or a hook. A hook is called
        once with the resolved policy and returns such a mapping (or None).

    Raises ValueError for unknown keys (naming the nearest), illegal values and explicit values that contradict each
    other (naming both keys); TypeError for a model of an illegal type. A hook's own exception is passed on unchanged.
    """
    if preset not in _PRESETS:
        raise ValueError(f"preset is {preset!r}; {' and '.join(map(repr, _PRESETS))} are legal")
    source = policy_source.of(model, bf16, fp16)
    keep: list[Any] = []  # objects whose memory C uses until the call returns
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


def extended(policy: Policy, **more: Any) -> Policy:
    """Returns the policy with more optimizer settings, which count as overrides (tx_policy_with). Raises ValueError,
    naming both values, if a setting contradicts an explicit one of the policy."""
    keep: list[Any] = []
    count, settings = _settings("the argument", more, keep)
    struct, origins = policy._as_c()
    result, found = PolicyStruct(size=ctypes.sizeof(PolicyStruct)), (_Origin * len(rows()))()
    address = ctypes.c_void_p
    extend = library.function(
        "tx_policy_with", address, address, ctypes.POINTER(_Setting), ctypes.c_int64, address, address
    )
    extend(ctypes.byref(struct), origins, settings, count, ctypes.byref(result), found)
    return Policy(_decode(result), {row.name: (o.source, o.cause) for row, o in zip(rows(), found, strict=True)})


def _settings(what: str, mapping: Mapping[str, Any] | None, keep: list[Any]) -> tuple[int, Any]:
    """Returns the number of settings and a C array of them. The array, which C only borrows, is added to `keep`."""
    if mapping is None:
        return 0, None
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{what} is a {type(mapping).__name__}; a mapping is legal")
    if _FORMER_COMPRESSION in mapping:
        warning.warn(
            f"{what}: {_FORMER_COMPRESSION} is now grad_comm_compression, which is 'off' (formerly 0), 'on' (formerly "
            "inf) or 'auto' (any other number)",
            FutureWarning,
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
    """Wraps a Python hook as a C function pointer. An exception is added to `raised`, and the C call fails."""

    def hook(_ctx: Any, address: Any, settings: Any, n: Any, error: Any) -> int:
        try:
            struct = PolicyStruct.from_address(address)
            # The hook sees decided values, but no origins yet: these are known only at the end.
            answer = ask(Policy(_decode(struct), {row.name: (0, -1) for row in rows()}))
            count, array = _settings(f"the answer of {what}", answer, keep)
        except BaseException as problem:  # cannot pass through C; load_policy re-raises it
            raised.append(problem)
            error.contents.message = b"the hook raised an exception"
            return constants.ERROR_INVALID_ARGUMENT
        n[0] = count
        if count:
            settings[0] = array
        return 0

    return _HOOK(hook)
