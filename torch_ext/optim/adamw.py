"""AdamW and Adam: torch.optim.Optimizer on the outside, one adamw_flat_ call per step on the inside."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.native.untraced import untraced
from torch_ext.optim import arguments, master_sync
from torch_ext.optim.health import MeasuringOptimizer
from torch_ext.optim.state import save
from torch_ext.optim.state.averaging import Averaging
from torch_ext.params import hyper_parameters, param_groups, reducer_registry
from torch_ext.params.hyper_parameters import BETAS, DECAY, EPS, LR, NO_DECAY, start
from torch_ext.params.keep_32bit import Kept, Selection
from torch_ext.params.param_groups import Params, of_the_innermost
from torch_ext.params.policy_choice import PolicyLike, States, policy_for


class Adam(MeasuringOptimizer):
    """Adam (Kingma & Ba 2015) with torch.optim.Adam's arguments and state_dict, in the dtypes of a policy.

    decoupled_weight_decay: True: AdamW's, whose other arguments these are; only weight_decay is 0 where it is not said.
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
        params = param_groups.taken(params)
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
        """One step; returns the closure's loss, if there is a closure.

        Parameters without a gradient are left alone. Raises RuntimeError where a gradient or a parameter is not what
        the operator takes, naming it; nothing has been written then.
        """
        loss, release = None, self._release
        if release is not None:
            release.refuse_step(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for owner in reducer_registry.owners_of(self._states.everyone()):
                owner.before_step()
        self._masters_may_change("step()")
        with torch.no_grad():
            self._stepper.step(released=release is not None and release.stepped)
        if release is not None:
            release.finish()
        return loss

    @of_the_innermost
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, shards of gradients included. A clip coefficient that no step has applied is forgotten."""
        self._stepper.drop_gradients()
        self._stepper.unfinished.forget()
        super().zero_grad(set_to_none)
        if self._release is not None:
            if self._release.stepped:
                self._stepper.stepped_so_far()
            self._release.finish()

    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite, since the optimizer was made: by itself or by
        policy.grad_scaler(). One for which torch.amp.GradScaler does not call step() is not counted. Waits for the
        device."""
        return int(self._states.counts[0, 0])

    def external_writes(self) -> int:
        """Elements of this rank whose masters became their weights because these were modified outside the optimizer,
        since it was made; in whole blocks of 1024 beside remainders. What `resync_masters` did is not in it. Waits for
        the device."""
        return int(self._states.counts[:, 1].sum())

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def unscales_in_step(self) -> bool:
        """Whether policy.grad_scaler() leaves gradients as they are until the step; not with fused=False."""
        return self.defaults.get("fused") is not False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling to the step; frameworks that clip refuse to where it does.

        As of torch's optimizers with fused=True. And where its unscale_ refuses to: of gradients in fp16.
        """
        if self._release is not None:
            return True  # so that step() is asked, and refuses
        fused = self.defaults.get("fused")
        if fused is not None:
            return bool(fused)
        trained = [p for p in self._states.everyone() if p.requires_grad]
        return any((p if p.grad is None else p.grad).dtype == torch.float16 for p in trained)

    def _present_grads(self) -> list[Tensor]:
        """The gradients that a step would read now."""
        return [g for g in self.current_shards(self._states.everyone()).grads() if g is not None]

    # -- masters ------------------------------------------------------------------------------------------------------

    @of_the_innermost
    def resync_masters(self, state_dict: Mapping[str, Any] | None = None, force: bool = False) -> int:
        """Compares every master with its weight and makes it the weight where it no longer rounds to it.

        For weights that were written where nobody can notice (see on_external_write). 16-bit remainders are legal
        beside any weight: they are dropped in blocks of 1024 weights of which one was written. force: every master
        becomes exactly its weight, remainders included.

        state_dict: a model's in higher precision, from which the weights that are there now were rounded (load it into
        the model first). Masters are taken from it, by parameter name: what rounding to the weight lost is kept.
        ValueError or TypeError, naming the parameter, where it does not fit; nothing has changed then.

        Returns the number of elements that changed, of this rank.
        """
        if state_dict is not None and force:
            raise ValueError(
                "resync_masters(): force=True takes masters from the weights, state_dict= gives other ones; pass one "
                "of the two"
            )
        self._masters_may_change("resync_masters()")
        with torch.no_grad():
            if state_dict is not None:
                return master_sync.seed(self._states, self._stepper, state_dict)
            return master_sync.resync(self._states, self._stepper, force)

    @of_the_innermost
    @contextlib.contextmanager
    def master_weights(self) -> Iterator[dict[str | int, Tensor]]:
        """Full precision while the block runs (under no_grad): to constrain weights, average them, or read them.

            with opt.master_weights() as masters:
                for p in model.parameters(): p.clamp_(-1, 1)

        Each parameter that has a master *is* its master (fp32) then, and afterwards becomes its nearest in the model's
        dtype again. `masters` has the same tensors by parameter name (position where names are not known): of
        parameters that are cut over the ranks, which stay as they are, this rank's part, and DTensors' local tensors;
        what is written there is taken over as well. Where parameters are cut every rank enters, and leaving is
        collective. A step inside is a RuntimeError.
        """
        self.refuse_between("master_weights()")
        self._masters_may_change("master_weights()")
        self._open = "master_weights(), where parameters hold their masters"
        try:
            with torch.no_grad(), master_sync.opened(self._states, self._stepper) as masters:
                yield masters
        finally:
            self._open = ""

    @untraced
    @of_the_innermost
    def master_state_dict(self) -> dict[str | int, Any]:
        """What is trained, in full precision: of each parameter the fp32 master, or the weight where it is its own.
        Masters as the last step left them: after a write to weights call `resync_masters()` first.

        By parameter name; by position where the optimizer does not know names. Tensors as those of `state_dict()`, to
        be read, not written.
        """
        return save.masters(self, self._logical_state_dict("master_state_dict()"))


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments and state_dict, in the dtypes of a policy.

    The step is one fused pass over memory. First torch's arguments:

    params: an iterable of parameters, of (name, parameter) pairs, or of groups (dicts with "params"), on one device, in
        float32, bfloat16 or float16. Names seed the rounding thresholds and appear in messages.
    lr: a number, or a tensor of one element. A step that is captured into a CUDA graph (after one that was not, which
        makes the state) takes tensors on the device, one for each group, whose values of the moment count in every
        replay; a number there is refused. All else (betas, eps, weight_decay, seed, the norm that gradients are clipped
        to) stays in every replay what it was in the capture.
    betas: the decay of the averages of the gradient and of its square, each in [0, 1).
    eps: is added to the denominator, for numerical stability.
    weight_decay: the weight is multiplied by 1 - lr * weight_decay (AdamW), or weight_decay times it is added to the
        gradient (Adam).
    amsgrad, differentiable: True is refused.
    maximize: True: steps along the gradient, not against it.
    foreach, capturable: are accepted and without effect.
    fused: the step is fused whatever is said; True or False also says whether a loss scale is divided out in the step
        (False: by the scaler, before it).

    And those beyond torch's, by keyword only:

    states: one word for how moments and masters are stored. The figures are bytes per parameter of a bf16 model, its
        weight and gradient (2 each) included:

            "fp32"            moments in fp32, masters in fp32: 16
            "bf16"            moments in bf16, masters in fp32: 12; what a bf16 model has unless something else is said
            "bf16_remainder"  moments in bf16, masters in the 16 bits that the bf16 weight lacks: 10
            "8bit"            moments in 8 bits with a scale for each 128, masters as those of "bf16_remainder": 8.02

        Weights in fp32 are their own masters under each of them, and "bf16_remainder" is refused for a model in fp32 or
        fp16; fp16 weights have fp32 masters. None: as `policy` says. A setting of `policy` that contradicts the word is
        a ValueError that names both.
    min_8bit_size: parameters with fewer elements keep fp32 moments where the others' are of 8 bits. 0: as the policy
        says, which is 0 unless it was set there.
    keep_32bit: parameters that keep fp32 moments whatever else is said: names (of parameters or of modules around them;
        *, ? and [] as in file names), modules, or types of modules such as torch.nn.Embedding; one, or several in a
        list. Names need params with names; one that fits no parameter is a ValueError. A group may have its own
        "keep_32bit": the same, or True or False. Not part of a state_dict: what is loaded becomes what this says.
    policy: what `load_policy` returns; or what its override_optimizer_config takes, a mapping or a callable, so that it
        can stand in a configuration file: {"exp_avg_dtype": "fp8"}. Of a mapping, a callable or None, the policy is
        that of the dtype of most trainable elements. Parameters in other dtypes follow their own row of it. What was
        set explicitly in it of lr, weight_decay, adam_beta1, adam_beta2 and adam_eps is what this optimizer starts
        from, unless an argument or a group says otherwise; its defaults are not. Where clip_grad is set, step() clips
        by it: gradients that nobody clipped since the last step or zero_grad, by `torch_ext.clip_grad_norm_` or one of
        torch.nn.utils' functions (measuring with math.inf is no clipping). Where `optimizer` is set it must be this
        one: "adam" fits AdamW, too, as with Megatron-LM.
    moment_rounding: "dithered", "stochastic" or "nearest": how moments are brought to 16 or 8 bits. None: the policy's.
    weight_rounding: the same for a 16-bit weight without a master.
    seed: of the rounding thresholds, a 64-bit integer; saved with the state.
    skip_nonfinite: True: a step with a non-finite gradient is left out and counted, at the price of one more read of
        the gradients where nothing else has read them (a clip, a loss scale).
    on_external_write: what to do where a weight is not what its master rounds to, because it was modified outside the
        optimizer: "resync" (the master becomes the weight), "error", or "ignore" (an fp32 master overwrites the weight;
        beside a remainder the written weight stays, and the remainder below it). A write is noticed by the parameter's
        version counter and address, by its master's identity and version counter, and by what the weights are: beside
        fp32 masters in a sample of 32 in every 2048 elements, beside remainders in all of them (there a block of 1024
        is taken over at a time). What is not seen is a write through `p.data`, numpy or a storage to fewer than 2048
        neighbours beside fp32 masters: call `resync_masters()` after it. So it is the weight that counts: masters are
        written within `master_weights()`.
    offload_fraction: in [0, 1]: the share of the bytes of states and masters that lies on the host, where its
        parameters are stepped while the device steps the others: gradients are copied down and weights up beside both.
        Whole parameters, or this rank's parts of them: the largest first, as long as they fit, so that the share is off
        by half of the smallest one left out at most; 0 and 1 are exact. The weights, and everything this optimizer
        returns and takes, are the same for every fraction; what lies on the host is not in `opt.state`, which has its
        step only. Where a policy steps buckets in backward, those of which a part is on the host are left to step().
    step_in_backward: True: a parameter is stepped as soon as its gradient is ready, within backward, and the gradient
        is freed (gradient release): no more gradients exist at a time than the largest ones. step() then steps what is
        left, and counts as the step for schedulers; the weights are the same, bit for bit. What needs all gradients
        before the first is stepped is refused: clipping, a loss scale, skip_nonfinite, closures, and a second backward
        before step() or zero_grad(); offload_fraction as well. After a backward that raised, step() and the next
        backward say which parameters were stepped: load a checkpoint, or call zero_grad() to keep that and go on.
        Where a model is parallelized its policy decides (override_ddp_config={"step_in_backward": True}), and
        contradicting it is refused.
    ema_decay: in [0, 1): keeps an average of the masters (of fp32 weights: of these), which each step moves towards
        them by 1 - ema_decay of what is missing, in the same pass. None: there is none. It begins as what the first
        step makes of the weights, as torch.optim.swa_utils.AveragedModel's. `ema_weights()` swaps it into the model,
        `ema_state_dict()` hands it out; it is in state_dict() as "ema_param".
    ema_dtype: torch.bfloat16, rounded by dithering; "24bit": with 8 more bits; or torch.float32. 2, 3 or 4 bytes per
        parameter. Another than the default is refused without ema_decay, as another ema_every is.
    ema_every: only every so many steps of a parameter (those in which it has a gradient), with ema_decay as it is.
    """

    _decoupled = True

    @arguments.same_but(Adam.__init__, without=("decoupled_weight_decay",), weight_decay=DECAY)
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, decoupled_weight_decay=True)


class AdamW8bit(AdamW):
    """AdamW with states="8bit", whose other arguments these are: for who looks for bitsandbytes' or torchao's name.

    bf16 models keep 16-bit remainders beside their 8-bit moments, so that small updates are not lost: 8.02 bytes per
    parameter, weight and gradient included. min_8bit_size is 0 unless it is given (bitsandbytes': 4096).
    """

    @arguments.same_but(AdamW.__init__, without=("states",))
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, states="8bit")


if Adam.__doc__ and AdamW.__doc__ and AdamW8bit.__doc__:  # python -OO has none
    _, blank, of_arguments = inspect.cleandoc(AdamW.__doc__).partition("\n\n")
    for kind in (Adam, AdamW8bit):
        kind.__doc__ = inspect.cleandoc(kind.__doc__ or "") + blank + of_arguments
