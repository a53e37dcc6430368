"""Chooses an optimizer's policy: from the argument `policy` or the parameters' dtype, and from `states` and
`min_8bit_size`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch

from torch_ext.params.param_groups import Params, dtype_of_most
from torch_ext.policy.loader import extended, load_policy
from torch_ext.policy.policy import Policy

States: TypeAlias = Literal["fp32", "bf16", "bf16_remainder", "8bit"]
PolicyLike: TypeAlias = Policy | Mapping[str, Any] | Callable[[Policy], Mapping[str, Any] | None]
"""A policy, or what load_policy's override_optimizer_config takes."""


def policy_for(params: Params, given: Any, states: Any, min_8bit_size: Any) -> Policy:
    """Returns the optimizer's policy. params: from `param_groups.as_lists`. given: a `PolicyLike` or None. Raises
    ValueError if `states` or `min_8bit_size` contradicts the policy, TypeError for what is no policy."""
    policy = given if isinstance(given, Policy) else _resolved(params, given)
    more: dict[str, Any] = {}
    if states is not None:
        if not isinstance(states, str):
            shown = f"{states!r}: it takes a word, not a dtype" if isinstance(states, torch.dtype) else repr(states)
            raise TypeError(f"states is {shown}; {', '.join(map(repr, get_args(States)))} are legal")
        more["states"] = states
    if isinstance(min_8bit_size, bool) or not hasattr(type(min_8bit_size), "__index__"):
        raise TypeError(f"min_8bit_size is {min_8bit_size!r}; a number of elements, 0 or more, is legal")
    if min_8bit_size:
        more["min_8bit_size"] = min_8bit_size
    return extended(policy, **more) if more else policy


def _resolved(params: Params, given: Any) -> Policy:
    """Returns the policy for the parameters' dtype with the overrides `given`; errors speak of the argument
    `policy`."""
    if given is not None and not isinstance(given, Mapping) and (not callable(given) or isinstance(given, type)):
        raise TypeError(f"policy is {_shown(given)}")
    dtype = dtype_of_most(params)
    if given is None:
        return load_policy(dtype)
    raised: list[Exception] = []
    try:
        return load_policy(
            dtype, override_optimizer_config=given if isinstance(given, Mapping) else _recording_errors(given, raised)
        )
    except (ValueError, TypeError) as error:
        if raised and raised[0] is error:
            raise
        raise type(error)(str(error).replace("override_optimizer_config", "policy")) from None


def _recording_errors(hook: Callable[[Policy], Any], raised: list[Exception]) -> Callable[[Policy], Any]:
    """Wraps the hook so that its exceptions are added to `raised`: the caller passes them on with their own text."""

    def ask(policy: Policy) -> Any:
        try:
            return hook(policy)
        except Exception as error:
            raised.append(error)
            raise

    return ask


def _shown(given: Any) -> str:
    legal = "what torch_ext.load_policy returns, a mapping of its keys, or a callable that returns one, is legal"
    if isinstance(given, str) and given in get_args(States):
        return f"{given!r}, text; {legal}. states={given!r} is the word for how states are stored"
    if isinstance(given, str):
        return f"{given!r}, text; {legal}"
    if isinstance(given, torch.dtype):
        return f"{given}, a dtype; {legal}: torch_ext.load_policy({given})"
    return f"a {type(given).__name__}; {legal}"
