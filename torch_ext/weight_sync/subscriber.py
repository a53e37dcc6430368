"""`WeightSubscriber`, the engine's side of weight sync: updates its weights from version to version, in place."""

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
    """Keeps the weights of an inference engine equal to those of a `WeightPublisher`, bit for bit.

        subscriber = torch_ext.WeightSubscriber(dict(model.named_parameters()))
        subscriber.apply(parts)  # what publish() returned, of every rank of the trainer

    tensors: name -> tensor, on the host or CUDA devices, in bfloat16, float16 or float32. They are written in place, so
        that captured CUDA graphs stay valid. Every element must be one element of the trainer's parameters, and every
        parameter must have a place in them, unless `mapping` says otherwise. They are at version 0 if they equal the
        trainer's weights at the creation of its publisher; otherwise apply the publisher's `full()` first. Each apply
        copies tensors on devices to pinned host memory, which the subscriber keeps (as many bytes as these tensors),
        and copies back the blocks of 1024 elements that changed.
    mapping: where the trainer's parameters are in the engine's tensors, for engines with fused, sliced, transposed or
        renamed tensors: parameter name -> name in `tensors`, a `WeightSlice`, several of them, or, if this engine
        holds nothing of the parameter, a meta tensor of its shape and dtype. A parameter that is not in `mapping` is
        in the tensor of the same name. For engines that hold slices create the publisher with sliceable=True.

    Deltas are checked against accidents, but not authenticated: accept them only from senders that may write weights.
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
        weakref.finalize(self, delta_library.receiver_function("close", None), address)
        return address

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a WeightSubscriber cannot be copied or pickled: it writes to the memory of its tensors, in this process. "
            "Make another one from the other tensors, and begin with full()"
        )

    @property
    def version(self) -> int:
        """The version of the weights: that of the last applied delta."""
        return int(delta_library.receiver_function("version", ctypes.c_int64)(self._receiver))

    @torch.no_grad()
    def apply(self, delta_or_parts: Bytes | Iterable[Bytes], verify: Literal["touched", "full"] = "touched") -> None:
        """Updates the weights to the next version, or to the last one if there are deltas of several successive
        versions.

        delta_or_parts: one delta, or one part from each rank of the trainer, in any order, single or merged. Each is a
            bytes-like object or a uint8 tensor. Everything is checked before the first byte is written.
        verify: "touched" checks the weights that change. "full" reads and checks all weights, so it also finds weights
            that other code has written to.

        Raises ValueError if a part is no delta, damaged or truncated. Raises RuntimeError if a delta does not follow
        the current version (lost, repeated, reordered), if parts are missing or of different versions, if it is from
        another trainer or for another model, or if the engine's weights are not those that it was encoded against. In
        the last two cases start again with `full()`. After an error no weight has changed.
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
    """Returns the trainer's parameters, with their places in the engine's tensors, in the order of the table."""
    found = {name: placed(name, place, tensors.named) for name, place in mapping.items()}
    taken = {tensor for parameter in found.values() for tensor, _ in parameter.held}
    for name in tensors.named:
        if name not in found and name not in taken:
            found[name] = placed(name, name, tensors.named)
    parameters = sorted(found.values(), key=lambda p: delta_library.in_order(p.key))
    tensors.refuse_uncovered(parameters)
    return parameters


def merge_deltas(deltas: Iterable[Bytes]) -> bytes:
    """Merges deltas into one, so that they can be sent as one message or file. `WeightSubscriber.apply` applies all of
    it or nothing.

    deltas: parts of one version or of several successive versions, in any order, merged or not. They must belong to the
        same publisher's chain; otherwise, or if one is missing, raises ValueError or RuntimeError.

    The merged delta is as large as all deltas together.
    """
    merged = delta_library.DeltaMessage()
    with delta_library.messages(list(deltas)) as messages:
        delta_library.call("merge", len(messages), messages, merged)
    return delta_library.take_bytes(merged)
