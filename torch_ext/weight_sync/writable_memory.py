"""Tells whether memory may be written to. Writing to a file that is mapped read-only would kill the process."""

import bisect
from collections.abc import Sequence


class WritableMemory:
    """The writable memory of this process at creation time; all memory if the system does not tell."""

    def __init__(self) -> None:
        self._ranges = _ranges()

    def has(self, address: int, nbytes: int) -> bool:
        """Whether all bytes [address, address + nbytes) may be written to."""
        if self._ranges is None or not nbytes:
            return True
        i = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
        return i >= 0 and address + nbytes <= self._ranges[i][1]


def _ranges() -> Sequence[tuple[int, int]] | None:
    """Returns ranges [begin, end) of writable memory, ascending, with adjacent ranges merged; None if unknown."""
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            lines = [line.split(maxsplit=2) for line in maps]
    except OSError:
        return None
    found: list[tuple[int, int]] = []
    for addresses, flags, *_ in lines:
        if "w" in flags:
            begin, end = (int(one, 16) for one in addresses.split("-"))
            if found and found[-1][1] == begin:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
    return found
