"""`parallelize`: data parallelism in place. Validates, agrees with the other ranks, then attaches an engine."""

import copyreg
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ext.comm import compression
from torch_ext.comm.communicator import MAX_BUCKETS, divide_factor
from torch_ext.comm.factory import make_communicator
from torch_ext.comm.init_sync import agree, broadcast
from torch_ext.comm.lost_ranks import refuse as refuse_group
from torch_ext.comm.nccl_transport import refuse
from torch_ext.native import cuda_library
from torch_ext.optim.adamw import Adam
from torch_ext.optim.state import access
from torch_ext.parallel import carry_states, torch_patches
from torch_ext.parallel.bucket_plan import BucketPlan, plan_buckets
from torch_ext.parallel.in_use import in_use
from torch_ext.parallel.reducer import BucketReducer
from torch_ext.parallel.strategies.table import STRATEGIES
from torch_ext.params import local_shard, param_groups, reducer_registry
from torch_ext.policy import policy_struct
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense, offload_guard

if TYPE_CHECKING:
    from torch_ext.parallel.fsdp.fsdp_reducer import FSDPReducer


_DEVICES = ("cpu", "cuda")
_FULLY = "optim_grads_params"  # FSDP2 keeps the parameters; the other strategies are stores of ours

# Not an attribute of the module, which would be pickled and copied with it.
_engines: "weakref.WeakKeyDictionary[torch.nn.Module, _Attached]" = weakref.WeakKeyDictionary()


class _Attached:
    """What a parallelized module has besides its own: an engine, and where its parameters were found."""

    def __init__(
        self, engine: "BucketReducer | FSDPReducer", module: torch.nn.Module, strategy: str, policy: Policy
    ) -> None:
        self.engine, self.strategy, self.policy = engine, strategy, policy
        # The folder, the key and the parameter: parameters are replaced there (assign=True), or frozen and thawed.
        self.places = [
            (owner._parameters, key, param, param.requires_grad)
            for owner in module.modules()
            for key, param in owner._parameters.items()
            if param is not None
        ]

    def check(self, module: torch.nn.Module) -> None:
        """RuntimeError where a parameter is not the one whose gradient the engine reduces."""
        for folder, key, param, trainable in self.places:
            now = folder.get(key)
            if now is not None and local_shard.is_dtensor(param) and not local_shard.is_dtensor(now):
                continue  # FSDP2 puts the whole parameter there while it is gathered
            if (trainable and now is not param) or (not trainable and now is not None and now.requires_grad):
                names = [n for n, p in module.named_parameters(remove_duplicate=False) if p is now] or [key]
                how = "was thawed" if now is param else "is another tensor now (load_state_dict(assign=True)?)"
                raise RuntimeError(
                    f"parameter {names[0]!r} {how}, so nobody reduces its gradient: call parallelize again after "
                    "such a change, with optimizer= where an optimizer has state"
                )


