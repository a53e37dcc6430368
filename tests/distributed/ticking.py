"""Time that passes only where somebody looks."""


class Clock:
    """In the place of the module `time`: each look at it takes as long, in nanoseconds."""

    def __init__(self, each: int) -> None:
        self.now, self.each = 0, each

    def monotonic_ns(self) -> int:
        self.now += self.each
        return self.now
