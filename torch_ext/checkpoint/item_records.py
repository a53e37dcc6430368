"""The records (`record`) of a rank's write items of torch.distributed.checkpoint."""

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
    """Makes them, a few at a time, in the order of the items."""

    def __init__(self, planner: Any, compress: bool) -> None:
        self._planner, self._compress = planner, compress
        self._state_dict: Mapping[str, Any] = getattr(planner, "state_dict", None) or {}
        self._beside = missing_keys.weights_beside(self._state_dict)

    def of(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """The pieces of each."""
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
                # No copy. An error whose traceback holds a getbuffer() crashes Python 3.12.1's garbage collector.
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
        """Of the weight beside a master."""
        key, chunk = self._beside.get(item.index.fqn), item.tensor_data.chunk
        return None if key is None else record_header.Place(key, tuple(chunk.offsets), tuple(chunk.sizes))

    def _weight_at(self, place: record_header.Place) -> Tensor | None:
        """None where this rank does not have all of it."""
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
    """Of this kind, for a tensor that is not dense: torch.distributed.checkpoint copies into what is detached from a
    tensor, which leaves a sparse one as it was."""
    if t.layout is not torch.strided:
        raise kind(f"{key!r} is a tensor in {t.layout}; dense (strided) ones are legal: use to_dense()")
