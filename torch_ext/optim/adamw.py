"""AdamW and Adam: torch.optim.Optimizer on the outside, one adamw_flat_ call per step or bucket on the inside."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from torch_ext.native.untraced import untraced
from torch_ext.optim import arguments, master_sync
from torch_ext.optim.health import MeasuringOptimizer
from torch_ext.optim.state import save
from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.writing_calls import STEP, writes
from torch_ext.params import hyper_parameters, param_groups, reducer_registry
from torch_ext.params.hyper_parameters import BETAS, DECAY, EPS, LR, NO_DECAY, start
from torch_ext.params.keep_32bit import Kept, Selection
from torch_ext.params.param_groups import Params, of_the_innermost
from torch_ext.params.policy_choice import PolicyLike, States, policy_for


class Adam(MeasuringOptimizer):
    """Adam (Kingma & Ba 2015) with torch.optim.Adam's arguments and state_dict, in the dtypes of a policy.

    The arguments are AdamW's, except that weight_decay defaults to 0, and:

    decoupled_weight_decay: True decouples weight decay from the gradient, as AdamW does.
    """

    @arguments.constructor
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = LR,
        betas: tuple[float | Tensor, float | Tensor] = BETAS,
        eps: float = EPS,
        weight_decay: float = NO_DECAY,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        states: States | None = None,
        min_8bit_size: int = 0,
        keep_32bit: Kept | Iterable[Kept] = (),
        policy: PolicyLike | None = None,
        moment_rounding: str | None = None,
        weight_rounding: str | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
        on_external_write: str = "resync",
        offload_fraction: float = 0.0,
        step_in_backward: bool = False,
        ema_decay: float | None = None,
        ema_dtype: torch.dtype | str = torch.bfloat16,
        ema_every: int = 1,
    ) -> None:
        params = param_groups.as_lists(params)
        policy = policy_for(params, policy, states, min_8bit_size)
        decouples = bool(self._decoupled or decoupled_weight_decay)
        hyper_parameters.refuse_optimizer(policy, ("adam", "adamw") if decouples else ("adam",), type(self).__name__)
        defaults = {
            "lr": start(lr, policy, "lr"),
            "betas": hyper_parameters.start_betas(betas, policy),
            "eps": start(eps, policy, "adam_eps"),
            "weight_decay": start(weight_decay, policy, "weight_decay"),
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "moment_rounding": policy.moment_rounding if moment_rounding is None else moment_rounding,
            "weight_rounding": policy.weight_rounding if weight_rounding is None else weight_rounding,
            "seed": seed,
        }
        kept = Selection(keep_32bit, "keep_32bit")
        self.averaging = Averaging.of(ema_decay, ema_dtype, ema_every)
        super().__init__(
            params, defaults, policy, skip_nonfinite, on_external_write, offload_fraction, kept, step_in_backward
        )

    # -- the step -----------------------------------------------------------------------------------------------------

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient; returns the closure's loss, if there is a closure.

        Raises RuntimeError, naming the parameter, if a parameter or a gradient is not legal for the operator, and
        during a call that writes to this optimizer in another thread; nothing has been written then.
        """
        loss, release = None, self._release
        if release is not None:
            release.refuse_step(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for owner in reducer_registry.owners_of(self._states.all_params()):
                owner.before_step(STEP)
        self.writing_calls.run(STEP, self._take_step, release)
        return loss

    @of_the_innermost
    @writes("zero_grad()")
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets all gradients to None or zero, as torch's zero_grad does, sharded ones included. Also drops a clip
        coefficient that no step has applied yet."""
        self._stepper.drop_gradients()
        self._stepper.unfinished.forget()
        super().zero_grad(set_to_none)
        if self._release is not None:
            if self._release.stepped:
                self._stepper.end_partial_step()
            self._release.finish()

    def skipped_steps(self) -> int:
        """Returns how many steps were skipped because a gradient was not finite, since the optimizer was created: by
        the optimizer itself or by policy.grad_scaler(). A step that torch.amp.GradScaler skips by not calling step() is
        not counted. Waits for the device."""
        return int(self._states.counts[0, 0])

    def external_writes(self) -> int:
        """Returns how many elements of this rank's masters were reset to their weights because the weights were
        modified outside the optimizer, since it was created. Masters that are stored as remainders are reset, and
        counted, in whole blocks of 1024. Resets by `resync_masters` are not counted. Waits for the device."""
        return int(self._states.counts[:, 1].sum())

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def unscales_in_step(self) -> bool:
        """Whether policy.grad_scaler() leaves gradients scaled until step() unscales them; False with fused=False."""
        return self.defaults.get("fused") is not False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling to step(). Frameworks refuse to clip where it does.

        `fused` decides, as for torch's optimizers. By default it is True for fp16 gradients, which GradScaler.unscale_
        rejects.
        """
        if self._release is not None:
            return True  # so that GradScaler calls step(), which raises
        fused = self.defaults.get("fused")
        if fused is not None:
            return bool(fused)
        trained = [p for p in self._states.all_params() if p.requires_grad]
        return any((p if p.grad is None else p.grad).dtype == torch.float16 for p in trained)

    def _present_grads(self) -> list[Tensor]:
        """Returns the gradients that step() would read now."""
        return [g for g in self.current_shards(self._states.all_params()).grads() if g is not None]

    # -- masters ------------------------------------------------------------------------------------------------------

    @of_the_innermost
    @writes("resync_masters()")
    def resync_masters(self, state_dict: Mapping[str, Any] | None = None, force: bool = False) -> int:
        """Resets every master that no longer rounds to its weight to that weight. Returns how many elements of this
        rank changed.

        Call it after writes to weights that the optimizer cannot notice (see on_external_write). A 16-bit remainder is
        legal with any weight, so it does not show that the weight was written: remainders are zeroed in blocks of 1024
        in which at least one weight was written. force: every master becomes exactly its weight, and every remainder 0.

        state_dict: a model's state_dict in higher precision, from which the current weights were rounded (load it into
        the model first). Masters are copied from it by parameter name, with the bits that the rounded weights lost.
        ValueError or TypeError, naming the parameter, where it does not fit; nothing has changed then.
        """
        if state_dict is not None and force:
            raise ValueError(
                "resync_masters(): force=True takes masters from the weights, state_dict= gives other ones; pass one "
                "of the two"
            )
        self._before_master_change("resync_masters()")
        with torch.no_grad():
            if state_dict is not None:
                return master_sync.seed_masters(self._states, self._stepper, state_dict)
            return master_sync.resync(self._states, self._stepper, force)

    @of_the_innermost
    @contextlib.contextmanager
    def master_weights(self) -> Iterator[dict[str | int, Tensor]]:
        """Turns parameters into their masters while the block runs (under no_grad): to constrain, average or read
        weights at full precision.

            with opt.master_weights() as masters:
                for p in model.parameters(): p.clamp_(-1, 1)

        Inside, each parameter that has a master *is* its fp32 master; afterwards it is the master, rounded to nearest
        in the model's dtype. `masters` has the same tensors by parameter name (by position where names are not known).
        Parameters that are sharded over the ranks, and DTensors, stay as they are: `masters` has this rank's part of
        them, and a write to that part takes effect as well. Where parameters are sharded, every rank must enter, and
        leaving is collective. step() inside the block raises RuntimeError.
        """
        self.refuse_between("master_weights()")
        self._before_master_change("master_weights()")
        self._open, self._opened_by = "master_weights(), where parameters hold their masters", get_ident()
        try:
            self.writing_calls.refuse("master_weights()")  # after `_open` is set, which a step that begins now finds
            with torch.no_grad(), master_sync.masters_as_params(self._states, self._stepper) as masters:
                yield masters
        finally:
            self._open = ""

    @untraced
    @of_the_innermost
    def master_state_dict(self) -> dict[str | int, Any]:
        """Returns every parameter in full precision: its fp32 master, or the weight itself where it has no master. The
        masters are those that the last step left: after a write to weights call `resync_masters()` first.

        Keys are parameter names, or positions where the optimizer does not know names. Values are tensors like those of
        `state_dict()`; they must not be written to.
        """
        return save.masters(self, self._logical_state_dict("master_state_dict()"))


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments and state_dict, in the dtypes of a policy.

    The step is one fused pass over memory. First torch's arguments:

    params: an iterable of parameters, of (name, parameter) pairs, or of groups (dicts with "params"), on one device, in
        float32, bfloat16 or float16. Names seed the rounding thresholds and appear in messages.
    lr: a number, or a tensor of one element. To capture a step into a CUDA graph, take one uncaptured step first, which
        creates the state, and give each group an lr tensor on the device: each replay reads its current value. A number
        is rejected in a capture. All else (betas, eps, weight_decay, seed, the norm that gradients are clipped to)
        keeps the value that it had in the capture.
    betas: the decay of the averages of the gradient and of its square, each in [0, 1).
    eps: is added to the denominator, for numerical stability.
    weight_decay: AdamW multiplies the weight by 1 - lr * weight_decay; Adam adds weight_decay times the weight to the
        gradient.
    amsgrad, differentiable: True is rejected.
    maximize: True: steps along the gradient, not against it.
    foreach, capturable: are accepted and have no effect.
    fused: the step is always fused. True or False says whether a loss scale is divided out in the step (False: by the
        scaler, before the step).

    And those beyond torch's, by keyword only:

    states: one word for how moments and masters are stored. The figures are bytes per parameter of a bf16 model, its
        weight and gradient (2 each) included:

            "fp32"            moments in fp32, masters in fp32: 16
            "bf16"            moments in bf16, masters in fp32: 12; the default of a bf16 model
            "bf16_remainder"  moments in bf16, masters in the 16 bits that the bf16 weight lacks: 10
            "8bit"            moments in 8 bits with a scale for each 128, masters as those of "bf16_remainder": 8.02

        fp32 weights are their own masters under each word; fp16 weights have fp32 masters. "bf16_remainder" is rejected
        for a model in fp32 or fp16. None: as `policy` says. A setting of `policy` that contradicts the word is a
        ValueError that names both.
    min_8bit_size: parameters with fewer elements than this have fp32 moments where others have 8-bit ones. 0: the
        policy's value, which is 0 unless it was set there.
    keep_32bit: parameters that have fp32 moments whatever the other settings say: names (of parameters or of modules
        that contain them; *, ? and [] as in file names), modules, or types of modules such as torch.nn.Embedding; one,
        or several in a list. Names need params with names; one that matches no parameter is a ValueError. A group may
        have its own "keep_32bit": the same, or True or False. It is not saved in a state_dict: a load converts moments
        to what the loading optimizer's keep_32bit says.
    policy: what `load_policy` returns; or a mapping or a callable, as its override_optimizer_config takes, so that it
        can stand in a configuration file: {"exp_avg_dtype": "fp8"}. With a mapping, a callable or None, the policy is
        that of the dtype of most trainable elements. Parameters in other dtypes follow the policy's row for their
        dtype. lr, weight_decay, adam_beta1, adam_beta2 and adam_eps become this optimizer's defaults where they were
        set explicitly in the policy; arguments and groups win over them. If clip_grad is set, step() clips gradients to
        it unless they were clipped since the last step or zero_grad, by `torch_ext.clip_grad_norm_` or one of
        torch.nn.utils' functions (measuring with math.inf is no clipping). If `optimizer` is set, it must be this
        optimizer: "adam" fits AdamW, too, as with Megatron-LM.
    moment_rounding: "dithered", "stochastic" or "nearest": how moments are rounded to 16 or 8 bits. None: the policy's.
    weight_rounding: the same for a 16-bit weight without a master.
    seed: seeds the rounding thresholds, a 64-bit integer; saved with the state.
    skip_nonfinite: True: a step with a non-finite gradient is skipped and counted. This costs one more read of the
        gradients, unless a clip or a loss scale has read them already.
    on_external_write: what to do where a master does not round to its weight, because the weight was modified outside
        the optimizer: "resync" (the master becomes the weight), "error", or "ignore" (an fp32 master overwrites the
        weight; with a remainder, the modified weight and the old remainder together are the new master). A write is
        noticed by the parameter's version counter and address, by its master's identity and version counter, and by
        checksums of the weights: of 32 in every 2048 elements with fp32 masters, of all elements with remainders (which
        are resynced in blocks of 1024). With fp32 masters a write through `p.data`, numpy or a storage to fewer than
        2048 neighbouring elements may go unnoticed: call `resync_masters()` after it. Since the weight wins over its
        master, write to masters within `master_weights()`.
    offload_fraction: in [0, 1]: the share of the bytes of states and masters that is stored on the host. Parameters
        whose state is there are stepped there while the device steps the others, and the copies of gradients to the
        host and of weights to the device overlap with both. Whole parameters (or this rank's parts of them) are
        offloaded, the largest first as long as they fit, so that the share is off by at most half of the smallest one
        left out; 0 and 1 are exact. The weights, and everything this optimizer returns and takes, are the same for
        every fraction. Of an offloaded parameter `opt.state` has the step only. Where a policy steps buckets in
        backward, buckets with an offloaded parameter are left to step().
    step_in_backward: True: a parameter is stepped within backward as soon as its gradient is ready, and the gradient is
        freed (gradient release), so that gradients take no more memory than the largest ones. step() then steps what is
        left, and counts as the step for schedulers; the weights are the same, bit for bit. Whatever needs all gradients
        before the first parameter is stepped is rejected: clipping, a loss scale, skip_nonfinite, closures, and a
        second backward before step() or zero_grad(); offload_fraction is rejected as well. After a backward that
        raised, step() and the next backward say which parameters were stepped: load a checkpoint, or call zero_grad()
        to keep those steps and go on. For a parallelized model the policy decides
        (override_ddp_config={"step_in_backward": True}), and an argument that contradicts it is rejected.
    ema_decay: in [0, 1): keeps an average of the masters (or of fp32 weights). Each step moves the average towards them
        by 1 - ema_decay of the difference, in the same pass. None: no average. It starts as a copy of what the first
        step makes of the weights, as torch.optim.swa_utils.AveragedModel's does. `ema_weights()` swaps it into the
        model, `ema_state_dict()` returns it; it is in state_dict() as "ema_param".
    ema_dtype: torch.bfloat16 with dithered rounding; "24bit", which has 8 more bits; or torch.float32. 2, 3 or 4 bytes
        per parameter. Without ema_decay, values of ema_dtype and ema_every other than the defaults are rejected.
    ema_every: updates the average only in every so many steps of a parameter (steps in which it has a gradient);
        ema_decay is not adjusted.
    """

    _decoupled = True

    @arguments.same_but(Adam.__init__, without=("decoupled_weight_decay",), weight_decay=DECAY)
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, decoupled_weight_decay=True)


class AdamW8bit(AdamW):
    """AdamW with states="8bit", under the name that bitsandbytes and torchao use. The other arguments are AdamW's.

    bf16 models keep 16-bit remainders as well as 8-bit moments, so that small updates are not lost: 8.02 bytes per
    parameter, weight and gradient included. min_8bit_size is 0 unless it is given (bitsandbytes': 4096).
    """

    @arguments.same_but(AdamW.__init__, without=("states",))
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, states="8bit")


if Adam.__doc__ and AdamW.__doc__ and AdamW8bit.__doc__:  # python -OO has none
    _, blank, of_arguments = inspect.cleandoc(AdamW.__doc__).partition("\n\n")
    for kind in (Adam, AdamW8bit):
        kind.__doc__ = inspect.cleandoc(kind.__doc__ or "") + blank + of_arguments
