"""Writes folders of torch.distributed.checkpoint atomically, with checksums of every byte.

A checkpoint consists of one data file per rank and `.metadata`, which says where in the data files each item is. The
writer of torch overwrites these files in place: if a save is killed, neither the previous nor the new checkpoint is
left. Nor does torch compare checksums. Here the data files of each save have unique names. `.metadata` is replaced once
they are all durable, and then the previous files are removed (`folder`). `.metadata` has a checksum of each item and of
itself. Each data file ends with its own name, so that files of another save or rank are detected. torch's own reader
can read these folders, too.
"""

import dataclasses
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ext.checkpoint import folder as checkpoint_folder
from torch_ext.checkpoint import folder_metadata
from torch_ext.checkpoint.background import yield_to_others
from torch_ext.checkpoint.dcp_reader import CheckpointReader as CheckpointReader
from torch_ext.checkpoint.files import refuse_form
from torch_ext.checkpoint.folder_items import end_of
from torch_ext.checkpoint.item_records import ItemRecords, refuse_layout
from torch_ext.checkpoint.new_file import NewFile, refuse_full, sync_folder
from torch_ext.checkpoint.snapshot import Buffers


class CheckpointWriter(FileSystemWriter):
    """`storage_writer=` of torch.distributed.checkpoint.save and async_save.

    path: a folder; created if it does not exist. A checkpoint in it is replaced once the new one is complete, so the
        disk needs room for both. Raises OSError, with the needed and free bytes, if it has less. Files of a failed or
        killed save are removed by the next save.

    states, compress: as for `torch_ext.save`. "at_rest" stores a master as what its weight in the checkpoint lacks.
        Only CheckpointReader reads that. It loads the same values, into the same targets, as from "logical".

    Only one save at a time: raises RuntimeError, naming the holder of the folder, if another process saves to it. On a
    file system without locks, either of two saves may raise at its end; the checkpoint in the folder is always
    complete.
    """

    def __init__(self, path: str | os.PathLike[str], *, states: str = "logical", compress: bool = True) -> None:
        refuse_form(states)
        super().__init__(path)
        self._at_rest, self._compress = states == "at_rest", compress
        self._begun: weakref.finalize | None = None  # withdraws the current save; only on the coordinator
        self._staged: Buffers | None = None  # the copy that the current asynchronous save writes
        self._free_buffers: list[Buffers] = []  # memory of a copy that has been written, for the next one

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for async_save's process, in which the writer begins a save of its own."""
        return self.__dict__ | {"_begun": None, "_staged": None, "_free_buffers": []}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._give_up()
        super().reset(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        if not self.use_collectives:
            raise ValueError(
                "use_collectives=False saves a checkpoint for each rank; CheckpointWriter saves one of all ranks"
            )
        os.makedirs(self.path, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        folder, save_id = Path(self.path), self.save_id
        checkpoint_folder.begin(folder, save_id)
        # If the save fails on another rank, this rank is not told. So the save is withdrawn at the latest when this
        # object is deleted.
        self._begun = weakref.finalize(self, _withdraw, folder, save_id, os.getpid())
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(checkpoint_folder.prefix(rank, save_id)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self._staged is not None and threading.current_thread() is not threading.main_thread():
            yield_to_others()
        try:
            written = self._write(f"{plan.storage_data.prefix}0.distcp", plan.items, planner) if plan.items else []
        except BaseException as error:
            self._give_up()
            needed = f"more than {sum(map(_nbytes, plan.items))} bytes"
            refuse_full(error, f"rank {self.rank or 0}'s file in {self.path}", needed, self.path)
            raise
        if self._staged is not None:
            self._free_buffers, self._staged = [self._staged], None
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def _write(self, name: str, items: list[Any], planner: Any) -> list[WriteResult]:
        with NewFile(Path(self.path) / name) as file:
            if self._at_rest:
                records = ItemRecords(planner, self._compress).of(items)
                written = [self._put_pieces(file, name, item, next(records)) for item in items]
            else:
                written = [self._put(file, name, item, planner) for item in items]
            file.write(end_of(name))
            file.sync()
            sync_folder(self.path)
        return written

    def _put(self, file: NewFile, name: str, item: Any, planner: Any) -> WriteResult:
        begin, file.crc32 = file.size, 0
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            file.write(data.getvalue())  # not getbuffer(): see ItemRecords
            file.check()
        else:
            refuse_layout(data, item.index.fqn, TypeError)
            data = data.detach().cpu()
            if data.untyped_storage().nbytes() != data.nbytes:
                data = data.clone()  # torch.save writes the whole storage of a view
            file.put(data)
        return self._written(file, name, item, begin)

    def _put_pieces(self, file: NewFile, name: str, item: Any, pieces: list[Any]) -> WriteResult:
        begin, file.crc32 = file.size, 0
        for piece in pieces:
            file.write(piece)
        file.check()
        return self._written(file, name, item, begin)

    def _written(self, file: NewFile, name: str, item: Any, begin: int) -> WriteResult:
        info = _StorageInfo(name, begin, file.size - begin)
        setattr(info, folder_metadata.CHECKSUM, file.crc32)
        return WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info)

    def finish(self, metadata: Any, results: Any) -> None:
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        raw = folder_metadata.dump(metadata, self.save_id)
        try:
            checkpoint_folder.complete(Path(self.path), self.save_id, raw)
        except BaseException as error:
            self._give_up()
            refuse_full(error, f"the metadata of {self.path}", f"{len(raw)} bytes", self.path)
            raise
        if self._begun is not None:
            self._begun.detach()
            self._begun = None

    def _give_up(self) -> None:
        """Removes the files of this object's current save, if it is not complete."""
        if self._begun is not None:
            self._begun()
            self._begun = None

    def stage(self, state_dict: Any) -> Any:
        """Copies the state to host memory for an asynchronous save. State is copied in its stored form, which takes
        less than the data to be written. A later save of this writer, which may be to another checkpoint_id, uses the
        memory of its last copy again, if that has been written."""
        buffers = self._free_buffers.pop() if self._free_buffers else Buffers()
        self._staged = buffers
        return buffers.take(state_dict)


def _withdraw(folder: Path, save_id: str, process: int) -> None:
    if process == os.getpid():  # a forked process has a copy of the writer and must not remove the files
        checkpoint_folder.withdraw(folder, save_id)


def _nbytes(item: Any) -> int:
    """Returns the bytes of an item's tensor elements; 0 for other objects, whose size is unknown."""
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)
