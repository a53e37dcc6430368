"""The optimizer Muon: updates matrices by their orthogonalised momentum, and everything else of a model by AdamW."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_ext.optim import arguments
from torch_ext.optim.adamw import Adam
from torch_ext.optim.muon import hyper
from torch_ext.optim.muon.matrix_forms import Chooser, Split
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.state.averaging import Averaging
from torch_ext.params import hyper_parameters, param_groups
from torch_ext.params.hyper_parameters import LR, MUON_DECAY, start
from torch_ext.params.keep_32bit import Kept, Selection
from torch_ext.params.param_groups import Params
from torch_ext.params.policy_choice import PolicyLike, States, policy_for


class Muon(Adam):
    """Muon (Jordan et al. 2024) with torch.optim.Muon's arguments and state_dict, in the dtypes of a policy. Parameters
    that are no matrices are updated by AdamW.

    First torch's arguments:

    params: a model; or an iterable of parameters, of (name, parameter) pairs, or of groups (dicts with "params").
        Muon updates matrices, AdamW everything else. A parameter of three dimensions is a batch of matrices (a stack of
        experts, each orthogonalised by itself). A parameter of more dimensions, or of a convolution, is one matrix: the
        first dimension by all others. The weights of nn.Embedding and nn.EmbeddingBag are AdamW's, and so are heads
        that are tied to them and, if a model is given, the output layer that its get_output_embeddings() returns.
        A group may say algorithm="muon" (then all of its parameters must be matrices), or algorithm="adamw", with its
        own lr, betas, eps and weight_decay.
    lr: of both Muon and AdamW. A tensor of one element is legal.
    weight_decay: decoupled, of both.
    momentum: the decay of the average of the gradient, in [0, 1].
    nesterov: whether the update looks one step ahead.
    ns_coefficients: a, b and c of the step of the Newton-Schulz iteration, a X + b (X X^T) X + c (X X^T)^2 X.
    eps: the lower bound of the norm that a matrix is divided by.
    ns_steps: how many Newton-Schulz steps there are.
    adjust_lr_fn: by what lr is multiplied for a matrix. "original" (or None): sqrt(max(1, rows / columns)).
        "match_rms_adamw": 0.2 sqrt(max(rows, columns)), which makes updates as large as AdamW's, so that AdamW's lr and
        weight_decay can be used.

    Then arguments beyond torch's, by keyword only:

    ns: "standard" iterates on the matrix; "gram" on its Gram matrix of the smaller dimension. That takes fewer
        operations for rectangular matrices (5/9 for 4:1) and more for square ones. "auto": whichever takes fewer for
        each matrix. Both compute the same function of the matrix, except for rounding.
    ns_dtype: the dtype of the products, torch.float32 or torch.bfloat16. None: the one in which this processor
        multiplies faster, measured once, in the first step; the choice is stored in the groups, and so in the
        state_dict. torch.optim.Muon uses bf16.
    adamw: hyper-parameters of AdamW: {"lr", "betas", "eps", "weight_decay"}. lr and weight_decay default to those
        above, betas and eps to torch_ext.AdamW's. Under schedulers its lr keeps its ratio to the group's lr. Not for
        groups with algorithm="adamw".
    adamw_params: matrices that AdamW updates: names (of parameters, or of modules that contain them; *, ? and [] as in
        file names), modules, or types of modules; one, or several in a list.
    split: name or pattern -> parts, for weights in which several matrices are stacked by rows (fused query, key and
        value; gate and up): {"*qkv*": 3} for equal parts, {"*qkv*": (768, 128, 128)} by rows. Each part is
        orthogonalised by itself.
    states, min_8bit_size, keep_32bit, policy, moment_rounding, weight_rounding, seed, skip_nonfinite,
    on_external_write, ema_decay, ema_dtype, ema_every: as torch_ext.AdamW's. The momentum of matrices has exp_avg's
        dtype: 2 bytes per parameter with states="bf16_remainder", 1.01 with states="8bit".

    If the policy's grad_comm_dtype is bf16, an update is rounded to bf16, with one process as with many. A non-finite
    gradient of a matrix raises RuntimeError before anything is written, unless a clip, a loss scale or skip_nonfinite
    makes the step be skipped.
    """

    _decoupled = True
    _chooser: Chooser

    @arguments.constructor
    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = LR,
        weight_decay: float = MUON_DECAY,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns: str = "standard",
        ns_dtype: torch.dtype | str | None = None,
        adamw: Mapping[str, Any] | None = None,
        adamw_params: Kept | Iterable[Kept] = (),
        split: Mapping[str, Split] | None = None,
        states: States | None = None,
        min_8bit_size: int = 0,
        keep_32bit: Kept | Iterable[Kept] = (),
        policy: PolicyLike | None = None,
        moment_rounding: str | None = None,
        weight_rounding: str | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
        on_external_write: str = "resync",
        ema_decay: float | None = None,
        ema_dtype: torch.dtype | str = torch.bfloat16,
        ema_every: int = 1,
    ) -> None:
        self._chooser = Chooser(adamw_params, split, params if isinstance(params, nn.Module) else None)
        if isinstance(params, nn.Module):
            params = params.named_parameters()
        params = param_groups.as_lists(params)
        policy = policy_for(params, policy, states, min_8bit_size)
        hyper_parameters.refuse_optimizer(policy, ("muon",), type(self).__name__)
        lr = start(lr, policy, "lr")
        defaults = {
            "lr": lr,
            "weight_decay": start(weight_decay, policy, "weight_decay"),
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": None,
            "ns": ns,
            "ns_dtype": hyper.dtype_name(ns_dtype),
            **hyper.adamw_defaults(adamw, lr, policy),
            "moment_rounding": policy.moment_rounding if moment_rounding is None else moment_rounding,
            "weight_rounding": policy.weight_rounding if weight_rounding is None else weight_rounding,
            "seed": seed,
        }
        kept = Selection(keep_32bit, "keep_32bit")
        self.averaging = Averaging.of(ema_decay, ema_dtype, ema_every)
        OptimizerBase.__init__(self, params, defaults, policy, skip_nonfinite, on_external_write, 0.0, kept)
        self._chooser.refuse_unused(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as AdamW does. Raises ValueError also for a parameter that another group has, for a parameter
        that is no matrix in a group with algorithm="muon", and for a split that does not fit."""
        before = len(self.param_groups)
        param_group = hyper.own_group(param_group, self.defaults)
        _refuse_shared(param_group, self.param_groups)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[before]
            group["matrices"] = self._chooser.forms(group, f"group {before}: ")
        except BaseException:
            self._drop_groups(before)
            raise

    @property
    def adamw_groups(self) -> list[dict[str, Any]]:
        """The groups with AdamW's hyper-parameters."""
        for i, group in enumerate(self.param_groups):
            hyper.refuse_another_algorithm(group, f"group {i}: ")
        return [hyper.as_adamw(group) for group in self.param_groups]

    def refuse_hyper(self, group: dict[str, Any], where: str) -> None:
        """Raises TypeError or ValueError for illegal hyper-parameters of a group. where: begins the message."""
        hyper.refuse(group, where)

    def _fill(self, group: dict[str, Any], decoupled: bool | None) -> None:
        super()._fill(group, decoupled)
        for key in ("differentiable", "decoupled_weight_decay"):  # torch and Adam add these to every group
            group.pop(key, None)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_chooser": self._chooser}


def _refuse_shared(group: Any, groups: list[dict[str, Any]]) -> None:
    """Raises ValueError, naming both, for a parameter that another group has: a tied weight is updated only once."""
    members = group.get("params", ()) if isinstance(group, dict) else ()
    if not isinstance(members, list | tuple):
        return
    known = dict(zip(map(id, param_groups.all_params(groups)), param_groups.names(groups), strict=True))
    for i, member in enumerate(members):
        name, p = (repr(member[0]), member[1]) if isinstance(member, tuple) else (f"parameter {i}", member)
        if id(p) in known:
            raise ValueError(
                f"group {len(groups)}: {name} is {known[id(p)]}, which another group has: pass tied weights once"
            )
