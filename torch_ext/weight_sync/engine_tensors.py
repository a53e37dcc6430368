"""The tensors of an engine that a subscriber writes to. Checks that they are writable and that they have not moved."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.tensors import dense
from torch_ext.weight_sync.device_stage import DeviceStage
from torch_ext.weight_sync.weight_slice import Placed
from torch_ext.weight_sync.writable_memory import WritableMemory


class _Form(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, t: Tensor) -> "_Form":
        return cls(t.dtype, t.device, tuple(t.shape), t.stride(), t.data_ptr())


class EngineTensors:
    """An engine's tensors by name. `named`: tensors in host memory that share memory with the engine's host tensors or,
    for tensors on devices, are copies of them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Raises ValueError, naming the tensor, if one cannot be written to."""
        memory = WritableMemory()
        self.named: dict[str, Tensor] = {}
        for name, t in tensors.items():
            _refuse(name, t, memory)
            self.named[name] = t.detach()
        self._stage = DeviceStage({name: t for name, t in self.named.items() if not t.is_cpu})
        self.named |= self._stage.copies()
        self._given = dict(tensors)  # `p.data = ...` moves these tensors, but not the detached ones in `named`
        self._forms = {name: _Form.of(t) for name, t in self._given.items()}

    def refuse_changed(self) -> None:
        """Raises RuntimeError, naming the tensor, if one has moved: the engine would not read what is written to the
        old memory."""
        for name, t in self._given.items():
            now = _Form.of(t)
            if now != self._forms[name]:
                was = next(f for f, a, b in zip(now._fields, now, self._forms[name], strict=True) if a != b)
                raise RuntimeError(
                    f"{name!r} has another {was} than when this WeightSubscriber was made: make a new one from the "
                    "tensors as they are now, and begin with full()"
                )

    def writable(self) -> AbstractContextManager[None]:
        """Returns a context in which `named` may be read and written. At its exit without an error, tensors on devices
        get what was written to their copies."""
        return self._stage.on_host()

    def refuse_uncovered(self, parameters: Sequence[Placed]) -> None:
        """Raises ValueError if elements of a tensor belong to no parameter."""
        covered = dict.fromkeys(self.named, 0)
        for parameter in parameters:
            for name, numel in parameter.held:
                covered[name] += numel
        for name, t in self.named.items():
            if covered[name] < t.numel():
                raise ValueError(
                    f"{t.numel() - covered[name]} of {t.numel()} elements of {name!r} belong to no parameter: map a "
                    "parameter to them in mapping, or leave the tensor out of tensors"
                )

    def written(self) -> None:
        """Increments the version counters: autograd notices if a tensor was saved for a backward."""
        torch.autograd.graph.increment_version([t for t in self._given.values() if not t.is_inference()])


def _refuse(name: str, t: Any, memory: WritableMemory) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"tensors[{name!r}] is a {type(t).__name__}; tensors are legal")
    if t.layout is not torch.strided or t.is_meta:
        raise ValueError(f"tensors[{name!r}] is {t.layout} on {t.device}; dense tensors in memory are legal")
    if t.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"tensors[{name!r}] is on {t.device}; the host and CUDA devices are legal: subscribe with tensors there, "
            "and copy them to the device after apply"
        )
    if t.dtype not in dense.TRAINED:
        raise ValueError(f"tensors[{name!r}] is {t.dtype}; float32, bfloat16 and float16 are legal")
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        raise ValueError(f"tensors[{name!r}] is an expanded tensor, in which several elements share memory")
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    if t.is_cpu and not memory.has(t.data_ptr(), extent * t.element_size()):
        raise ValueError(
            f"tensors[{name!r}] is in memory that may only be read (a file mapped for reading, say): use a clone of it"
        )