class ParallelModule(torch.nn.Module):
    """What `parallelize` adds to a model's class, which keeps its name; pickle and deepcopy give the plain model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attached = None if torch.compiler.is_compiling() else _engines.get(self)
        if attached is None:
            return super().__call__(*args, **kwargs)
        trains = torch.is_grad_enabled()
        if trains:
            attached.check(self)
        attached.engine.forwards_running += 1
        try:
            outputs = super().__call__(*args, **kwargs)
        finally:
            attached.engine.forwards_running -= 1
        if trains and isinstance(attached.engine, BucketReducer):
            attached.engine.register_outputs(outputs)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate without reducing; the next one outside reduces everything once.

        Unlike DistributedDataParallel's, only the backward has to be inside. Nests with `sync`, restores what was set.
        """
        return _engine_of(self).synchronizing(False)

    def sync(self) -> AbstractContextManager[None]:
        """Backwards inside reduce, even inside `no_sync`. Nests, restores what was set."""
        return _engine_of(self).synchronizing(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, gradient shards included."""
        attached = _engines.get(self)
        if attached is not None:
            attached.engine.zero_grad(attached.engine.params)
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's. Under optim and optim_grads its tensors are the weights' memory, but have storages of their own:
        the version counters of the parameters do not count what is written to them."""
        found = super().state_dict(*args, **kwargs)
        attached = _engines.get(self)
        if attached is not None and isinstance(attached.engine, BucketReducer) and attached.engine.weights is not None:
            attached.engine.weights.alone(found)
        return found

    def wire_bytes(self) -> int:
        """Bytes that this rank sent for the last reduction, all messages together, and for weights: those that steps
        have gathered since (optim, optim_grads), or forward and backward since the reduction before (FSDP2)."""
        return _engine_of(self).wire_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        plain = _plain_class(type(self))
        arguments = tuple(plain if a is type(self) else a for a in reduced[1])
        # pickle insists that copyreg.__newobj__ makes an object of the pickled one's class; this makes the same one.
        if reduced[0] is copyreg.__newobj__ and len(arguments) == 1:  # type: ignore[attr-defined]
            return (copyreg._reconstructor, (plain, object, None), *reduced[2:])  # type: ignore[attr-defined]
        return (reduced[0], arguments, *reduced[2:])


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
) -> torch.nn.Module:
    """Makes the model data parallel, in place; returns the same object. Every rank of the group calls it.

    Buckets of gradients travel during backward: grad_comm_dtype on the wire, fp32 in rank order in the sum, divided by
    the number of ranks. The training loop stays as it is; `model.no_sync()` and `model.sync()` control accumulation.
    What becomes of the sum is the strategy's:

    no_shard (0): gradients lie in flat buffers of the policy's main_grads_dtype, of which `.grad` is a view. When
        `loss.backward()` returns, `.grad` is the mean over the ranks, rounded once to the dtype in which sums are
        gathered (grad_gather_dtype; the wire's, and bf16 beside an 8-bit wire), with the same bits everywhere.
    optim (1): the sum goes into this rank's parts of the same buffers, unrounded but for main_grads_dtype; torch_ext's
        optimizer steps these parts of the parameters, which become views of flat buffers, too, and `step()` gathers the
        others'. What else is in `.grad` is this rank's own.
    optim_grads (2): every backward adds its sum to a shard; `.grad` is None between backwards.
    optim_grads_params (3): torch's FSDP2, its units chosen here unless the model was `fully_shard`-ed before, with our
        reduce-scatter and our optimizer. Sums are added up in main_grads_dtype on the shard.

    model: on one device. Weights and buffers become rank 0's; later changes of buffers stay local. Optimizers made
        before are fine as long as they have no state.
    policy: of `load_policy`; besides dtypes: bucket_size, overlap_grad_reduce, check_for_nan_in_grad, step_in_backward,
        compress_below_gbps (optim_grads_params measures no wire: inf alone compresses).
    strategy: its name or number; None: the policy's data_parallel_sharding_strategy.
    process_group: None: the default group.
    find_unused_parameters: a parameter without a gradient counts as zero on that rank, and where no rank has one
        `.grad` stays as it was; else it is an error, on every rank, that names it. Some gradient comes on every rank
        (as in DistributedDataParallel): a backward that reaches no parameter is none, and the other ranks wait for it.
    gradient_divide_factor: sums are divided by it in fp32; None: the number of ranks; 1: a sum.
    transport: who moves buckets between GPUs. "torch": the process group, whose watchdog and flight recorder keep
        working. "nccl": a communicator of this library's own between the same ranks (NCCL 2.19 or newer: torch's, else
        the file that TORCH_EXT_NCCL names, else the Python package's, else the system's), with one group call per
        bucket, symmetric windows where NCCL has them, and records by which ranks that parted are told the bucket's name
        instead of waiting for each other.

    Where gradients are sharded, torch.nn.utils.clip_grad_norm_ and clip_grad_value_, which frameworks call, are sent to
    `clip_grad_norm_` and to the shards; what cannot be right there is refused by name: torch.amp.GradScaler, norms
    that somebody else took, DistributedDataParallel around the model.

    optimizer: one or several that have stepped the model already, whose states are taken along. Others with state are
        refused: their states would not be those of the weights.

    A second call replaces what the first one did: after a layer was frozen or thawed in the middle of training, say, or
    for another strategy. Gradients are dropped. With optimizer= every state is bit for bit what it was, masters, steps
    and moments, cut as parameters are now; parameters that had none begin with zeros. The policy must give states the
    dtypes that they have. A parameter that was frozen keeps its state, whole on every rank (`del optimizer.state[p]`
    drops it). One tensor of one state at a time is whole in memory. Of parameters that nobody reduced before, rank 0's
    states become everybody's, as weights do.

    Raises ValueError, TypeError or RuntimeError, on every rank, before anything is changed: for what is not legal here
    or on another rank, and where the ranks' models or policies differ.
    """
    group = _group(process_group)
    # A model on no real device is an error, which all ranks are told about.
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    exchange = make_communicator(group, device, transport if device.type == "cuda" else "torch")
    plan, failure, factor, name, details = None, None, 0.0, "", []
    carried: list[carry_states.Carried] = []
    before = _engines.get(model)
    try:
        if before is not None:
            before.engine.finish_failed_backward()
        refuse(transport, device)
        compression.refuse(policy, exchange.can_compress)
        factor = divide_factor(gradient_divide_factor, exchange.world_size)
        name = _strategy(policy.data_parallel_sharding_strategy if strategy is None else strategy)
        ranks = frozenset(dist.get_process_group_ranks(group))
        known = None if before is None else (before.strategy, before.policy)
        given, carried = carry_states.carried(optimizer, model, policy, known, name, ranks)
        _validate(model, name, given)
        _check_step_in_backward(policy, name, find_unused_parameters)
        if name == _FULLY:
            from torch_ext.parallel.fsdp import fully_shard  # loads FSDP2, for those who use it

            details = fully_shard.describe(model, policy, group)
        else:
            plan = _planned(model, policy, exchange.world_size)
            details = plan.lines()
    except (ValueError, TypeError, RuntimeError) as error:
        failure = error
    options = (
        f"strategy {name}, divide by {factor}, unused parameters {find_unused_parameters}, "
        f"NaN check {policy.check_for_nan_in_grad}, sums gathered in {policy.grad_gather_dtype}, "
        f"step in backward {policy.step_in_backward}, compressed below {policy.compress_below_gbps} Gbit/s, "
        f"transport {transport}"
    )
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    shown = [f"{name} {list(t.shape)} {t.dtype}, trainable {t.requires_grad}" for name, t in tensors]
    number = agree(
        exchange,
        caller="parallelize",
        fingerprint=0 if plan is None else plan.fingerprint,
        lines=[options, *shown, *details, *(line for one in carried for line in one.lines())],
        failure=failure,
    )
    _engines.pop(model, None)
    if before is not None:
        before.engine.close()
    engine: BucketReducer | FSDPReducer
    if plan is None:
        engine = fully_shard.shard_fully(
            model,
            policy,
            exchange,
            number,
            divide_factor=gradient_divide_factor,
            find_unused_parameters=find_unused_parameters,
        )
    else:
        broadcast([t for _, t in tensors], group, "parallelize: rank 0's weights and buffers")
        named = list(_trainable(model))
        ids = param_groups.ids_of([n for n, _ in named])
        engine = BucketReducer(
            STRATEGIES[name]([p for _, p in named], plan, exchange, ids, factor, policy.grad_gather_dtype),
            number,
            check_for_nan=policy.check_for_nan_in_grad,
            find_unused_parameters=find_unused_parameters,
            step_in_backward=policy.step_in_backward,
            coalesce=policy.bucket_size is None,
            compress_below=policy.compress_below_gbps,
            replan=partial(_replanned, named, policy, exchange.world_size),
            may_replan=lambda: name == "no_shard" or not _has_state(named),
        )
    if not isinstance(model, ParallelModule):
        model.__class__ = _parallel_class(type(model))
    _engines[model] = _Attached(engine, model, name, policy)
    for one in carried:
        one.install(group)
    _watch(sharded=name != "no_shard")
    return model


