"""Maps each parameter to the reducer of its gradient, and defines the reducer's interface for optimizers. An optimizer
is given parameters only, and finds reducers here."""

import abc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from torch_ext.params.local_shard import LocalShard

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Work


class BucketStepper(Protocol):
    """An optimizer that can update a bucket's parameters during backward, before its step() is called."""

    def refuse_backward(self) -> None:
        """Raises RuntimeError if a backward would add to gradients with which weights were already updated."""

    def begin_stepping(self, owner: "GradientReducer") -> Callable[[int], None] | None:
        """Called when a backward begins that completes the owner's gradients. Returns a function that updates a reduced
        bucket, callable on any thread; None: no bucket can be updated before step()."""

    def stepped_in_backward(self) -> bool:
        """Whether a bucket was updated in backward and step() was not called since."""


class StepListener(Protocol):
    """An object that is notified when an optimizer updates its parameters."""

    def step_begins(self) -> None:
        """Called when an optimizer is about to write weights. If the step raises or is interrupted before
        `step_written`, this rank's weights differ from the other ranks'; the next backward or step then raises."""

    def step_written(self) -> None:
        """Called when all weights are written, or none because the step was rejected."""

    def step_called(self) -> None:
        """Called when any optimizer's step() begins, after `before_step`, or when a loss scale skips it. The next
        backward belongs to another step."""


class GradientReducer(StepListener, abc.ABC):
    """Reduces the gradients of a model's parameters, and decides which part of each parameter this rank updates."""

    params: Sequence[torch.nn.Parameter]
    """All parameters of which this reduces the gradient."""
    forwards_running = 0
    """How many forwards of the model are running, nested or in several threads."""
    layout = 0
    """Counts changes of the parameters' layout."""
    steps_in_backward = False
    """Whether optimizers update buckets during backward (`step_in_backward` of the reducer's policy)."""

    @property
    def failed(self) -> bool:
        """Whether the reducer has failed and cannot reduce any more."""
        return False

    @property
    @abc.abstractmethod
    def sharded(self) -> bool:
        """Whether each rank updates only its own shards."""

    @property
    @abc.abstractmethod
    def ranks(self) -> frozenset[int]:
        """The global ranks over which gradients are reduced."""

    @property
    def replicas(self) -> "torch.distributed.ProcessGroup | None":
        """The process group whose ranks all hold the same whole gradient of each parameter; None for other reducers."""
        return None

    @abc.abstractmethod
    def finish_failed_backward(self) -> None:
        """Waits for communication that a failed backward has started, so that nothing writes to gradients later."""

    @abc.abstractmethod
    def before_step(self, call: str) -> None:
        """Called before the gradients are stepped, clipped or unscaled. Raises RuntimeError if they must not be. call:
        the user's call, with which the message begins: "step()" for instance."""

    def wait_for_weight_gathers(self) -> None:
        """Waits for all-gathers of weights that an interrupted step left running."""
        return  # not every reducer gathers weights

    def check_process_group(self, doing: str) -> None:
        """Raises RuntimeError if updated weights could not be all-gathered any more, because the process group was
        destroyed or has failed."""
        return  # not every reducer gathers weights

    @abc.abstractmethod
    def local(self, param: torch.Tensor) -> LocalShard:
        """Returns this rank's shard of the parameter. Raises RuntimeError if the parameter is no longer a view of its
        buffer."""

    def runs(self, param: torch.Tensor) -> "list[tuple[int, int]]":
        """Returns, for each rank of the group of `local(param)`, the elements [begin, end) of the parameter that the
        rank updates, in memory order. Only for reducers that split parameters into flat parts."""
        raise NotImplementedError

    @abc.abstractmethod
    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of `local(param)`, of the same numel. It is None on all ranks or on none."""

    def stats(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns a copy of the statistics (grad_stats_) of this rank's parts of these gradients. None if the reduction
        did not compute them, or a gradient was modified since."""
        return None

    def part(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the memory of `grad`, even if there is no gradient. Only for reducers that call `begin_stepping`."""
        raise NotImplementedError

    def register_stepper(self, stepper: BucketStepper) -> None:
        """Called when the optimizer has states for these parameters: the reducer may ask it to step in backward."""
        return  # not every reducer asks

    @abc.abstractmethod
    def gather(self, bucket: int) -> "Work":
        """Starts the all-gather of a bucket's weights (LocalShard.gather_bucket). Called after this rank has updated
        its shards."""

    def sync_parameters(self) -> bool:
        """Makes the next forward use the parameters' present values. Returns whether it could have used older ones."""
        return False

    @abc.abstractmethod
    def refuse_moving(self, doing: str, weights: bool) -> None:
        """Raises RuntimeError if memory must not be offloaded now, because a forward, a backward, a reduction or a step
        is running. weights: whether memory of weights is to be offloaded."""

    @abc.abstractmethod
    def gradient_memory(self) -> Sequence[torch.Tensor]:
        """Returns all memory that holds gradients between backwards, except tensors that are only in `.grad`."""

    @abc.abstractmethod
    def gradients_released(self) -> None:
        """Called when the gradients' memory was released. It will be zero when it is allocated again, so there is
        nothing left to reduce or repair."""

    @abc.abstractmethod
    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        """Drops the gradients of these parameters, except `.grad` itself."""


Known = TypeVar("Known")


class _Registry(Generic[Known]):
    """Maps a parameter to the object registered for it. Both are held weakly. Not an attribute of the parameter, since
    that would be pickled with it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Known]]] = {}

    def add(self, known: Known, params: Iterable[torch.Tensor]) -> None:
        """Registers `known` for these parameters, until `remove` or the end of its life."""
        _changed()
        keys = []
        for param in params:
            self._entries[id(param)] = (weakref.ref(param), weakref.ref(known))
            keys.append(id(param))
        weakref.finalize(known, self._forget, keys, weakref.ref(known))

    def remove(self, known: Known) -> None:
        entries = list(self._entries.items())  # a copy: the garbage collector may remove entries during the loop
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
        """Yields the objects registered for these parameters, each once."""
        seen: set[int] = set()
        for param in params:
            known = self.of(param)
            if known is not None and id(known) not in seen:
                seen.add(id(known))
                yield known


generation = 0
"""Incremented whenever any parameter gets another reducer, or any reducer changes its layout. While it is unchanged, an
optimizer's cached view of reducers is valid. After a change, the optimizer compares its own reducers and layouts."""


def _changed() -> None:
    global generation
    generation += 1


def layout_changed(owner: GradientReducer) -> None:
    """Called by a reducer that has changed the layout of its parameters: makes optimizers' caches out of date."""
    owner.layout += 1
    _changed()


_owners = _Registry[GradientReducer]()
register, unregister = _owners.add, _owners.remove
owner_of, owners_of = _owners.of, _owners.of_all
"""register(owner, params): the owner reduces these parameters' gradients, until unregister(owner) or the end of its
life. owner_of(param): the reducer of the parameter's gradient, or None. owners_of(params): all reducers, each once."""

_listeners = _Registry[StepListener]()
register_listener = _listeners.add
"""register_listener(listener, params): the listener is notified of steps of these parameters, as their reducers are, as
long as it lives."""


def step_listeners(params: Sequence[torch.Tensor]) -> "list[weakref.ref[StepListener]]":
    """Returns the reducers of these parameters and all other listeners, each once."""
    return [weakref.ref(known) for registry in (_owners, _listeners) for known in registry.of_all(params)]
