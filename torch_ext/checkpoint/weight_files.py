"""File names in a folder of incremental weights, and which files make up a version.

Note: ranks write without communication, and any of them may be killed at any time; a reader must still find the last
complete version, and notice files that somebody removed. No file is ever changed, and a file gets its name only once it
is durable. A rank writes its part of a version as all of its weights ("full") or what changed ("delta"). A version is
complete when the parts of all ranks exist. A chain is the sequence of versions of one publisher. Before its first part,
part 0 writes the run file of its chain; the run's number says in which order the chains came to the folder. So a job
that is killed loses only the version that it was saving. A removed file shows in the names: a delta without the file
before it.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_CHAIN = r"weights\.(?P<chain>[0-9a-f]{32})"
_PART = re.compile(_CHAIN + r"\.(?P<version>\d{8,18})\.(?P<part>\d{1,9})of(?P<parts>\d{1,9})\.(?P<form>full|delta)")
_RUN = re.compile(_CHAIN + r"\.run(?P<run>\d{6,18})")
_UNFINISHED = re.compile(_CHAIN + r"\..*\.unfinished")

# The form of a missing file, which is unknown.
_UNKNOWN_FORM = "*"


class PartFile(NamedTuple):
    """The file of one rank's part of a version, described by its name."""

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
    """The files of one publisher's chain."""

    name: str
    run: int
    """Number of the run; 0 if the run file is missing."""
    files: dict[tuple[int, int], PartFile]
    """Keyed by version and part. If both a full and a delta file exist, the full one."""
    parts: int

    def complete(self, version: int, form: str) -> bool:
        """Whether the parts of all ranks of this version exist in this form."""
        found = [self.files.get((version, part)) for part in range(self.parts)]
        return all(file is not None and file.form == form for file in found)

    def newest_full(self, until: int | None = None) -> int | None:
        """Returns the last version, up to `until`, of which all parts are full; None if there is none."""
        versions = {version for version, _ in self.files if until is None or version <= until}
        return max((version for version in versions if self.complete(version, "full")), default=None)

    def full_on_some_ranks(self) -> bool:
        """Whether some rank has saved all its weights since the last version at which all ranks did."""
        newest = self.newest_full() or 0
        return any(file.form == "full" and version > newest for (version, _), file in self.files.items())

    def last(self, full: int) -> int:
        """Returns the last version that can be built from version `full` and the deltas after it."""
        while self.complete(full + 1, "delta"):
            full += 1
        return full

    def of(self, full: int, last: int) -> list[PartFile]:
        """Returns the files needed to build version `last` from version `full`."""
        return [self.files[version, part] for version in range(full, last + 1) for part in range(self.parts)]

    def gap(self, since: int) -> PartFile | None:
        """Returns a missing file, of version `since` or later, that a later delta needs; None if none is missing."""
        for version, part in sorted(self.files):
            file = self.files[version, part]
            if file.form == "delta" and version > since and (version - 1, part) not in self.files:
                return file._replace(version=version - 1, form=_UNKNOWN_FORM)
        return None


def chains_of(names: Iterable[str]) -> list[Chain]:
    """Returns the chains of these files, newest first. Chains without a run file come last."""
    runs: dict[str, int] = {}
    files: dict[str, dict[tuple[int, int], PartFile]] = {}
    for name in sorted(names):  # "full" sorts after "delta" and so replaces it
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
    """Returns the chain that a file, which may be unfinished, belongs to; None if the name is not of this format."""
    found = _PART.fullmatch(name) or _RUN.fullmatch(name) or _UNFINISHED.fullmatch(name)
    return found["chain"] if found else None


class Version(NamedTuple):
    """A version that can be loaded, and its files."""

    number: int
    full: int
    """The version with all weights that it is built from."""
    files: list[PartFile]


def version_in(folder: Path, names: Iterable[str], number: int | None = None) -> Version:
    """Returns the version of this number; None: the last complete one of the newest run that has one.

    Raises FileNotFoundError if the folder has no incremental weights. Raises ValueError if a file is missing that this
    version or a later file needs; the message names the file.
    """
    chains = chains_of(names)
    if not chains:
        raise FileNotFoundError(f"{folder} has no weights that torch_ext.IncrementalWeights saved")
    for chain in chains:
        if chain.files and not chain.run:
            raise ValueError(f"{folder / run_name(chain.name, 1)[:-6]}*, which says when this chain began, is missing")
        full = chain.newest_full(number)
        if (gap := chain.gap(full or 0)) is not None and (number is None or gap.version <= number):
            raise ValueError(
                f"{folder / gap.name} is missing, and later files need it{_alternative(chain, gap.version)}"
            )
        if full is None:
            continue
        last = chain.last(full)
        if number is not None and last < number:
            absent = next(p for p in range(chain.parts) if (last + 1, p) not in chain.files)
            file = PartFile(chain.name, last + 1, absent, chain.parts, _UNKNOWN_FORM)
            raise ValueError(
                f"version {number} is not there: {folder / file.name} is missing{_alternative(chain, last + 1)}"
            )
        last = last if number is None else number
        return Version(last, full, chain.of(full, last))
    which = "no version" if number is None else f"no version up to {number}"
    raise ValueError(f"{folder} has {which} with the files of all ranks")


def _alternative(chain: Chain, version: int) -> str:
    """Returns text for a message: which version can be loaded if a file of this version cannot."""
    full = chain.newest_full(version - 1)
    return "" if full is None else f"; version {min(chain.last(full), version - 1)} can be loaded (version=)"


def without(names: Iterable[str], file: PartFile) -> str:
    """Returns text for a message: which version can be loaded without this damaged file."""
    return next((_alternative(chain, file.version) for chain in chains_of(names) if chain.name == file.chain), "")
