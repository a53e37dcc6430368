"""Reads folders of torch.distributed.checkpoint: checks everything before it writes to the first tensor, and executes
no code in the files."""

import dataclasses
import io
import os
import resource
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from torch_ext.checkpoint import folder_items, folder_metadata
from torch_ext.checkpoint.item_records import refuse_layout
from torch_ext.checkpoint.item_tensors import ItemTensors
from torch_ext.native import warning
from torch_ext.optim.state import missing_keys

_TRIES = 20  # times that `.metadata` is read again because another save has removed the files it names


class CheckpointReader(FileSystemReader):
    """`storage_reader=` of torch.distributed.checkpoint.load. Before it writes to the first tensor, it checks all data
    that this rank will read. Raises ValueError, with the file and a key, if something is missing, truncated, damaged,
    of another save, or replaced during the load. It also reads folders of torch's own writer and of earlier versions of
    torch_ext, and warns if there are no checksums.

    It can load checkpoints of torch.optim.AdamW, of an optimizer without master weights, or of one without parameter
    names into an optimizer of torch_ext. Masters become the checkpoint's weights in fp32. Options that the checkpoint
    lacks stay unchanged.

    path: the folder.
    weights_only: reads objects other than tensors as torch.load(weights_only=True) does, and raises ValueError for
        other classes (see torch.serialization.add_safe_globals). False reads everything as torch.distributed.checkpoint
        does, which executes code in the files.
    check: compares checksums. False skips that, which saves one read of all data.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True, check: bool = True) -> None:
        super().__init__(path)
        self.weights_only, self.check = weights_only, check
        self._streams: dict[str, IO[bytes]] = {}
        self._close()

    def _close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        self._checked: dict[Any, bytes | None] = {}  # index of a checked item -> its bytes, None if it is a tensor
        self._metadata_crc = 0  # checksum of `.metadata`: ranks compare it, as another save may have replaced the file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._close()
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        whole = self._get_metadata_path()
        file = Path(whole if kwargs.get("rank") is None else self._get_metadata_path(kwargs["rank"]))
        if file != whole and Path(whole).exists():
            raise ValueError(f"{whole} exists, so {file.name} belongs to another checkpoint and is not read")
        raw = file.read_bytes()
        for _ in range(_TRIES):
            try:
                metadata = folder_metadata.parse(raw, weights_only=self.weights_only)
            except ValueError as error:
                if torch.torch_version.TorchVersion(torch.__version__) < "2.13":  # raises "metadata is None" for it
                    warning.warn(f"{file} {error}")
                raise ValueError(f"{file} {error}") from error
            before, raw = raw, file.read_bytes()
            if raw == before or all((file.parent / name).exists() for name in _files_of(metadata)):
                break  # else another save removed files after `.metadata` was read: use the new `.metadata`
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._metadata_crc = zlib.crc32(before)
        return metadata

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        missing_keys.patch_planner()
        missing_keys.allow_missing(metadata)
        self._tensors = ItemTensors(metadata, self._item_stream)
        save_id = getattr(metadata.storage_meta, "save_id", None)
        for name, items in _files_of(metadata).items():
            folder_items.refuse_file(Path(self.path) / name, items, save_id)
        if is_coordinator and not all(
            hasattr(info, folder_metadata.CHECKSUM) for info in metadata.storage_data.values()
        ):
            warning.warn(
                f"{self.path} has no checksums: torch or an earlier torch_ext saved it. Only the checksums that "
                "torch.save writes for tensors are compared; other damage goes unnoticed. CheckpointWriter writes "
                "checksums of everything"
            )

    def prepare_local_plan(self, plan: Any) -> Any:
        self._check_items(plan.items)
        return dataclasses.replace(plan, storage_data=self._metadata_crc)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        others = [rank for rank, plan in enumerate(plans) if plan.storage_data != self._metadata_crc]
        if others:
            who = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
            raise ValueError(
                f"{self.path} was saved to while it was loaded: {who} read another "
                ".metadata than the coordinator. Load it again when the save is done"
            )
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            for item in plan.items:
                if item.type != LoadItemType.BYTE_IO:
                    refuse_layout(planner.resolve_tensor(item), item.storage_index.fqn, ValueError)
            self._check_items(plan.items)  # the planner may have added items after prepare_local_plan
            for item in plan.items:
                self._read(item, planner)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _check_items(self, items: list[Any]) -> None:
        """Checks the items that have not been checked yet. Reads those that are no tensors."""
        for item in items:
            index = item.storage_index
            if index in self._checked:
                continue
            is_bytes = item.type == LoadItemType.BYTE_IO
            self._checked[index] = self._check_item(index, is_bytes)
            for weight in [] if is_bytes else self._tensors.weights_of(index):
                if weight not in self._checked:
                    self._checked[weight] = self._check_item(weight, False)

    def _check_item(self, index: Any, is_bytes: bool) -> bytes | None:
        """Checks one item. Returns its bytes if it is no tensor, else None. Raises ValueError if it is damaged."""
        if index not in self.storage_data:
            raise ValueError(
                f"{self.path}: .metadata does not say where the part of {index.fqn!r} from {index.offset} on is stored"
            )
        info = self.storage_data[index]
        file, stream = self._stream(info.relative_path)
        if self.check:
            folder_items.refuse_item(stream, file, index.fqn, info)
        if not is_bytes:
            return None
        found: bytes = self._slice(index, stream).read(-1)
        return folder_items.without_code(found, file, index.fqn) if self.weights_only else found

    def _read(self, item: Any, planner: Any) -> None:
        index = item.storage_index
        found = self._checked[index]
        if found is not None:
            planner.load_bytes(item, io.BytesIO(found))
            return
        target = planner.resolve_tensor(item).detach()
        if self._tensors.assign_blocks(index, target):
            planner.commit_tensor(item, target)
            return
        tensor = narrow_tensor_by_index(self._tensors.read(index), item.storage_offsets, item.lengths)
        if target.size() != tensor.size():
            file = Path(self.path) / self.storage_data[index].relative_path
            raise ValueError(f"{file}: {index.fqn!r} is {tuple(tensor.size())}, and not {tuple(target.size())}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _item_stream(self, index: Any) -> tuple[Path, IO[bytes]]:
        file, stream = self._stream(self.storage_data[index].relative_path)
        return file, self._slice(index, stream)

    def _slice(self, index: Any, stream: IO[bytes]) -> Any:
        """Returns a stream of the item's bytes alone, with torch's transforms (compression) undone."""
        info = self.storage_data[index]
        view: Any = io.BufferedReader(folder_items.FileSlice(stream, info.offset, info.length))
        if not info.transform_descriptors:
            return view
        read_item: Any = None  # torch does not use it
        transformed = self.transforms.transform_load_stream(read_item, info.transform_descriptors, view)
        return transformed if transformed.seekable() else io.BytesIO(transformed.read(-1))

    def _stream(self, name: str) -> tuple[Path, IO[bytes]]:
        """Returns a data file's path and stream. Files stay open, since another save may remove them. If a quarter of
        the process's limit is open, the oldest is closed."""
        file = Path(self.path) / name
        if name not in self._streams:
            if self._streams and len(self._streams) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
                self._streams.pop(next(iter(self._streams))).close()
            try:
                self._streams[name] = open(file, "rb")
            except FileNotFoundError as error:
                raise ValueError(f"{file} is missing: another save replaced this checkpoint. Load it again") from error
        return file, self._streams[name]


def _files_of(metadata: Any) -> dict[str, list[tuple[int, str]]]:
    """Returns, for each data file, the end offset and the key of each of its items."""
    files: dict[str, list[tuple[int, str]]] = {}
    for index, info in metadata.storage_data.items():
        files.setdefault(info.relative_path, []).append((info.offset + info.length, index.fqn))
    return files
