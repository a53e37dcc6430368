"""Which parameters are stepped on the host: a pure function of their sizes and the fraction that was asked for.

In Python, not in C: nobody but the Python optimizer has parameters on one device and states on another.
"""

from collections.abc import Sequence
from fractions import Fraction


def choose(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Whether each of them is chosen, so that about `fraction` of their sum is.

    sizes: bytes, >= 0. fraction: in [0, 1]; 0 chooses nothing and 1 everything that has a size, exactly. In between the
    largest come first, the first of equal ones before the others, and each that still fits is taken; at the end the
    smallest that was left out is, too, where that comes nearer. So what is chosen is off by half of the smallest that
    was left out at most.
    """
    wanted = Fraction(fraction) * sum(sizes)
    chosen = [False] * len(sizes)
    left_out: list[int] = []
    for i in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: (-sizes[i], i)):
        if sizes[i] <= wanted:
            chosen[i] = True
            wanted -= sizes[i]
        else:
            left_out.append(i)
    # All that were left out are larger than what is missing, or they would have fitted.
    smallest = min(left_out, key=lambda i: (sizes[i], i), default=None)
    if smallest is not None and sizes[smallest] - wanted < wanted:
        chosen[smallest] = True
    return chosen
