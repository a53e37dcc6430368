"""An engine's side: brings its weights from version to version, in place."""

import ctypes
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.delta_library import Bytes
from torch_ext.weight_sync.engine_tensors import EngineTensors
from torch_ext.weight_sync.weight_slice import Place, Placed, placed

_VERIFY = {"touched": 0, "full": 1}


class WeightSubscriber:
    """Weights of an engine that follow those of a `WeightPublisher`, bit for bit.

        subscriber = torch_ext.WeightSubscriber(dict(model.named_parameters()))
        subscriber.apply(parts)  # what publish() returned, of every rank of the trainer

    tensors: name -> tensor: on the host or CUDA devices, in bfloat16, float16 or float32, each of which stays in its
        memory (a captured graph stays valid). Their elements must be the trainer's parameters, all of them, each once.
        Equal to the trainer's weights when its publisher was made, they are at version 0; else begin with the
        publisher's `full()`. Those on devices are brought to pinned host memory by each apply, which the subscriber
        keeps (as much as they have); blocks of 1024 that changed go back.
    mapping: where a parameter of the trainer lies, for engines that have them fused, sliced, transposed or under other
        names: parameter -> name in tensors, `WeightSlice`, several of these, or a meta tensor of its shape and dtype
        for a parameter of which this engine holds nothing. A parameter that is not in it has a tensor of its own name.
        A publisher whose engines hold slices is made with sliceable=True.

    Deltas are checked against accidents. They are not authenticated: take them from who may write your weights.
    """

    def __init__(self, tensors: Mapping[str, Tensor], mapping: Mapping[str, Place] | None = None) -> None:
        self._tensors = EngineTensors(tensors)
        self._params = _params(self._tensors, mapping or {})
        self._receiver = self._open()

    def _open(self) -> int:
        table = delta_library.table([(p.key, p.numel, p.dtype) for p in self._params])
        rows = [(i, piece) for i, p in enumerate(self._params) for piece in p.pieces]
        pieces = delta_library.pieces(rows)
        receiver = ctypes.c_void_p()
        delta_library.call("open", len(table), table, len(pieces), pieces, ctypes.addressof(receiver))
        address = receiver.value or 0
        weakref.finalize(self, delta_library.brief("close", None), address)
        return address

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a WeightSubscriber cannot be copied or pickled: it writes to the memory of its tensors, in this process. "
            "Make another one from the other tensors, and begin with full()"
        )

    @property
    def version(self) -> int:
        """Of the weights: that of the last delta that was applied."""
        return int(delta_library.brief("version", ctypes.c_int64)(self._receiver))

    @torch.no_grad()
    def apply(self, delta_or_parts: Bytes | Iterable[Bytes], verify: Literal["touched", "full"] = "touched") -> None:
        """Makes the weights those of the next version, or of the last of several that follow each other.

        delta_or_parts: bytes-like objects, or tensors of uint8: one delta, or one part of each rank of the trainer, in
            any order, single or merged. Everything is checked before the first byte is written.
        verify: "touched": the weights that changed are checked; "full": all of them are, which reads them all and finds
            also what somebody else wrote to them.

        ValueError for what is no delta, is damaged or cut off. RuntimeError for one that does not follow the version
        that the weights are at (lost, repeated, reordered), for parts that are missing or of different versions, for
        one from another trainer or of another model, and for weights that are not those that it was made for: the last
        two begin anew with `full()`. Nothing has changed then.
        """
        if verify not in _VERIFY:
            raise ValueError(f"verify is {verify!r}; {' and '.join(map(repr, _VERIFY))} are legal")
        parts = (
            [delta_or_parts] if isinstance(delta_or_parts, bytes | bytearray | memoryview | Tensor) else delta_or_parts
        )
        self._tensors.refuse_changed()
        with delta_library.messages(list(parts)) as messages, self._tensors.writable():
            delta_library.call("apply", self._receiver, len(messages), messages, _VERIFY[verify], threads())
        self._tensors.written()


def _params(tensors: EngineTensors, mapping: Mapping[str, Place]) -> list[Placed]:
    """The trainer's parameters in the order of their table."""
    found = {name: placed(name, place, tensors.named) for name, place in mapping.items()}
    taken = {tensor for parameter in found.values() for tensor, _ in parameter.held}
    for name in tensors.named:
        if name not in found and name not in taken:
            found[name] = placed(name, name, tensors.named)
    parameters = sorted(found.values(), key=lambda p: delta_library.in_order(p.key))
    tensors.refuse_uncovered(parameters)
    return parameters


def merge_deltas(deltas: Iterable[Bytes]) -> bytes:
    """Deltas as one, which `WeightSubscriber.apply` takes as a whole or not at all.

    deltas: parts of one version, or of several that follow each other, in any order; merged ones, too. They must be of
        one publisher's chain. ValueError or RuntimeError says what is missing or foreign.

    Its bytes are as many as those of all deltas together: for one file, or one message, in the place of many.
    """
    merged = delta_library.DeltaMessage()
    with delta_library.messages(list(deltas)) as messages:
        delta_library.call("merge", len(messages), messages, merged)
    return delta_library.taken(merged)
