"""One parameter with its stored state, as a step reads and writes it."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

from torch import Tensor

from torch_ext.grads import errors
from torch_ext.optim.state import weight_changes
from torch_ext.optim.state.state_dtypes import StateDtypes
from torch_ext.params.local_shard import LocalShard, is_dtensor
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.params.reducer_registry import GradientReducer


class ParamState(NamedTuple):
    """A parameter with everything that a step reads and writes."""

    param: Tensor
    local: LocalShard  # the part that this rank steps
    state: dict[str, Any]  # the complete stored state of the local part
    kinds: StateDtypes
    id: int  # seeds its rounding thresholds
    group: int
    name: str  # for messages
    host: bool = False  # whether its state is on the host, and it is stepped there
    changes: Mapping[str, Tensor] = MappingProxyType({})  # see `weight_changes`; empty without a weight publisher
    health: Tensor | None = None  # where the next step adds its measurements, if it measures

    @property
    def weight(self) -> Tensor:
        """This rank's elements of the parameter."""
        return self.local.weight

    @property
    def weight_on_state_device(self) -> Tensor:
        """The weight on the device of its state."""
        return self.weight.detach().cpu() if self.host else self.weight.detach()

    @property
    def memory_owner(self) -> Tensor:
        """The tensor whose address changes when the weight gets other memory."""
        return self.weight if is_dtensor(self.param) else self.param

    @property
    def version(self) -> int:
        """The version counter: changes when the parameter is written to."""
        # An operation on a DTensor increments the DTensor's counter, one on its local tensor the local tensor's.
        return self.param._version + (self.weight._version if is_dtensor(self.param) else 0)

    @property
    def master(self) -> Tensor:
        """The stored master; only for a parameter that has one."""
        assert self.kinds.master is not None
        return self.state[self.kinds.master]

    def stored(self) -> list[Tensor | None]:
        """Returns the state tensors in the order of a row of `slices` of adamw_flat_; None where there is no such
        tensor."""
        keys = ("exp_avg", "exp_avg_sq", self.kinds.master, "scales", "step", "checksum")
        found = [self.state.get(key) if key else None for key in keys]
        *changes, average, low, health = self.step_outputs()
        return [*found, *changes, average, health, low]

    def step_outputs(self) -> list[Tensor | None]:
        """Returns the further outputs of a step, each None unless it is wanted: changed, moved, distance, ema, ema_low,
        health."""
        changes = [self.changes.get(key) for key in weight_changes.KEYS]
        average = self.state.get("ema_param", self.state.get("ema_upper"))
        return [*changes, average, self.state.get("ema_lower"), self.health]


# The bucket whose weights are all-gathered after a step; None: the weights are not sharded.
AllGatherTarget: TypeAlias = Union["tuple[GradientReducer, int]", None]


def gather_of(member: ParamState, owner: "GradientReducer | None") -> AllGatherTarget:
    bucket = member.local.gather_bucket
    return None if owner is None or bucket is None else (owner, bucket)


def gathers_in_order(gathers: Sequence[AllGatherTarget]) -> list[AllGatherTarget]:
    """Returns each target once, None first, then in the order of the parameters, which is the same on every rank."""
    return sorted(dict.fromkeys(gathers), key=lambda gather: gather is not None)


def refuse_grad(member: ParamState, grad: Tensor) -> None:
    """Raises RuntimeError for a gradient that is not legal: sparse, or of another dtype or shape."""
    errors.refuse_sparse(grad, f"the gradient of {member.name}")
    if grad.dtype not in dense.TRAINED:
        raise RuntimeError(f"the gradient of {member.name} is in {grad.dtype}; float32, bfloat16 and float16 are legal")
    if grad.shape != member.weight.shape:
        raise RuntimeError(
            f"the gradient of {member.name} has shape {tuple(grad.shape)} and the parameter has "
            f"{tuple(member.weight.shape)}; they must be equal"
        )


_LISTS = "params|grads|exp_avgs|exp_avg_sqs|masters|scales|steps|meta|checksums|emas|ema_lows|healths"


def named(message: str, names: Sequence[str]) -> str:
    """Returns a message of the library about a call with these parameters, and adds the parameter's name where it has
    an index only."""
    found = re.search(rf"\b({_LISTS})\[(\d+)\]", message)
    if found is None or int(found[2]) >= len(names):
        return message
    return f"{message} (index {found[2]} is {names[int(found[2])]})"
