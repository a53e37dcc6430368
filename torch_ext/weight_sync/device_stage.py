"""Host copies of an engine's tensors on devices. Deltas are decoded into the copies, and changes are copied back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_ext.native import adamw_args, constants, graph_capture
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.tensors import dense, host_copies
from torch_ext.weight_sync import delta_library

_ALIGNMENT = 64  # bytes


class _Staged:
    """One tensor on a device (`there`) and its copy on the host (`here`; `flat_here` in memory order)."""

    def __init__(self, there: Tensor, memory: Tensor) -> None:
        """memory: host memory for the copy, uint8, as many bytes as the tensor has."""
        self.dense = dense.is_dense(there)
        here = memory.view(there.dtype)
        self.there, self.flat_here = there, here
        self.here = here.as_strided(there.shape, there.stride()) if self.dense else here.view(there.shape)

    def copy_pair(self) -> tuple[Tensor, Tensor]:
        """Returns target and source of the copy to the host. Of one dimension if dense, so that it is one transfer."""
        return (self.flat_here, dense.flat(self.there).view(-1)) if self.dense else (self.here, self.there)

    def sums(self) -> Tensor:
        """Returns a checksum of each 1024 elements of the copy, in memory order."""
        found = torch.zeros(-(-self.flat_here.numel() // constants.CHECKSUM), dtype=torch.int64, device="cpu")
        none = adamw_args.argument(None)
        arguments = adamw_args.argument(self.flat_here), none, none, none, adamw_args.argument(found)
        delta_library.call("renew", 1, delta_library.DeltaRun(0, 0, *arguments), threads())
        return found

    def put_back(self, changed: Tensor) -> None:
        """Copies blocks of 1024 elements that changed back to the device. changed: for each block, whether it did."""
        if not bool(changed.any()):
            return
        if not self.dense:
            self.there.copy_(self.here)
            return
        there = dense.flat(self.there).view(-1)
        whole = there.numel() // constants.CHECKSUM
        at = changed[:whole].nonzero().view(-1)
        if at.numel():
            n = whole * constants.CHECKSUM
            rows = self.flat_here[:n].view(whole, -1)[at].to(there.device)
            there[:n].view(whole, -1)[at.to(there.device)] = rows
        if bool(changed[whole:].any()):
            there[whole * constants.CHECKSUM :].copy_(self.flat_here[whole * constants.CHECKSUM :])


class DeviceStage:
    """Host copies of several tensors on devices, in pinned memory of the same size that is kept between versions."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: tensors on devices, by name. Raises ValueError if two share memory."""
        dense.refuse_overlap(list(tensors.values()), list(tensors))
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors.values()]
        memory = torch.split(host_copies.allocate(sum(sizes), pinned=True), sizes) if sizes else ()
        self._staged = {
            name: _Staged(t, part[: t.nbytes]) for (name, t), part in zip(tensors.items(), memory, strict=True)
        }

    def copies(self) -> dict[str, Tensor]:
        """Returns the host copies by name, with the shapes of the tensors."""
        return {name: one.here for name, one in self._staged.items()}

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Copies the tensors to the host at the entry, and the changed blocks back at an exit without an error. Uses
        the current stream of each device. Raises RuntimeError while a CUDA graph is captured."""
        staged = [one for one in self._staged.values() if one.there.numel()]
        for device in {one.there.device for one in staged}:
            if graph_capture.is_capturing(device):
                raise RuntimeError("apply() while a CUDA graph is captured: it waits for the device")
        host_copies.copy_and_wait([one.copy_pair() for one in staged])
        before = [one.sums() for one in staged]
        yield
        for one, sums in zip(staged, before, strict=True):
            one.put_back(sums != one.sums())
