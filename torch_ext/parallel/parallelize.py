"""`parallelize`: makes a model data parallel, in place.

Every rank first checks its own arguments and describes, as text, what it is about to do. The ranks compare these
descriptions, and change something only if they are equal. parallelize_checks.py has the checks, parallel_module.py the
model's new class, reducer.py and fsdp/fsdp_reducer.py the reducers.

Note: what other packages' code does to a parallelized model

Frameworks call torch.nn.utils.clip_grad_norm_ and clip_grad_value_. Under a sharded strategy these calls are redirected
to this library's `clip_grad_norm_` and to the gradient shards. What cannot work with sharded gradients raises an error
that names it: torch.amp.GradScaler, norms by other functions, DistributedDataParallel around the model
(torch_patches.py).

Note: a second call

A second call replaces the first one's reducer: after a layer was frozen or thawed in mid-training, or for another
strategy. Gradients are dropped. With optimizer=, all optimizer state (master weights, step counts, moments) keeps its
bits and is sharded as the parameters are now; parameters without state begin with zeros. The policy must ask for the
dtypes that the state already has. A frozen parameter keeps its state, whole on every rank (`del optimizer.state[p]`
drops it). At any time at most one tensor of one state is whole in memory. For parameters that were not reduced before
this call, rank 0's optimizer state is copied to every rank, as its weights are (carry_states.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from torch_ext.comm import compression
from torch_ext.comm.communicator import Communicator, divide_factor
from torch_ext.comm.factory import make_communicator
from torch_ext.comm.init_sync import agree, broadcast
from torch_ext.comm.nccl_transport import refuse
from torch_ext.parallel import carry_states, message_plan, parallel_module, torch_patches
from torch_ext.parallel import parallelize_checks as checks
from torch_ext.parallel.bucket_exchange import Settings
from torch_ext.parallel.bucket_plan import BucketPlan, plan_buckets, trainable
from torch_ext.parallel.reducer import BucketReducer
from torch_ext.parallel.strategies.table import STRATEGIES, strategy_of
from torch_ext.params import param_groups
from torch_ext.policy.policy import Policy

if TYPE_CHECKING:
    from torch_ext.parallel.fsdp.fsdp_reducer import FSDPReducer


def parallelize(
    model: torch.nn.Module,
    policy: Policy,
    *,
    strategy: str | int | None = None,
    process_group: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = False,
    gradient_divide_factor: float | None = None,
    transport: str = "torch",
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> parallel_module.ParallelModule:
    """Makes the model data parallel, in place, and returns the same object. Every rank of the group must call it.

    Gradients are reduced in buckets during backward: sent in grad_comm_dtype, summed in fp32 in rank order, divided by
    the number of ranks. The training loop stays as it is; `model.no_sync()` and `model.sync()` control accumulation.

    model: on one device. Rank 0's weights and buffers are copied to every rank; later changes of buffers stay local.
    policy: from `load_policy`. Read besides dtypes: bucket_size, overlap_grad_reduce, check_for_nan_in_grad,
        step_in_backward, create_all_gather_group (between GPUs), link_gbps. If link_gbps is None, the ranks measure
        their link here, but only if something depends on its speed: which buckets form one message, or whether
        grad_comm_compression "auto" compresses. (optim_grads_params does not measure.)
    strategy: its name or number; None: the policy's data_parallel_sharding_strategy.
        no_shard (0): after backward `.grad`, a view of a flat buffer in main_grads_dtype, is the mean over the ranks,
            rounded once to grad_gather_dtype (None: the wire's dtype; bf16 with an 8-bit wire), equal on all ranks.
        optim (1): `.grad` holds the sum, in main_grads_dtype, in this rank's part, and this rank's own gradient in the
            rest. torch_ext's optimizer steps this rank's parts of the parameters, which become views of flat buffers,
            too; `step()` all-gathers the other ranks' parts.
        optim_grads (2): every backward adds its sum to a gradient shard; `.grad` is None between backwards.
        optim_grads_params (3): torch's FSDP2 with our reduce-scatter and optimizer. A model without `fully_shard` gets
            its units here. Sums are added to the gradient shard in main_grads_dtype.
    process_group: None: the default group.
    find_unused_parameters: True: a parameter without a gradient counts as zero on that rank, and its `.grad` stays as
        it was if no rank has one. False: that is an error on every rank, which names the parameter. Every rank's
        backward must reach some parameter (as in DistributedDataParallel), or the other ranks wait for it.
    gradient_divide_factor: sums are divided by it in fp32; None: the number of ranks; 1: a sum.
    transport: between GPUs "torch", the process group with its watchdog and flight recorder, or "nccl", a communicator
        of this library's own (NCCL 2.19 or newer: torch's, else TORCH_EXT_NCCL's, the Python package's, the system's).
    optimizer: one or several whose state is kept, in a second call, too. Any other optimizer that is in use and has
        state for a trainable parameter of the model is an error.

    Raises ValueError, TypeError or RuntimeError on every rank, before anything is changed, if an argument is illegal
    on some rank or if the ranks' models or policies differ.
    """
    group = checks.group_of(process_group)
    call = _Call(model, policy, group, find_unused_parameters, gradient_divide_factor, transport)
    failure = call.prepare(strategy, optimizer)
    number = call.agree(failure)
    if (earlier := parallel_module.detach(model)) is not None:
        earlier.reducer.close()
    reducer = call.make_reducer(number)
    parallel_module.attach(model, parallel_module.Attached(reducer, model, call.strategy, policy))
    for states in call.carried:
        states.install(group)
    torch_patches.install(sharded=call.strategy != "no_shard")
    return cast(parallel_module.ParallelModule, model)  # `attach` changed its class


class _Call:
    """One call of `parallelize` on one rank: `prepare` checks and describes it, `agree` compares the ranks'
    descriptions, `make_reducer` changes the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        group: dist.ProcessGroup,
        find_unused_parameters: bool,
        given_factor: float | None,
        transport: str,
    ) -> None:
        self.model, self.policy, self.transport = model, policy, transport
        self.find_unused_parameters, self.given_factor = find_unused_parameters, given_factor
        # A model on the meta device is an error, but `prepare` has to find it: only then do all ranks hear of it.
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.communicator: Communicator = make_communicator(
            group, self.device, transport if self.device.type == "cuda" else "torch", policy.create_all_gather_group
        )
        # Set by `prepare`:
        self.strategy, self.divide_factor = "", 0.0
        self.carried: list[carry_states.CarriedStates] = []
        self.plan: BucketPlan | None = None  # FSDP2 has none
        self._layout: list[str] = []  # the layout as text, which the ranks compare

    def prepare(self, strategy: str | int | None, optimizer: object) -> Exception | None:
        """Checks the arguments on this rank and returns the error, or None. Changes nothing."""
        try:
            self._prepare(strategy, optimizer)
        except (ValueError, TypeError, RuntimeError) as error:
            return error
        return None

    def _prepare(self, strategy: str | int | None, optimizer: object) -> None:
        model, policy, communicator = self.model, self.policy, self.communicator
        earlier = parallel_module.attached_to(model)
        if earlier is not None:
            earlier.reducer.finish_failed_backward()
        refuse(self.transport, self.device)
        compression.refuse(policy, communicator.can_compress)
        self.divide_factor = divide_factor(self.given_factor, communicator.world_size)
        self.strategy = strategy_of(policy.data_parallel_sharding_strategy if strategy is None else strategy)
        known = None if earlier is None else (earlier.strategy, earlier.policy)
        given, self.carried = carry_states.carried(optimizer, model, policy, known, self.strategy, communicator.ranks)
        checks.check_model(model, self.strategy, given)
        checks.check_step_in_backward(policy, self.strategy, self.find_unused_parameters)
        if self.strategy == checks.FULLY_SHARDED:
            from torch_ext.parallel.fsdp import fully_shard  # imports torch's FSDP2: only where it is used

            self._layout = fully_shard.describe(model, policy, communicator.group)
        else:
            self.plan = checks.checked_plan(model, policy, communicator.world_size)
            self._layout = self.plan.lines()

    def agree(self, failure: Exception | None) -> int:
        """Returns the reducer's number, the same on all ranks. Raises on every rank if any rank failed or differs."""
        policy = self.policy
        options = (
            f"strategy {self.strategy}, divide by {self.divide_factor}, "
            f"unused parameters {self.find_unused_parameters}, "
            f"NaN check {policy.check_for_nan_in_grad}, sums gathered in {policy.grad_gather_dtype}, "
            f"step in backward {policy.step_in_backward}, compression {policy.grad_comm_compression}, "
            f"link of {policy.link_gbps} Gbit/s, transport {self.transport}, "
            f"a group for all-gathers {policy.create_all_gather_group}"
        )
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        shown = [f"{name} {list(t.shape)} {t.dtype}, trainable {t.requires_grad}" for name, t in tensors]
        states = [line for one in self.carried for line in one.lines()]
        return agree(
            self.communicator,
            caller="parallelize",
            fingerprint=0 if self.plan is None else self.plan.fingerprint,
            lines=[options, *shown, *self._layout, *states],
            failure=failure,
        )

    def make_reducer(self, number: int) -> "BucketReducer | FSDPReducer":
        """Broadcasts rank 0's weights and buffers, then creates the reducer and its buffers. number: from `agree`."""
        if self.plan is None:
            from torch_ext.parallel.fsdp import fully_shard

            return fully_shard.shard_fully(
                self.model,
                self.policy,
                self.communicator,
                number,
                divide_factor=self.given_factor,
                find_unused_parameters=self.find_unused_parameters,
            )
        tensors = [*self.model.parameters(), *self.model.buffers()]
        broadcast(tensors, self.communicator.group, "parallelize: rank 0's weights and buffers")
        return self._bucket_reducer(self.plan, number)

    def _bucket_reducer(self, plan: BucketPlan, number: int) -> BucketReducer:
        policy, named = self.policy, trainable(self.model)
        world_size, replicated = self.communicator.world_size, self.strategy == "no_shard"
        name = self.strategy  # a local: `replan` below must not keep this object alive
        depends = message_plan.depends_on_link(plan.buckets, world_size, policy)
        link_gbps = message_plan.link_gbps(depends, policy, self.communicator, number, "parallelize")
        ids = param_groups.ids_of([name for name, _ in named])
        params = [p for _, p in named]
        settings = Settings(
            check_for_nan=policy.check_for_nan_in_grad,
            find_unused_parameters=self.find_unused_parameters,
            step_in_backward=policy.step_in_backward,
            replan=lambda order: plan_buckets(named, policy, world_size, order=order).over_link(
                policy, link_gbps, name
            ),
            may_replan=lambda: replicated or not checks.any_optimizer_has_state(named),
        )
        plan = plan.over_link(policy, link_gbps, name)
        strategy = STRATEGIES[name](params, plan, self.communicator, ids, self.divide_factor, policy.grad_gather_dtype)
        return BucketReducer(strategy, number, settings)
