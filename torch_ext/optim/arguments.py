"""The arguments of the optimizers' constructors: one signature for several classes, and what to write instead of
argument names of other libraries."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from torch_ext.native import constants
from torch_ext.params.hyper_parameters import ONE_PER_OPTIMIZER
from torch_ext.policy.policy_struct import rows

P = ParamSpec("P")

_STATES = "states='fp32', 'bf16', 'bf16_remainder' or '8bit' says how the optimizer's states are stored"
_8BIT = "states='8bit' (or torch_ext.AdamW8bit) stores moments in 8 bits, states='bf16' in 16, states='fp32' in 32"
_CLIP = "call torch_ext.clip_grad_norm_(optimizer, max_norm) before step(), or pass policy={'clip_grad': max_norm}"
_OFFLOAD = "offload_fraction=1.0 keeps all states on the host, and steps there"
_MASTERS = f"16-bit weights have masters unless policy={{'main_params_dtype': None}} says otherwise; {_STATES}"
_CLASS = "torch_ext.AdamW decouples weight decay, torch_ext.Adam does not (decoupled_weight_decay=False)"

_NOT_MUONS = "torch.optim.Muon has none either, and the step is always fused; leave it out"
_OF_ADAMW = "adamw={'lr': ..., 'betas': ..., 'eps': ..., 'weight_decay': ...} sets it for parameters that AdamW steps"

_ELSEWHERE = {
    # names that people expect
    **dict.fromkeys(("state_dtype", "states_dtype", "state_dtypes", "optim_dtype", "dtype", "state"), _STATES),
    **dict.fromkeys(("beta1", "beta2", "beta", "adam_beta1", "adam_beta2"), "betas=(beta1, beta2) takes both"),
    **dict.fromkeys(("learning_rate", "init_lr"), "it is lr here, as in torch.optim"),
    **dict.fromkeys(("epsilon", "adam_eps", "adam_epsilon"), "it is eps here, as in torch.optim"),
    **dict.fromkeys(("wd", "decay", "l2"), "it is weight_decay here, as in torch.optim"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_norm", "max_grad_norm", "clip_grad_norm"), _CLIP),
    **dict.fromkeys(("momentum", "nesterov"), "the first of betas is Adam's momentum"),
    **dict.fromkeys(("betas", "adamw_betas", "adamw_lr", "adamw_eps", "adamw_weight_decay", "adamw_wd"), _OF_ADAMW),
    "named_parameters": "params takes model.named_parameters()",
    # arguments of our other classes and functions
    "states": "this class always has states='8bit'; torch_ext.AdamW takes the other values",
    "decoupled_weight_decay": _CLASS,
    "strategy": "torch_ext.parallelize(model, policy, strategy=...) takes it, before the optimizer steps",
    "step_in_backward": "Muon needs the whole gradient of a matrix, so it cannot step in backward; leave it out",
    "offload_fraction": (
        "Muon's states stay on the device; torch_ext.offload(model, optimizer) takes them off it between steps"
    ),
    **dict.fromkeys(("fused", "foreach", "capturable", "differentiable", "amsgrad"), _NOT_MUONS),
    "maximize": "torch.optim.Muon has none either; minimize the negative loss",
    # bitsandbytes
    "optim_bits": _8BIT,
    "percentile_clipping": f"gradients are clipped by their norm: {_CLIP}",
    "block_wise": "8-bit moments always have a scale for each 128 elements; leave it out",
    "is_paged": f"states do not move between devices by themselves; {_OFFLOAD}",
    "args": "leave it out, and pass each setting by its name",
    # torchao
    "block_size": "8-bit moments always have a scale for each 128 elements; leave it out",
    "bf16_stochastic_round": (
        "masters keep what bf16 weights cannot; without them, policy={'main_params_dtype': None}, "
        "weight_rounding='stochastic' rounds as torchao does"
    ),
    # apex, Transformer Engine
    "master_weights": _MASTERS,
    "master_weight_dtype": _MASTERS,
    "adam_w_mode": _CLASS,
    "bias_correction": "the averages are always corrected for their bias; leave it out",
    "set_grad_none": "zero_grad(set_to_none=...) takes it, as in torch.optim",
    "use_decoupled_grad": "main_grads_dtype of the policy says what gradients are accumulated in; leave it out",
    # DeepSpeed
    "model_params": "it is params here, as in torch.optim",
    "adamw_mode": _CLASS,
    "fp32_optimizer_states": _STATES,
    "cpu_offload": _OFFLOAD,
    "offload": _OFFLOAD,
    "offload_gradients": _OFFLOAD,
    "optimizer_offload_fraction": "it is offload_fraction here",
    # transformers
    "correct_bias": "the averages are always corrected for their bias; leave it out",
    "no_deprecation_warning": "leave it out",
}
"""What to write instead of an argument that a constructor does not have."""


def _instead(name: str, known: list[str]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if any(row.name == name and row.side & constants.SIDE_OPTIMIZER for row in rows()):
        return f"it is a key of the policy: policy={{{name!r}: ...}}"
    if any(row.name == name and row.side & constants.SIDE_DDP for row in rows()):
        return f"it is a key of load_policy(model, override_ddp_config={{{name!r}: ...}}), for parallelize"
    if near := difflib.get_close_matches(name, known, 1, cutoff=0.7):
        return f"the nearest is {near[0]}"
    return f"it has {', '.join(known)}"


def refuse_unknown(signature: inspect.Signature, options: dict[str, Any], kind: str) -> None:
    """Raises TypeError for a keyword that is not in the signature, and says what to write instead."""
    known = [name for name in signature.parameters if name != "self"]
    for name in options:
        if name not in known:
            raise TypeError(f"{kind}() has no argument {name!r}: {_instead(name, known)}")


def _bound(
    signature: inspect.Signature, self: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(self, *args, **options)
    except TypeError as error:
        kinds = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        raise TypeError(
            f"{type(self).__name__}(): {error}; {', '.join(kinds)} may be given by position, in this order, all "
            "others by name; params is required"
        ) from None


def constructor(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Decorates an __init__: it then rejects an unknown keyword, and says what to write instead."""
    return _called(inspect.signature(init), init)


def same_but(
    init: Callable[Concatenate[Any, P], None], without: tuple[str, ...], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Returns a decorator for a constructor that passes its arguments on to `init`. Callers, help(), inspect and type
    checkers then see the signature of `init`, without the arguments in `without` and with `defaults` in place of its
    own."""
    signature = inspect.signature(init)
    parameters = [p for p in signature.parameters.values() if p.name not in without]
    signature = signature.replace(
        parameters=[p.replace(default=defaults[p.name]) if p.name in defaults else p for p in parameters]
    )
    return functools.partial(_called, signature)


def _called(signature: inspect.Signature, own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def called(self: Any, *args: Any, **options: Any) -> None:
        refuse_unknown(signature, options, type(self).__name__)
        given = _bound(signature, self, args, options)
        given.apply_defaults()
        self._given = {key: given.arguments[key] for key in ONE_PER_OPTIMIZER if key in given.arguments}
        own(*given.args, **given.kwargs)

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called
