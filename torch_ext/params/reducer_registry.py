"""Who reduces a parameter's gradient, and what an optimizer can ask them: optimizers know parameters only."""

import abc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from torch_ext.params.local_shard import LocalShard

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Work


class BucketStepper(Protocol):
    """An optimizer that can step a bucket before its step() is called."""

    def refuse_backward(self) -> None:
        """RuntimeError where a backward would bring gradients beside some that were applied already."""

    def begin_early(self, owner: "GradientReducer") -> Callable[[int], None] | None:
        """A backward begins after which the owner's gradients are whole. Returns what steps a bucket of them whose sum
        is there, on any thread; None: nothing can be stepped before step()."""

    def stepped_early(self) -> bool:
        """Whether something was stepped in backward, and step() is still to come."""


class GradientReducer(abc.ABC):
    """Reduces the gradients of a model's parameters, and lays out what each rank steps of them."""

    params: Sequence[torch.nn.Parameter]
    """All of them."""
    forwards_running = 0
    """Forwards of the model that are under way."""
    layout = 0
    """How often it has laid its parameters out anew."""

    @property
    def failed(self) -> bool:
        """Whether no exchange works any more."""
        return False

    @property
    @abc.abstractmethod
    def sharded(self) -> bool:
        """Whether each rank steps its own parts only."""

    @property
    @abc.abstractmethod
    def ranks(self) -> frozenset[int]:
        """The global ranks over which gradients are reduced."""

    @abc.abstractmethod
    def finish_failed_backward(self) -> None:
        """Waits for what a backward that raised left on its way: nothing is written to gradients afterwards."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """An optimizer is about to read the gradients: RuntimeError where it must not."""

    def refuse_gone(self, doing: str) -> None:
        """RuntimeError where what was stepped could not be brought to the other ranks any more: their process group was
        destroyed, or has failed."""
        return  # not every owner brings it

    @abc.abstractmethod
    def local(self, param: torch.Tensor) -> LocalShard:
        """What this rank steps of the parameter; RuntimeError where the parameter is no longer where it was laid."""

    @abc.abstractmethod
    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Its gradient there, of the weight's numel; None on all ranks or on none."""

    def stats(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The statistics (grad_stats_) of this rank's parts of these gradients, the caller's to write to, if they are
        known without reading them: the reduction found them, and nobody wrote to them since."""
        return None

    def part(self, param: torch.Tensor) -> torch.Tensor:
        """The memory in which `grad` finds the gradient, one there or not. Only owners that call `begin_early` are
        asked."""
        raise NotImplementedError

    def offer(self, stepper: BucketStepper) -> None:
        """The optimizer has states for these parameters: from now on it may be asked to step in backward."""
        return  # not every owner asks

    @abc.abstractmethod
    def gather(self, bucket: int) -> "Work":
        """This rank's parts of a bucket's weights were stepped (LocalShard.bucket): starts to bring the others'
        parts."""

    def sync_parameters(self) -> bool:
        """Sees to it that the next forward uses what is in the parameters; whether there was anything to see to."""
        return False

    @abc.abstractmethod
    def refuse_moving(self, doing: str, weights: bool) -> None:
        """RuntimeError where a forward, a backward, an exchange or a step is under way: no memory may go now.
        weights: theirs is about to."""

    @abc.abstractmethod
    def gradient_memory(self) -> Sequence[torch.Tensor]:
        """Everything in which gradients lie between backwards, besides tensors that are `.grad` only."""

    @abc.abstractmethod
    def gradients_released(self) -> None:
        """Their memory was released, and will be zero when it is allocated: nothing is left to reduce or repair."""

    @abc.abstractmethod
    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        """Forgets the gradients of these parameters as far as they are not `.grad`."""


# Not an attribute of the parameter, which would be pickled with it.
_owners: "dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[GradientReducer]]]" = {}

generation = 0
"""Changes whenever any parameter gets another owner, or an owner lays its parameters out anew. What an optimizer knows
of owners holds while this stays the same, and beyond it while its own parameters' owners and their layouts do."""


def _changed() -> None:
    global generation
    generation += 1


def laid_out_anew(owner: GradientReducer) -> None:
    """What optimizers know of this owner's parameters holds no longer."""
    owner.layout += 1
    _changed()


def register(owner: GradientReducer, params: Iterable[torch.Tensor]) -> None:
    """The owner reduces these parameters, until `unregister` or its end."""
    _changed()
    keys = []
    for param in params:
        _owners[id(param)] = (weakref.ref(param), weakref.ref(owner))
        keys.append(id(param))
    weakref.finalize(owner, _forget, keys, weakref.ref(owner))


def unregister(owner: GradientReducer) -> None:
    """Forgets the owner's parameters."""
    entries = list(_owners.items())  # an owner may end, and be forgotten, while they are looked at
    _forget([key for key, (_, known) in entries if known() is owner], weakref.ref(owner))


def _forget(keys: "list[int]", owner: "weakref.ref[GradientReducer]") -> None:
    _changed()
    for key in keys:
        entry = _owners.get(key)
        if entry is not None and entry[1]() in (None, owner()):
            del _owners[key]


def owner_of(param: torch.Tensor) -> GradientReducer | None:
    """Who reduces the parameter's gradient; None where nobody of ours does."""
    entry = _owners.get(id(param))
    return entry[1]() if entry is not None and entry[0]() is param else None


def owners_of(params: Iterable[torch.Tensor]) -> Iterator[GradientReducer]:
    """Each owner once."""
    seen: set[int] = set()
    for param in params:
        owner = owner_of(param)
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            yield owner
