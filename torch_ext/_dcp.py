"""Folders of torch.distributed.checkpoint that a save cut short leaves as they were, and that know when they are mixed.

A checkpoint is `.metadata`, which names the data files, one or more of each rank. torch overwrites them in place, so
that a process killed meanwhile leaves neither the former checkpoint nor the new one. Here each save's files have names
of their own, `.metadata` is replaced at once when all of them are on the disk, and then the former files go. Each file
ends in its name, so that one of another save or rank is noticed. torch's own reader reads these folders too.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torch_ext._files import sync_folder

_END = b"torch_ext saved this as "  # and the file's name, which has the rank's and the save's: its last bytes
_DATA = "*.distcp"


class _Replacing(FileSystem):
    """Renaming replaces: nothing has to be removed before, and would be missing if the process died in between."""

    def rm_file(self, path: Any) -> None:
        """Leaves it there."""


@dataclasses.dataclass
class _Part:
    """What the coordinator tells each rank, under the name by which torch looks for it."""

    prefix: str  # of its files


class CheckpointWriter(FileSystemWriter):
    """`storage_writer=` of torch.distributed.checkpoint.save and async_save.

    path: a folder, which is made; one that has a checkpoint is overwritten, and until the new one is complete holds the
    former. Needs the disk space of both. One save at a time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = _Replacing()

    def prepare_local_plan(self, plan: Any) -> Any:
        if not self.use_collectives:
            raise ValueError("use_collectives=False makes checkpoints of single ranks; a CheckpointWriter writes whole")
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return [
            dataclasses.replace(plan, storage_data=_Part(f"__{rank}_{self.save_id}_"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.value()}:
            with open(Path(self.path) / name, "ab") as file:
                file.write(_end_of(name))
                file.flush()
                os.fsync(file.fileno())
        sync_folder(self.path)
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        sync_folder(self.path)
        current = {result.storage_data.relative_path for of_rank in results for result in of_rank}
        for file in Path(self.path).glob(_DATA):
            if file.name not in current:
                file.unlink()

    def stage(self, state_dict: Any) -> Any:
        """Copies state as it is at rest, which is less than what will be written."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            return stager.stage(state_dict)
        finally:
            stager.close()


class CheckpointReader(FileSystemReader):
    """`storage_reader=` of torch.distributed.checkpoint.load, which looks at every file before the first tensor is
    written: ValueError, naming the file and a key, where one is missing, truncated, or of another save."""

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        files: dict[str, list[Any]] = {}
        for index, info in metadata.storage_data.items():
            files.setdefault(info.relative_path, []).append((info.offset + info.length, index.fqn))
        save_id = getattr(metadata.storage_meta, "save_id", None)
        for name, items in files.items():
            self._check(Path(self.path) / name, items, save_id)

    def _check(self, file: Path, items: Sequence[tuple[int, str]], save_id: str | None) -> None:
        """items: where each ends in it, and its key."""
        items = sorted(items)
        if not file.is_file():
            raise ValueError(f"{file} is missing: it has {items[0][1]!r} and {len(items) - 1} more of this checkpoint")
        end = _end_of(file.name) if save_id is not None and save_id in file.name else b""  # torch's files have none
        wanted, size = items[-1][0] + len(end), file.stat().st_size
        if size < wanted:
            cut = next((key for stop, key in items if stop > size), items[-1][1])
            raise ValueError(f"{file} is truncated: it has {size} bytes of {wanted}, and of {cut!r} not all of them")
        with open(file, "rb") as stream:
            stream.seek(items[-1][0])
            found = stream.read(len(end) + 1)
        if end and found != end:
            raise ValueError(
                f"{file} is of another save or rank than .metadata, which says where in it {items[0][1]!r} and "
                f"{len(items) - 1} more are: a checkpoint mixed from several cannot be loaded"
            )


def _end_of(name: str) -> bytes:
    return _END + name.encode()
