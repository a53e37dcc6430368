"""Flat buffers of gradients, and the rule that a parameter's `.grad` is its view of one."""

from collections.abc import Sequence

import torch

from torch_ext.comm.communicator import Communicator
from torch_ext.comm.wire import WireBuffer
from torch_ext.parallel.bucket_plan import BucketPlan
from torch_ext.tensors import dense


def widen(params: Sequence[torch.nn.Parameter], plan: BucketPlan) -> None:
    """From here on autograd makes gradients in main_grads_dtype, and adds up those of several uses of a parameter in
    it."""
    for param, planned in zip(params, plan.parameters, strict=True):
        if planned.main_grads_dtype != planned.param_dtype:
            param.grad_dtype = planned.main_grads_dtype


def restore(params: Sequence[torch.nn.Parameter], plan: BucketPlan) -> None:
    """Undoes `widen`, and drops the gradients."""
    for param, planned in zip(params, plan.parameters, strict=True):
        param.grad = None
        if planned.main_grads_dtype != planned.param_dtype:
            param.grad_dtype = param.dtype


def dense_gradient(plan: BucketPlan, i: int, grad: torch.Tensor | None) -> torch.Tensor:
    """The gradient of parameter i, which is there, to be copied. RuntimeError where it is sparse."""
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"parameter {plan.parameters[i].name!r} has a sparse gradient; buckets are dense: build the layer with "
            "sparse=False"
        )
    return grad.detach() if grad.requires_grad else grad


class GradBuffers:
    """One flat tensor in main_grads_dtype for each buffer of the plan.

    `.grad` starts as None, as after zero_grad(), and becomes the view when the first gradient arrives. From then on
    backward accumulates in place, and whoever clips or unscales `.grad` works on the buffer.
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
        self._found = False  # every view is where it was made
        self._begins: tuple[int, ...] = ()  # of the flats, when these were the views' addresses:
        self._addresses: list[int] = []
        self._bytes = [p.start * self.flats[p.buffer].element_size() for p in plan.parameters]
        widen(params, plan)

    def _view(self, i: int) -> torch.Tensor:
        """In the memory order of the parameter, so that one index is one element in both."""
        p = self.plan.parameters[i]
        return dense.view_like(self.params[i], self.flats[p.buffer], p.start)

    def _moved(self, i: int) -> bool:
        """Whether our view was given other memory, as model.to() does with every `.grad`."""
        view, planned = self._views[i], self.plan.parameters[i]
        return planned.numel > 0 and view.data_ptr() != self.flats[planned.buffer].data_ptr() + self._bytes[i]

    def is_ours(self, i: int) -> bool:
        """Whether `.grad` of parameter i is the tensor that was made here, wherever it lies."""
        return self.params[i].grad is self._views[i]

    def holds(self, i: int) -> bool:
        """Whether `.grad` of parameter i is its view."""
        return self.is_ours(i) and not self._moved(i)

    def view(self, i: int) -> torch.Tensor:
        """The gradient of parameter i in its buffer, shaped like the parameter."""
        if self._moved(i):
            self._views[i] = self._view(i)
        return self._views[i]

    def find(self) -> None:
        """Looks where the views are: until it is called again they stay there."""
        begins = tuple(flat.data_ptr() for flat in self.flats)
        if begins != self._begins:
            self._begins = begins
            where = zip(self.plan.parameters, self._bytes, strict=True)
            self._addresses = [begins[p.buffer] + at if p.numel else 0 for p, at in where]
        self._found = list(map(torch.Tensor.data_ptr, self._views)) == self._addresses

    def take_all(self, positions: Sequence[int]) -> None:
        """`take` of each, since the last `find`."""
        if not self._found:
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
        """Makes `.grad` of parameter i, whatever it is, the content of the buffer, and the view `.grad`.

        zero_grad(set_to_none=True), create_graph=True and assignments leave a `.grad` that is a tensor of its own. It
        is the whole gradient, what was in the buffer before included or dropped, so it replaces the content.
        """
        param, view = self.params[i], self.view(i)
        grad = param.grad
        if grad is view:
            return
        view.copy_(dense_gradient(self.plan, i, grad))  # which is not recorded
        param.grad = view

    def install_all(self, wanted: Sequence[bool]) -> None:
        """`install` of each that is wanted."""
        for i, (param, view, want) in enumerate(zip(self.params, self._views, wanted, strict=True)):
            if want and (not self._found or param.grad is not view):
                self.install(i)

    def install(self, i: int) -> None:
        """Makes the view `.grad` of parameter i: the buffer holds its gradient."""
        view = self.view(i)
        if self.params[i].grad is not view:
            self.params[i].grad = view

    def drop(self, i: int) -> None:
        """Zeroes what the buffer holds of a parameter that has no gradient."""
        with torch.no_grad():
            self.view(i).zero_()

    def release(self) -> None:
        """Leaves the parameters as they were before, without gradients."""
        restore(self.params, self.plan)


class TemporaryBuckets:
    """For each bucket at most one buffer that is sent and one that sums are gathered in, at a time."""

    def __init__(self, communicator: Communicator) -> None:
        """communicator: lends the memory."""
        self._communicator = communicator
        self._wires: dict[tuple[int, bool], WireBuffer] = {}

    def __len__(self) -> int:
        """How many have not been given back."""
        return len(self._wires)

    def take(self, bucket: int, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> WireBuffer:
        """The bucket's memory, uninitialised. RuntimeError where it has one of another size or dtype, still in use."""
        wire = self._wires.get((bucket, gathered))
        if wire is None:
            wire = self._wires[bucket, gathered] = self._communicator.borrow(
                numel, dtype, "gathered" if gathered else "wire"
            )
        if wire.data.numel() != numel or wire.data.dtype != dtype:
            raise RuntimeError(
                f"bucket {bucket} has {wire.data.numel()} elements of {wire.data.dtype} in use; it cannot be had as "
                f"{numel} of {dtype} before it is given back"
            )
        return wire

    def give_back(self, bucket: int, *, gathered: bool = False) -> None:
        """Frees the bucket's memory, if it has any. Any thread."""
        wire = self._wires.pop((bucket, gathered), None)
        if wire is not None:
            self._communicator.give_back(wire)
