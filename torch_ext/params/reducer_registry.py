"""From a parameter to the reducer of its gradient, and what an optimizer asks it: optimizers know parameters only."""

import abc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from torch_ext.params.local_shard import LocalShard

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Work


class BucketStepper(Protocol):
    """An optimizer that can step a bucket before its step() is called."""

    def refuse_backward(self) -> None:
        """RuntimeError where a backward would add to gradients of which some were stepped already."""

    def begin_stepping(self, owner: "GradientReducer") -> Callable[[int], None] | None:
        """A backward begins that completes the owner's gradients. Returns what steps a bucket once it is reduced, on
        any thread; None: nothing can be stepped before step()."""

    def stepped_in_backward(self) -> bool:
        """Whether something was stepped in backward, and step() was not called since."""


class StepListener(Protocol):
    """Is told of the steps of its parameters."""

    def step_begins(self) -> None:
        """An optimizer is about to write weights: until `step_written`, a step that raises, or is interrupted, has
        parted this rank from the others, which the next backward or step says."""

    def step_written(self) -> None:
        """All of them are written, or none, as the step was refused."""


class GradientReducer(StepListener, abc.ABC):
    """Reduces the gradients of a model's parameters, and decides which part of each this rank steps."""

    params: Sequence[torch.nn.Parameter]
    """All of them."""
    forwards_running = 0
    """Of the model, nested or in several threads."""
    layout = 0
    """Counts changes of the parameters' layout."""
    steps_in_backward = False
    """Whether optimizers step buckets before their step() is called (step_in_backward of its policy)."""

    @property
    def failed(self) -> bool:
        """Whether nothing can be reduced any more."""
        return False

    @property
    @abc.abstractmethod
    def sharded(self) -> bool:
        """Whether each rank steps its own parts only."""

    @property
    @abc.abstractmethod
    def ranks(self) -> frozenset[int]:
        """The global ranks over which gradients are reduced."""

    @property
    def replicas(self) -> "torch.distributed.ProcessGroup | None":
        """The process group whose ranks all have the whole gradient of each parameter, the same; None: of other
        reducers."""
        return None

    @abc.abstractmethod
    def finish_failed_backward(self) -> None:
        """Waits for what a backward that raised has started: nothing is written to gradients afterwards."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """An optimizer is about to read the gradients: RuntimeError where it must not."""

    def finish_weights(self) -> None:
        """Waits for weights that a step which was interrupted left to come."""
        return  # not every reducer gathers weights

    def refuse_gone(self, doing: str) -> None:
        """RuntimeError where stepped weights could not be gathered any more: the process group was destroyed, or has
        failed."""
        return  # not every reducer gathers weights

    @abc.abstractmethod
    def local(self, param: torch.Tensor) -> LocalShard:
        """What this rank steps of the parameter; RuntimeError where the parameter left its buffer."""

    def runs(self, param: torch.Tensor) -> "list[tuple[int, int]]":
        """Of each rank of the group of `local(param)` the elements [begin, end) of the parameter that it steps, in
        memory order. Only of reducers that cut parameters into flat parts."""
        raise NotImplementedError

    @abc.abstractmethod
    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """The gradient of `local(param)`, of its numel; None on all ranks or on none."""

    def stats(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A copy of the statistics (grad_stats_) of this rank's parts of these gradients, where the reduction computed
        them and none was modified since; else None."""
        return None

    def part(self, param: torch.Tensor) -> torch.Tensor:
        """The memory of `grad`, whether or not there is a gradient. Only of reducers that call `begin_stepping`."""
        raise NotImplementedError

    def offer(self, stepper: BucketStepper) -> None:
        """The optimizer has states for these parameters: from now on it may be asked to step in backward."""
        return  # not every reducer asks

    @abc.abstractmethod
    def gather(self, bucket: int) -> "Work":
        """This rank's parts of a bucket's weights were stepped (LocalShard.bucket): starts their all-gather."""

    def sync_parameters(self) -> bool:
        """Makes the next forward use what is in the parameters; whether it might not have."""
        return False

    @abc.abstractmethod
    def refuse_moving(self, doing: str, weights: bool) -> None:
        """RuntimeError where a forward, a backward, a reduction or a step is under way: no memory may be offloaded now.
        weights: whether that of weights is about to be."""

    @abc.abstractmethod
    def gradient_memory(self) -> Sequence[torch.Tensor]:
        """All memory in which gradients lie between backwards, except of tensors that are only `.grad`."""

    @abc.abstractmethod
    def gradients_released(self) -> None:
        """Their memory was released, and will be zero when it is allocated: nothing is left to reduce or repair."""

    @abc.abstractmethod
    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        """Drops the gradients of these parameters, except `.grad` itself."""


Known = TypeVar("Known")


class _Registry(Generic[Known]):
    """Of each parameter the object that reduces its gradient, or that asked for it; neither is kept alive. Not an
    attribute of the parameter, which would be pickled with it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Known]]] = {}

    def add(self, known: Known, params: Iterable[torch.Tensor]) -> None:
        """Until `remove`, or its end."""
        _changed()
        keys = []
        for param in params:
            self._entries[id(param)] = (weakref.ref(param), weakref.ref(known))
            keys.append(id(param))
        weakref.finalize(known, self._forget, keys, weakref.ref(known))

    def remove(self, known: Known) -> None:
        entries = list(self._entries.items())  # one may end, and be forgotten, meanwhile
        self._forget([key for key, (_, ref) in entries if ref() is known], weakref.ref(known))

    def _forget(self, keys: list[int], known: "weakref.ref[Known]") -> None:
        _changed()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry[1]() in (None, known()):
                del self._entries[key]

    def of(self, param: torch.Tensor) -> Known | None:
        entry = self._entries.get(id(param))
        return entry[1]() if entry is not None and entry[0]() is param else None

    def of_all(self, params: Iterable[torch.Tensor]) -> Iterator[Known]:
        """Each once."""
        seen: set[int] = set()
        for param in params:
            known = self.of(param)
            if known is not None and id(known) not in seen:
                seen.add(id(known))
                yield known


generation = 0
"""Changes whenever any parameter gets another reducer, or a reducer changes its layout. What an optimizer knows of
reducers is valid while this stays the same, and beyond that while its own parameters' reducers and their layouts do."""


def _changed() -> None:
    global generation
    generation += 1


def laid_out_anew(owner: GradientReducer) -> None:
    """The reducer has changed the layout of its parameters: what optimizers know of it is outdated."""
    owner.layout += 1
    _changed()


_owners = _Registry[GradientReducer]()
register, unregister = _owners.add, _owners.remove
owner_of, owners_of = _owners.of, _owners.of_all
"""register(owner, params): the owner reduces their gradients, until unregister(owner) or its end. owner_of(param): the
reducer of its gradient, or None; owners_of(params): each once."""

_listeners = _Registry[StepListener]()
listen = _listeners.add
"""listen(listener, params): is told of their steps, until its end, as their reducers are."""


def step_listeners(params: Sequence[torch.Tensor]) -> "list[weakref.ref[StepListener]]":
    """Reducers and others, each once."""
    return [weakref.ref(known) for registry in (_owners, _listeners) for known in registry.of_all(params)]