def sync_parameters(chunks: torch.nn.Module | Iterable[torch.nn.Module]) -> bool:
    """Call it on every rank after writing to the parameters of parallelized models (a load, an average, a swap).

    chunks: a model, or its chunks (pipeline stages, say); every one is visited, and those that were not parallelized
    are skipped. Under optim_grads_params whole weights that are still in memory are dropped, so that the next forward
    gathers what the shards hold now; the other strategies have nothing that could be old. Returns whether any chunk
    was synchronised.
    """
    each = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
    attached = [_engines.get(chunk) for chunk in each]
    return any([one is not None and one.engine.sync_parameters() for one in attached])  # a list: no short circuit


# -- what is legal ------------------------------------------------------------------------------------------------


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() first (under torchrun, "
            "or with world_size=1 for a process of its own)"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError("this rank is not a member of the process group, so it has nothing to reduce over it")
    refuse_group(group, "parallelize")
    return group


def _trainable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _validate(model: torch.nn.Module, strategy: str, carried: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(model, DistributedDataParallel):
        raise TypeError("the model is in DistributedDataParallel, which reduces already: use register_comm_hook on it")
    named = list(_trainable(model))
    offload_guard.refuse_gradients(list(model.parameters()), "parallelize")
    if not named:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: parallelize reduces gradients, and none would come"
        )
    _check_devices([*model.named_parameters(), *model.named_buffers()])
    for name, param in named:
        owner = reducer_registry.owner_of(param)
        attached = _engines.get(model)
        if owner is not None and (attached is None or owner is not attached.engine):
            raise RuntimeError(
                f"parameter {name!r} is part of another parallelized model, which reduces its gradient already"
            )
        if type(param) is not torch.nn.Parameter and not (strategy == _FULLY and local_shard.is_dtensor(param)):
            sharded = f"; strategy={_FULLY!r} takes what fully_shard made" if local_shard.is_dtensor(param) else ""
            raise TypeError(
                f"parameter {name!r} is a {type(param).__name__}; {strategy} takes plain parameters{sharded}"
            )
        if param.grad is not None and owner is None:
            raise RuntimeError(f"parameter {name!r} has a gradient: call zero_grad() before parallelize")
    if strategy in STRATEGIES and STRATEGIES[strategy].sharded:  # they would be torn apart, each laid out on its own
        dense.refuse_overlap([p for _, p in named], [repr(name) for name, _ in named])
    _check_optimizers(named, carried)


def _planned(model: torch.nn.Module, policy: Policy, world_size: int) -> BucketPlan:
    plan = plan_buckets(list(_trainable(model)), policy, world_size)
    if len(plan.buckets) > MAX_BUCKETS:
        raise ValueError(f"{len(plan.buckets)} buckets; at most {MAX_BUCKETS} are legal: raise bucket_size")
    return plan


def _strategy(given: str | int) -> str:
    """The strategy's name. ValueError, with the legal ones, where it has none."""
    names = next(row.choices for row in policy_struct.rows() if row.name == "data_parallel_sharding_strategy")
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        given = names[given]
    if given not in names:
        legal = ", ".join(f"{name!r} ({i})" for i, name in enumerate(names))
        raise ValueError(f"strategy is {given!r}; legal are {legal}")
    assert isinstance(given, str)
    return given


def _check_devices(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    (first, tensor), *rest = named
    for name, other in rest:
        if other.device != tensor.device:
            raise ValueError(
                f"{first!r} is on {tensor.device} and {name!r} on {other.device}; a model is on one device"
            )
    if tensor.device.type not in _DEVICES:
        raise ValueError(f"the model is on {tensor.device}; this library has operators for {', '.join(_DEVICES)}")
    if tensor.device.type == "cuda" and (why_not := cuda_library.about().why_not):
        raise RuntimeError(f"the model is on {tensor.device}, and no GPU here runs this library's operators: {why_not}")


def _check_step_in_backward(policy: Policy, strategy: str, find_unused_parameters: bool) -> None:
    """ValueError for what would have to be known before the first bucket is stepped."""
    if not policy.step_in_backward:
        return
    if strategy not in ("optim", "optim_grads"):
        raise ValueError(f"step_in_backward=True with strategy {strategy!r}; legal with 'optim' and 'optim_grads'")
    wanted = {
        "find_unused_parameters": find_unused_parameters,
        "check_for_nan_in_grad": policy.check_for_nan_in_grad,
        "clip_grad": policy.clip_grad,
        "fp16 (a loss scale)": policy.fp16,
    }
    for what, value in wanted.items():
        if value:
            raise ValueError(
                f"step_in_backward=True and {what}={value}: it is known at the end of backward only, when buckets have "
                "been stepped already; leave out one of the two"
            )


def _replanned(
    named: Sequence[tuple[str, torch.Tensor]], policy: Policy, world_size: int, order: Sequence[int]
) -> BucketPlan:
    return plan_buckets(named, policy, world_size, order=order)


def _has_state(named: Sequence[tuple[str, torch.nn.Parameter]]) -> bool:
    try:
        _check_optimizers(named, ())
    except RuntimeError:
        return True
    return False


def _check_optimizers(
    named: Sequence[tuple[str, torch.nn.Parameter]], carried: Sequence[torch.optim.Optimizer]
) -> None:
    """RuntimeError where an optimizer that somebody can still step, other than these, has state for a parameter."""
    names = {id(p): name for name, p in named}
    known = set(map(id, carried))
    for optimizer, kind, held in _optimizers_with_state(names):
        if optimizer not in known and in_use(held):
            raise RuntimeError(
                f"an optimizer ({kind}) has state for parameter {names[_param_with_state(held, names)]!r}: it would "
                "not follow rank 0's weights and where they lie from now on. Take it along "
                "(parallelize(..., optimizer=optimizer)), delete it, or call parallelize before the first step; a "
                "saved state is loaded afterwards."
            )


def _optimizers_with_state(names: Mapping[int, str]) -> "list[tuple[int, str, weakref.ref[Any]]]":
    """Their ids and kinds, held weakly, for others look at who holds them."""
    # Optimizers know parameters, not the other way round. type(): isinstance would call into lazy objects of others.
    return [
        (id(o), type(o).__name__, weakref.ref(o))
        for o in gc.get_objects()
        if issubclass(type(o), torch.optim.Optimizer) and _param_with_state(weakref.ref(o), names)
    ]


def _param_with_state(held: "weakref.ref[Any]", names: Mapping[int, str]) -> int:
    """The id of a parameter of these of which the optimizer has state; 0: of none."""
    optimizer = held()
    state = getattr(optimizer, "state", None)
    if not isinstance(state, dict):
        return 0
    for param in [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]:
        # A step counter alone, at zero, is no state yet.
        of_param = dict(access.peek(state, param))
        if id(param) in names and (of_param.pop("step", 0) or of_param):
            return id(param)
    return 0


# -- the class ----------------------------------------------------------------------------------------------------


_classes: "weakref.WeakKeyDictionary[type, type]" = weakref.WeakKeyDictionary()


def _parallel_class(plain: type) -> type:
    """One subclass per class, so that models of one class stay of one class."""
    made = _classes.get(plain)
    if made is None:
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        made = _classes[plain] = type(plain)(plain.__name__, (ParallelModule, plain), names)
    return made


def engines_in(model: torch.nn.Module) -> "list[BucketReducer | FSDPReducer]":
    """Of the model and its modules, as far as they were parallelized."""
    return [attached.engine for module in model.modules() if (attached := _engines.get(module)) is not None]


def _plain_class(parallel: type) -> type:
    return parallel.__bases__[1]


def _engine_of(model: torch.nn.Module) -> "BucketReducer | FSDPReducer":
    attached = _engines.get(model)
    if attached is None:
        raise RuntimeError(
            "this model is not parallelized (a copy made by its own class, perhaps): call parallelize on it"
        )
    return attached.engine


# -- other people.s code ------------------------------------------------------------------------------------------

_watching: Any = None


def _watch(sharded: bool) -> None:
    """Once per process, from the first parallelize on: every optimizer's step asks the engines of its parameters, and
    other people's code finds what lies elsewhere than it expects (see torch_patches)."""
    global _watching
    if _watching is None:
        _watching = register_optimizer_step_pre_hook(_before_step)
        register_module_module_registration_hook(torch_patches.refuse_ddp)
        torch_patches.settle_before_zeroing()
    if sharded:
        torch_patches.find_shards()


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """args, kwargs: of step, the optimizer first. Returns others in their place, or None."""
    owners = list(reducer_registry.owners_of(p for group in optimizer.param_groups for p in group["params"]))
    if any(owner.sharded for owner in owners) and not isinstance(optimizer, Adam):
        raise RuntimeError(
            f"{type(optimizer).__name__} would step all of every parameter by gradients of which this rank has its "
            "part only: under a sharded strategy use torch_ext.AdamW (or torch_ext.Adam), or strategy 'no_shard'"
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        for owner in owners:
            owner.before_step()
        return None
    if not owners or isinstance(optimizer, Adam):  # which asks for itself
        return None

    def checked() -> Any:
        """The backward is in there: what was accumulated until now need not be reduced yet."""
        loss = closure()
        for owner in owners:
            owner.before_step()
        return loss

    return args[:1], kwargs | {"closure": checked}
