"""Whether memory may be written to: a file that was mapped for reading ends the process of who writes to it."""

import bisect
from collections.abc import Sequence


class WritableMemory:
    """The process's memory as it is now; where the system does not tell, all of it."""

    def __init__(self) -> None:
        self._ranges = _ranges()

    def has(self, address: int, nbytes: int) -> bool:
        """Whether all of these bytes may be written to."""
        if self._ranges is None or not nbytes:
            return True
        i = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
        return i >= 0 and address + nbytes <= self._ranges[i][1]


def _ranges() -> Sequence[tuple[int, int]] | None:
    """[begin, end) of writable memory, ascending, neighbours as one."""
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
