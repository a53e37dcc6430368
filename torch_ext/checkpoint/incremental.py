"""`IncrementalWeights`, which saves a model's weights as deltas: what changed since the previous save."""

import contextlib
import os
import time
from pathlib import Path

from torch_ext.checkpoint import weight_files
from torch_ext.checkpoint.new_file import STALE, NewFile, refuse_full, sync_folder
from torch_ext.checkpoint.weight_files import PartFile
from torch_ext.weight_sync.delta_info import delta_info
from torch_ext.weight_sync.publisher import WeightPublisher

_REJOIN_EVERY = 4  # if some rank alone saved all its weights, all ranks do at the next multiple of this version number


class IncrementalWeights:
    """Saves the weights of a model in training to a folder: all weights now and then, and in between only what changed.
    `torch_ext.load_weights` restores a version bit for bit.

        publisher = torch_ext.WeightPublisher(model, optimizer)
        weights = torch_ext.IncrementalWeights("weights", publisher)
        ...             # any number of steps
        weights.save()  # after the same step on all ranks

    folder: the same on all ranks; created if it does not exist. Each rank writes its part, without communication. If
        any rank is killed, the last version with the parts of all ranks can be loaded. When a version with all weights
        is complete, files that no later version needs are removed, also those of earlier publishers.
    publisher: the model's publisher. It may also serve engines: see `save`.
    full_every: one of this many versions has all weights. Loading reads that version and the deltas after it.

    Only one job may save to a folder: once another job has begun to save there, the older job's next `save` raises.
    """

    def __init__(self, folder: str | os.PathLike[str], publisher: WeightPublisher, *, full_every: int = 100) -> None:
        if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1:
            raise ValueError(f"full_every is {full_every!r}; a whole number of versions, 1 or more, is legal")
        self._folder, self._publisher, self._full_every = Path(folder), publisher, full_every
        self._saved: int | None = None  # the last saved version
        self._begun = False  # whether this chain has been the newest one in the folder

    def save(self, part: bytes | None = None) -> bytes:
        """Saves the current weights as the next version; they are on the disk when this returns. Returns this rank's
        part, as `WeightPublisher.publish` does, which can be sent to engines.

        part: what publish() has just returned, if the caller publishes itself; None: `save` calls publish().

        Raises the errors of `publish`; OSError, with the needed and free bytes, if the disk is full; RuntimeError,
        naming the other chain, if another job has begun to save there. Earlier versions stay. After an error, this
        rank's next save has all weights, and at one of the next few versions all ranks save all weights together.
        """
        os.makedirs(self._folder, exist_ok=True)
        part = self._publisher.publish() if part is None else part
        info = delta_info(part)
        chain, version, number, parts = info.chain, info.version, info.part, info.parts
        if info.n_parts != 1 or version != self._publisher.version or version == self._saved:
            raise ValueError(f"part is of version {version}; pass what publish() has just returned, and pass it once")
        known = self._begin(chain, version, number)
        whole = (
            known is None
            or version % self._full_every == 0
            or (version % _REJOIN_EVERY == 0 and known.full_on_some_ranks())
        )
        file = PartFile(chain, version, number, parts, "full" if whole else "delta")
        self._write(file.name, self._publisher.full() if whole else part)
        self._saved = version
        self._clean(file)
        return part

    def _begin(self, name: str, version: int, part: int) -> weight_files.Chain | None:
        """Checks that this chain is the newest in the folder, and raises RuntimeError if it no longer is. Part 0 first
        makes it the newest, once. Returns the files of the chain; None if this part's previous version is missing."""
        chains = weight_files.chains_of(os.listdir(self._folder))
        newest = next((chain for chain in chains if chain.run), None)
        own = next((chain for chain in chains if chain.name == name), None)
        self._begun = self._begun or (own is not None and own.run > 0)
        if self._begun and newest is not None and newest.name != name:
            raise RuntimeError(
                f"{self._folder}: another job has begun to save there since this one did (chain {newest.name}, run "
                f"{newest.run}); one job at a time is legal"
            )
        if part == 0 and (newest is None or not self._begun):
            self._write(weight_files.run_name(name, 1 + (newest.run if newest else 0)), b"")
            self._begun = True
        return own if own is not None and (version - 1, part) in own.files else None

    def _write(self, name: str, data: bytes) -> None:
        path = self._folder / weight_files.unfinished(name)
        with contextlib.suppress(FileNotFoundError):  # left by a failed save
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
        """Removes files that no later version needs. Each rank removes its own in the current chain; part 0 also those
        of earlier chains. file: what this rank has just saved."""
        with contextlib.suppress(OSError):  # the next save removes leftover files
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
                for name in sorted(names):  # sorted: a chain's run file is removed after its parts
                    chain = weight_files.chain_in(name)
                    if chain in before or (chain not in (None, file.chain) and self._abandoned(name, chains, chain)):
                        os.unlink(self._folder / name)

    def _abandoned(self, name: str, chains: dict[str, weight_files.Chain], chain: str | None) -> bool:
        """Whether the file belongs to a chain without a run file, and is so old that its job must have ended."""
        known = chains.get(chain or "")
        changed = os.stat(self._folder / name).st_mtime
        return (known is None or not known.run) and time.time() - changed > STALE
