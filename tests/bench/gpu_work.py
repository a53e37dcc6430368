"""What the benchmark times on a GPU: steps with a wait at their end, and a copy of as many bytes."""

from collections.abc import Callable

import torch


def waited(step: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """Returns a function that makes several steps and then waits for the device. The time of a kernel launch is hidden
    behind the step before it."""

    def several() -> None:
        for _ in range(times):
            step()
        torch.cuda.synchronize()

    return several


def copy_of(traffic: float, params: int, device: str) -> Callable[[], None]:
    """Returns a copy on the device that reads and writes `traffic` bytes per parameter in total. The bytes are random,
    since zeros can be faster."""
    words = max(int(traffic * params / 2) // 8, 1)
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randint(-(1 << 62), 1 << 62, (words,), device=device, generator=generator)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy
