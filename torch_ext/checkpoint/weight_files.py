"""The files of a folder of incremental weights: their names, and which of them make a version.

Note: no file is ever changed, and each is there under its name when all of it is durable. A rank writes its part of a
version, all of its weights ("full") or what changed ("delta"), without a word to the others: a version is there when
the parts of all ranks are. A chain is what one publisher says; the file of its run, which part 0 writes before its
first part, puts the chains that came to the folder in order. So a job that is killed anywhere leaves a version less,
and whoever reads sees from the names what is missing because somebody removed it: a delta without the file before it.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_CHAIN = r"weights\.(?P<chain>[0-9a-f]{32})"
_PART = re.compile(_CHAIN + r"\.(?P<version>\d{8,18})\.(?P<part>\d{1,9})of(?P<parts>\d{1,9})\.(?P<form>full|delta)")
_RUN = re.compile(_CHAIN + r"\.run(?P<run>\d{6,18})")
_UNFINISHED = re.compile(_CHAIN + r"\..*\.unfinished")

# The form of a file that is not there: nobody can tell.
_EITHER = "*"


class PartFile(NamedTuple):
    """One rank's part of a version."""

    chain: str
    """32 hexadecimal digits."""
    version: int
    part: int
    parts: int
    form: str
    """"full" or "delta"."""

    @property
    def name(self) -> str:
        return f"weights.{self.chain}.{self.version:08d}.{self.part}of{self.parts}.{self.form}"


def run_name(chain: str, run: int) -> str:
    return f"weights.{chain}.run{run:06d}"


def unfinished(name: str) -> str:
    return f"{name}.unfinished"


class Chain(NamedTuple):
    name: str
    run: int
    """0: the file that says it is not there."""
    files: dict[tuple[int, int], PartFile]
    """By version and part; of two forms the full one."""
    parts: int

    def complete(self, version: int, form: str) -> bool:
        found = [self.files.get((version, part)) for part in range(self.parts)]
        return all(file is not None and file.form == form for file in found)

    def newest_full(self, until: int | None = None) -> int | None:
        """The last version that begins anew, of those until `until`."""
        versions = {version for version, _ in self.files if until is None or version <= until}
        return max((version for version in versions if self.complete(version, "full")), default=None)

    def begun_apart(self) -> bool:
        """Whether some ranks began anew, and the others did not at that version, or have not yet."""
        newest = self.newest_full() or 0
        return any(file.form == "full" and version > newest for (version, _), file in self.files.items())

    def last(self, full: int) -> int:
        """The last version that the one of this number and deltas make."""
        while self.complete(full + 1, "delta"):
            full += 1
        return full

    def of(self, full: int, last: int) -> list[PartFile]:
        """What makes it."""
        return [self.files[version, part] for version in range(full, last + 1) for part in range(self.parts)]

    def lost(self, since: int) -> PartFile | None:
        """A file of a version from `since` on that a later one needs, and that is not there, of either form."""
        for version, part in sorted(self.files):
            file = self.files[version, part]
            if file.form == "delta" and version > since and (version - 1, part) not in self.files:
                return file._replace(version=version - 1, form=_EITHER)
        return None


def chains_of(names: Iterable[str]) -> list[Chain]:
    """The newest first; last those of which the run's number is not known."""
    runs: dict[str, int] = {}
    files: dict[str, dict[tuple[int, int], PartFile]] = {}
    for name in sorted(names):  # "full" comes after "delta"
        if (found := _RUN.fullmatch(name)) is not None:
            runs[found["chain"]] = max(int(found["run"]), runs.get(found["chain"], 0))
        elif (found := _PART.fullmatch(name)) is not None:
            version, part, parts = int(found["version"]), int(found["part"]), int(found["parts"])
            file = PartFile(found["chain"], version, part, parts, found["form"])
            files.setdefault(file.chain, {})[version, part] = file
    made = [
        Chain(chain, runs.get(chain, 0), of, max((file.parts for file in of.values()), default=0))
        for chain in files.keys() | runs.keys()
        for of in [files.get(chain, {})]
    ]
    return sorted(made, key=lambda chain: (-chain.run, chain.name))


def chain_in(name: str) -> str | None:
    """The chain of which a file is, unfinished ones too; None where it is none of these."""
    found = _PART.fullmatch(name) or _RUN.fullmatch(name) or _UNFINISHED.fullmatch(name)
    return found["chain"] if found else None


class Version(NamedTuple):
    """What a version is made of."""

    number: int
    full: int
    """The version that has all weights."""
    files: list[PartFile]


def version_in(folder: Path, names: Iterable[str], number: int | None = None) -> Version:
    """Of this number, or the last one that is whole, of the newest run that has one.

    FileNotFoundError where there are no incremental weights. ValueError, naming it, where a file is missing that a
    later one needs, or that this version needs.
    """
    chains = chains_of(names)
    if not chains:
        raise FileNotFoundError(f"{folder} has no weights that torch_ext.IncrementalWeights saved")
    for chain in chains:
        if chain.files and not chain.run:
            raise ValueError(f"{folder / run_name(chain.name, 1)[:-6]}*, which says when this chain began, is missing")
        full = chain.newest_full(number)
        if (lost := chain.lost(full or 0)) is not None and (number is None or lost.version <= number):
            raise ValueError(f"{folder / lost.name} is missing, and later files need it{_else(chain, lost.version)}")
        if full is None:
            continue
        last = chain.last(full)
        if number is not None and last < number:
            absent = next(p for p in range(chain.parts) if (last + 1, p) not in chain.files)
            file = PartFile(chain.name, last + 1, absent, chain.parts, _EITHER)
            raise ValueError(f"version {number} is not there: {folder / file.name} is missing{_else(chain, last + 1)}")
        last = last if number is None else number
        return Version(last, full, chain.of(full, last))
    which = "no version" if number is None else f"no version until {number}"
    raise ValueError(f"{folder} has {which} of which the parts of all ranks are there")


def _else(chain: Chain, version: int) -> str:
    """What can be loaded where a file of this version cannot."""
    full = chain.newest_full(version - 1)
    return "" if full is None else f"; version {min(chain.last(full), version - 1)} can be loaded (version=)"


def without(names: Iterable[str], file: PartFile) -> str:
    """The same, of one that is damaged."""
    return next((_else(chain, file.version) for chain in chains_of(names) if chain.name == file.chain), "")
