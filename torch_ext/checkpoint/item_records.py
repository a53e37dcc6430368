"""Encodes a rank's write items of torch.distributed.checkpoint as records (`record`)."""

import io
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torch_ext.checkpoint import record, record_header
from torch_ext.optim.state import missing_keys
from torch_ext.params import local_shard


class ItemRecords:
    """Encodes write items in a thread pool and yields them in order, with only a few of them in memory at a time."""

    def __init__(self, planner: Any, compress: bool) -> None:
        self._planner, self._compress = planner, compress
        self._state_dict: Mapping[str, Any] = getattr(planner, "state_dict", None) or {}
        # key of a master -> key of its weight
        self._weight_keys = missing_keys.weight_keys_of_masters(self._state_dict)

    def of(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """Yields each item's pieces: buffers to be written one after another."""
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            begun: list[Future[list[Any]]] = []
            try:
                for item in items:
                    begun.append(pool.submit(self._pieces, item))
                    if len(begun) > 2 * threads:
                        yield begun.pop(0).result()
                while begun:
                    yield begun.pop(0).result()
            finally:
                for future in begun:
                    future.cancel()

    def _pieces(self, item: Any) -> list[Any]:
        with torch.no_grad():
            data = self._planner.resolve_data(item)
            if item.tensor_data is None:
                # Not getbuffer(): an error whose traceback holds one crashes Python 3.12.1's garbage collector.
                return [data.getvalue()]
            refuse_layout(data, item.index.fqn, TypeError)
            if data.is_quantized:
                stream = io.BytesIO()
                torch.save(data.detach().cpu(), stream)
                return [stream.getvalue()]
            place = self._place(item) if data.dtype == torch.float32 else None
            weight = None if place is None else self._weight_at(place)
            return record.pack(data.detach(), self._compress, weight, place)

    def _place(self, item: Any) -> record_header.Place | None:
        """Returns the place of the weight that belongs to a master; None if the item is no master."""
        key, chunk = self._weight_keys.get(item.index.fqn), item.tensor_data.chunk
        return None if key is None else record_header.Place(key, tuple(chunk.offsets), tuple(chunk.sizes))

    def _weight_at(self, place: record_header.Place) -> Tensor | None:
        """Returns the weight at this place, on the host; None if this rank does not have all of it."""
        weight = self._state_dict[place.key].detach()
        origin = local_shard.origin(weight) if local_shard.is_dtensor(weight) else (0,) * weight.ndim
        weight = local_shard.tensor_of(weight)
        for dim, (offset, size) in enumerate(zip(place.offsets, place.sizes, strict=True)):
            begin = offset - origin[dim]
            if begin < 0 or begin + size > weight.shape[dim]:
                return None
            weight = weight.narrow(dim, begin, size)
        return weight.cpu()


def refuse_layout(t: Tensor, key: str, kind: type[Exception]) -> None:
    """Raises an error of class `kind` if the tensor is not strided. torch.distributed.checkpoint loads by copying into
    a detached tensor, which would leave a sparse tensor unchanged."""
    if t.layout is not torch.strided:
        raise kind(f"{key!r} is a tensor in {t.layout}; dense (strided) ones are legal: use to_dense()")
