"""Saving a model's weights as what changed since the last time: `IncrementalWeights`."""

import contextlib
import os
import time
from pathlib import Path

from torch_ext.checkpoint import weight_files
from torch_ext.checkpoint.new_file import STALE, NewFile, refuse_full, sync_folder
from torch_ext.checkpoint.weight_files import PartFile
from torch_ext.weight_sync.delta_info import delta_info
from torch_ext.weight_sync.publisher import WeightPublisher

_AGAIN = 4  # versions, of which one has all weights where a rank began anew by itself


class IncrementalWeights:
    """A folder with the weights of a model in training: all of them now and then, and of each version between what
    changed. `torch_ext.load_weights` makes a version of it again, bit for bit.

        publisher = torch_ext.WeightPublisher(model, optimizer)
        weights = torch_ext.IncrementalWeights("weights", publisher)
        ...             # any number of steps
        weights.save()  # after the same step on all ranks

    folder: is made; all ranks have the same one. Each writes its part, and nothing is sent between them. Whenever any
        of them is killed, the last version of which all parts are there can be loaded. Chains of former publishers,
        and files that no later version needs, go when a version with all weights is complete.
    publisher: of the model. It may serve engines, too: see `save`.
    full_every: of so many versions one has all weights. Loading reads that and the deltas behind it.

    One job at a time saves to a folder: the older one is refused, by its next `save`, when another has begun.
    """

    def __init__(self, folder: str | os.PathLike[str], publisher: WeightPublisher, *, full_every: int = 100) -> None:
        if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1:
            raise ValueError(f"full_every is {full_every!r}; a whole number of versions, 1 or more, is legal")
        self._folder, self._publisher, self._full_every = Path(folder), publisher, full_every
        self._saved: int | None = None  # the last version that was
        self._begun = False  # whether the chain has been the newest one in the folder

    def save(self, part: bytes | None = None) -> bytes:
        """The weights as they are are the next version, and on the disk when this returns. Returns this rank's part of
        it, as `WeightPublisher.publish` does, which engines take.

        part: what publish() has just returned, where somebody calls it already; None: it is called here.

        Errors as of `publish`; OSError, with what was needed and what is free, where the disk is full;
        RuntimeError, naming it, where another job has begun to save there. The versions before stay then. The next
        save of this rank has all weights, and at one of the next few versions that of every rank.
        """
        os.makedirs(self._folder, exist_ok=True)
        part = self._publisher.publish() if part is None else part
        info = delta_info(part)
        chain, version, number, parts = info.chain, info.version, info.part, info.parts
        if info.n_parts != 1 or version != self._publisher.version or version == self._saved:
            raise ValueError(f"part is of version {version}; what publish() has just returned, and once, is legal")
        known = self._begin(chain, version, number)
        whole = known is None or version % self._full_every == 0 or (version % _AGAIN == 0 and known.begun_apart())
        file = PartFile(chain, version, number, parts, "full" if whole else "delta")
        self._write(file.name, self._publisher.full() if whole else part)
        self._saved = version
        self._clean(file)
        return part

    def _begin(self, name: str, version: int, part: int) -> weight_files.Chain | None:
        """Refuses to go on with a chain that is not the newest one; part 0 makes it that, once. What is there of it;
        None where the version before is not."""
        chains = weight_files.chains_of(os.listdir(self._folder))
        newest = next((chain for chain in chains if chain.run), None)
        own = next((chain for chain in chains if chain.name == name), None)
        self._begun = self._begun or (own is not None and own.run > 0)
        if self._begun and newest is not None and newest.name != name:
            raise RuntimeError(
                f"{self._folder}: another job saves there since this one did (chain {newest.name}, run {newest.run}); "
                "one job at a time is legal"
            )
        if part == 0 and (newest is None or not self._begun):
            self._write(weight_files.run_name(name, 1 + (newest.run if newest else 0)), b"")
            self._begun = True
        return own if own is not None and (version - 1, part) in own.files else None

    def _write(self, name: str, data: bytes) -> None:
        path = self._folder / weight_files.unfinished(name)
        with contextlib.suppress(FileNotFoundError):  # of a save that failed
            os.unlink(path)
        try:
            with NewFile(path) as new:
                new.write(data)
                new.sync()
                os.rename(path, self._folder / name)
        except BaseException as error:
            refuse_full(error, str(self._folder / name), f"{len(data)} bytes", self._folder)
            raise
        sync_folder(self._folder)

    def _clean(self, file: PartFile) -> None:
        """Of its own chain each rank removes its own files, part 0 those of chains before it."""
        with contextlib.suppress(OSError):  # the next save removes what stays now
            names = os.listdir(self._folder)
            chains = {chain.name: chain for chain in weight_files.chains_of(names)}
            own = chains[file.chain]
            full = own.newest_full()
            if full is None:
                return
            for version, part in sorted(own.files):
                if part == file.part and version < full:
                    os.unlink(self._folder / own.files[version, part].name)
            if file.part == 0:
                before = {chain.name for chain in chains.values() if 0 < chain.run < own.run}
                for name in sorted(names):  # the file of a run comes after the parts
                    chain = weight_files.chain_in(name)
                    if chain in before or (chain not in (None, file.chain) and self._abandoned(name, chains, chain)):
                        os.unlink(self._folder / name)

    def _abandoned(self, name: str, chains: dict[str, weight_files.Chain], chain: str | None) -> bool:
        """Whether it is of a job that ended before it began its run."""
        known = chains.get(chain or "")
        changed = os.stat(self._folder / name).st_mtime
        return (known is None or not known.run) and time.time() - changed > STALE
