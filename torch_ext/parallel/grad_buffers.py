"""Flat gradient buffers, and the code that keeps each parameter's `.grad` a view of its buffer."""

from collections.abc import Sequence

import torch

from torch_ext.comm.communicator import Communicator
from torch_ext.comm.wire import WireBuffer
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.tensors import dense


def widen(params: Sequence[torch.nn.Parameter], plan: BucketPlan) -> None:
    """Makes autograd produce gradients in main_grads_dtype, and accumulate in it when a parameter is used several
    times."""
    for param, planned in zip(params, plan.parameters, strict=True):
        if planned.main_grads_dtype != planned.param_dtype:
            param.grad_dtype = planned.main_grads_dtype


def restore(params: Sequence[torch.nn.Parameter], plan: BucketPlan) -> None:
    """Undoes `widen` and drops the gradients."""
    for param, planned in zip(params, plan.parameters, strict=True):
        param.grad = None
        if planned.main_grads_dtype != planned.param_dtype:
            param.grad_dtype = param.dtype


def dense_gradient(plan: BucketPlan, i: int, grad: torch.Tensor | None) -> torch.Tensor:
    """Returns `grad`, the gradient of parameter i (not None), detached. Raises RuntimeError if it is sparse."""
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"parameter {plan.parameters[i].name!r} has a sparse gradient; buckets are dense: build the layer with "
            "sparse=False"
        )
    return grad.detach() if grad.requires_grad else grad


class GradBuffers:
    """The flat gradient buffers: one tensor in main_grads_dtype for each buffer of the plan.

    `.grad` starts as None, as after zero_grad(). When the first gradient arrives it becomes a view of the buffer. From
    then on backward accumulates in place, and code that clips or unscales `.grad` changes the buffer.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], plan: BucketPlan) -> None:
        self.params = params
        self.plan = plan
        device = params[0].device
        self.flats = [
            torch.zeros(buckets[-1].start + buckets[-1].numel, dtype=buckets[-1].main_grads_dtype, device=device)
            for buckets in plan.buffers
        ]
        self.buckets = [self.flats[b.buffer][b.start : b.start + b.numel] for b in plan.buckets]
        self._views = [self._view(i) for i in range(len(params))]
        self._views_in_place = False  # whether every view was in its buffer at the last `find`
        self._buffer_addresses: tuple[int, ...] = ()  # of `flats`, when _view_addresses were computed
        self._view_addresses: list[int] = []
        self._bytes = [p.start * self.flats[p.buffer].element_size() for p in plan.parameters]
        widen(params, plan)

    def _view(self, i: int) -> torch.Tensor:
        """Returns a view of the buffer for parameter i, in the parameter's memory order: equal indices in memory are
        the same element."""
        p = self.plan.parameters[i]
        return dense.view_like(self.params[i], self.flats[p.buffer], p.start)

    def _moved(self, i: int) -> bool:
        """Whether view i no longer is in its buffer: model.to() replaces the memory of every `.grad`."""
        view, planned = self._views[i], self.plan.parameters[i]
        return planned.numel > 0 and view.data_ptr() != self.flats[planned.buffer].data_ptr() + self._bytes[i]

    def is_ours(self, i: int) -> bool:
        """Whether `.grad` of parameter i is the view object created here, even if it has other memory by now."""
        return self.params[i].grad is self._views[i]

    def holds(self, i: int) -> bool:
        """Whether `.grad` of parameter i is its view, in the buffer's memory."""
        return self.is_ours(i) and not self._moved(i)

    def view(self, i: int) -> torch.Tensor:
        """Returns the gradient of parameter i in its buffer, shaped like the parameter."""
        if self._moved(i):
            self._views[i] = self._view(i)
        return self._views[i]

    def find(self) -> None:
        """Checks whether all views are in their buffers; `take_all`, `install_all` rely on it until the next call."""
        begins = tuple(flat.data_ptr() for flat in self.flats)
        if begins != self._buffer_addresses:
            self._buffer_addresses = begins
            where = zip(self.plan.parameters, self._bytes, strict=True)
            self._view_addresses = [begins[p.buffer] + at if p.numel else 0 for p, at in where]
        self._views_in_place = list(map(torch.Tensor.data_ptr, self._views)) == self._view_addresses

    def take_all(self, positions: Sequence[int]) -> None:
        """Calls `take` for each, in one copy where the last `find` allows it."""
        if not self._views_in_place:
            for i in positions:
                self.take(i)
            return
        views, taken = [], []
        for i in positions:
            grad, view = self.params[i].grad, self._views[i]
            if grad is not view:
                taken.append(dense_gradient(self.plan, i, grad))
                views.append(view)
        if not taken:
            return
        with torch.no_grad():
            torch._foreach_copy_(views, taken)
        for i in positions:
            self.params[i].grad = self._views[i]

    def take(self, i: int) -> None:
        """Copies `.grad` of parameter i into the buffer, unless it is the view already, and makes the view `.grad`.

        After zero_grad(set_to_none=True), create_graph=True or an assignment, `.grad` is a tensor of its own. It is the
        whole gradient: what the buffer held was either added to it or dropped. So it replaces the buffer's content.
        """
        param, view = self.params[i], self.view(i)
        grad = param.grad
        if grad is view:
            return
        view.copy_(dense_gradient(self.plan, i, grad))  # neither requires grad: autograd records nothing
        param.grad = view

    def install_all(self, wanted: Sequence[bool]) -> None:
        """Calls `install` for each parameter that is wanted."""
        for i, (param, view, want) in enumerate(zip(self.params, self._views, wanted, strict=True)):
            if want and (not self._views_in_place or param.grad is not view):
                self.install(i)

    def install(self, i: int) -> None:
        """Makes the view, which holds the gradient of parameter i, its `.grad`."""
        view = self.view(i)
        if self.params[i].grad is not view:
            self.params[i].grad = view

    def drop(self, i: int) -> None:
        """Zeroes the view of parameter i, which has no gradient."""
        with torch.no_grad():
            self.view(i).zero_()

    def release(self) -> None:
        """Restores the parameters to plain ones without gradients."""
        restore(self.params, self.plan)


class TemporaryBuckets:
    """Temporary memory of buckets: at most one buffer to send and one to gather sums into, per bucket at a time."""

    def __init__(self, communicator: Communicator) -> None:
        """communicator: provides the memory."""
        self._communicator = communicator
        self._wires: dict[tuple[int, bool], WireBuffer] = {}

    def __len__(self) -> int:
        """Returns how many buffers are in use."""
        return len(self._wires)

    def take(self, bucket: int, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> WireBuffer:
        """Returns the bucket's buffer, uninitialised if it is new. Raises RuntimeError if the bucket still uses one of
        another size or dtype."""
        wire = self._wires.get((bucket, gathered))
        if wire is None:
            wire = self._wires[bucket, gathered] = self._communicator.borrow(
                numel, dtype, "gathered" if gathered else "wire"
            )
        if wire.data.numel() != numel or wire.data.dtype != dtype:
            raise RuntimeError(
                f"bucket {bucket} has {wire.data.numel()} elements of {wire.data.dtype} in use; it cannot be used as "
                f"{numel} of {dtype} before that buffer is given back"
            )
        return wire

    def give_back(self, bucket: int, *, gathered: bool = False) -> None:
        """Frees the bucket's buffer, if it has one. May be called on any thread."""
        wire = self._wires.pop((bucket, gathered), None)
        if wire is not None:
            self._communicator.give_back(wire)
