"""The process of one build of the CUDA library, which steps on request: python -m bench.variant_worker CONFIGURATION
PARAMS SEED DEVICE. $TORCH_EXT_CUDA_LIBRARY names the build.

Prints "ready", then answers each line of its input: "step N" with the seconds of N steps, "copy N" with the seconds of
N copies of as many bytes, "bits" with a number that is the same for all builds after the same number of steps.
"""

import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bench import optimizer_configs
from bench.gpu_work import copy_of
from bench.optimizer_configs import CONFIGURATIONS

_CHUNK = 1 << 22  # elements, so that the int64 copies of a large tensor fit into memory with it


def bits(tensors: Iterable[Tensor]) -> int:
    """Returns a number computed from all bits of the tensors. Each word is multiplied by an odd number that depends on
    its position, so that two differences do not cancel."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().reshape(-1)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.element_size()]
        for i, chunk in enumerate(words.view(integers).split(_CHUNK)):
            factors = torch.arange(1, 2 * chunk.numel() + 1, 2, device=chunk.device) * (2 * i + 1)
            total = total * 31 + int((chunk.to(torch.int64) * factors).sum())
    return total % (1 << 61)


def seconds(step: Callable[[], object], times: int, device: str) -> float:
    """Returns the seconds of `times` steps. One step before them is not timed, since another process used the
    device."""

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    step()
    synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        step()
    synchronize()
    return time.perf_counter() - begin


def main(name: str, params: str, seed: str, device: str) -> None:
    configuration = CONFIGURATIONS[name]
    ours = optimizer_configs.ours(configuration, [(int(params),)], int(seed), device)
    copy: Callable[[], object] | None = None
    for _ in range(2):
        ours.step()
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, number = line.strip().partition(" ")
        if what == "step":
            answer: float = seconds(ours.step, int(number), device)
        elif what == "copy":
            copy = copy or copy_of(configuration.traffic, int(params), device)
            answer = seconds(copy, int(number), device)
        else:
            answer = bits(ours.tensors())
        print(repr(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
