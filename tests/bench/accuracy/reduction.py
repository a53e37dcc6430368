"""python tests/bench accuracy: the rounding error of a sum over many ranks, or over many micro-batches.

The ranks are simulated. Our sums are not: they are computed by the operators that the exchange uses. Every figure is a
function of the seed and of torch's random numbers, and does not depend on the machine, its load or the thread count.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench import bench_report, step
from torch_ext.comm import wire as comm_wire
from torch_ext.comm.wire import ParamSlice, RoundingSeeds, WireBuffer
from torch_ext.native import constants, ops

_RANKS = (8, 64, 512, 1024, 4096)
_MICRO_BATCHES = (1, 16, 64, 256)
_ELEMENTS = 8192


class Gradients(NamedTuple):
    """Generates the gradient of each rank, or of each micro-batch: a common signal + noise * random numbers of its own,
    both N(0, 1)."""

    elements: int
    seed: int
    noise: float = 1.0

    def __call__(self, count: int) -> Iterator[Tensor]:
        """Yields `count` gradients, fp32 [elements]. The first ones are the same for every count."""
        generator = torch.Generator().manual_seed(self.seed)
        signal = torch.randn(self.elements, generator=generator)
        for _ in range(count):
            yield signal + self.noise * torch.randn(self.elements, generator=generator)


def error(found: Tensor, exact: Tensor) -> float:
    """Returns the relative error: rms of the difference / rms of the exact tensor."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


# -- over ranks ---------------------------------------------------------------------------------------------------


class Reduced(NamedTuple):
    """Relative errors of the mean over `ranks` ranks against float64. Every rank has its gradient in fp32."""

    ranks: int
    ring: float  # bf16, rounded at each hop
    tree: float  # bf16, added in pairs, each sum rounded
    sent_in_bf16: float  # ours: bf16 on the wire, fp32 sum
    rounded_once: float  # ours, rounded to bf16 at the end, as `.grad` is under no_shard
    sent_in_8_bits: float  # ours: e4m3 and a scale per 128 on the wire, dithered, fp32 sum


def reduce(ranks: int, gradients: Gradients) -> Reduced:
    """Returns the errors of the mean over `ranks` simulated ranks."""
    elements = gradients.elements
    exact = torch.zeros(elements, dtype=torch.float64)
    ring = torch.zeros(elements, dtype=torch.bfloat16)
    wires = WireBuffer.empty(ranks * elements, torch.bfloat16, ring.device).parts(ranks)
    coded = WireBuffer.empty(ranks * elements, comm_wire.CODES, ring.device).parts(ranks)
    whole = [ParamSlice(0, 0, elements, 0)]
    for rank, grad in enumerate(gradients(ranks)):
        exact += grad.double()
        comm_wire.pack([grad], whole, [0], wires[rank], RoundingSeeds.of_parts(rank, 0))
        comm_wire.pack([grad], whole, [0], coded[rank], RoundingSeeds.of_parts(rank, 0))
        ring += wires[rank].data
    exact /= ranks
    return Reduced(
        ranks,
        ring=error(ring.double() / ranks, exact),
        tree=error(_tree([wire.data for wire in wires]).double() / ranks, exact),
        sent_in_bf16=error(_mean(wires, torch.float32), exact),
        rounded_once=error(_mean(wires, torch.bfloat16), exact),
        sent_in_8_bits=error(_mean(coded, torch.float32), exact),
    )


def _mean(chunks: Sequence[WireBuffer], dtype: torch.dtype) -> Tensor:
    shard = torch.empty(chunks[0].data.numel(), dtype=dtype)
    comm_wire.reduce_chunks(chunks, shard, 1.0 / len(chunks))
    return shard


def _tree(values: list[Tensor]) -> Tensor:
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


# -- over micro-batches -------------------------------------------------------------------------------------------


class Accumulated(NamedTuple):
    """Relative errors of the sum of `micro_batches` bf16 gradients against float64."""

    micro_batches: int
    bf16: float  # main_grads_dtype bf16
    fp32: float  # main_grads_dtype fp32
    rounded_once: float  # the fp32 sum rounded to bf16, as it is sent in bf16


def accumulate(micro_batches: int, gradients: Gradients) -> Accumulated:
    """Returns the errors of the sum over `micro_batches` micro-batches."""
    exact = torch.zeros(gradients.elements, dtype=torch.float64)
    narrow = torch.zeros(gradients.elements, dtype=torch.bfloat16)
    wide = torch.zeros(gradients.elements)
    for grad in gradients(micro_batches):
        local = grad.bfloat16()
        exact += local.double()
        ops.call("bucket_accumulate_", [narrow, wide], [local, local])
    return Accumulated(
        micro_batches, error(narrow, exact), error(wide, exact), rounded_once=error(wide.bfloat16(), exact)
    )


# -- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = step.positive
    parser.add_argument("--ranks", nargs="+", type=count, default=list(_RANKS), metavar="N")
    parser.add_argument("--micro-batches", nargs="+", type=count, default=list(_MICRO_BATCHES), metavar="N")
    parser.add_argument("--elements", type=_blocks, default=_ELEMENTS, help=f"of a gradient; {_ELEMENTS} unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=step.new_file, metavar="FILE", help="the same figures, unrounded")


def _blocks(text: str) -> int:
    """Returns a number of elements that consists of whole blocks."""
    number = step.positive(text)
    if number % constants.BLOCK:
        raise argparse.ArgumentTypeError(
            f"{number}; a multiple of {constants.BLOCK}, a block of the 8-bit wire, is legal"
        )
    return number


def run(options: argparse.Namespace) -> int:
    """Prints the tables."""
    gradients = Gradients(options.elements, options.seed)
    print(
        f"Relative rms errors against float64; {options.elements:,} elements, signal + noise of each rank (or "
        f"micro-batch), both N(0, 1); seed {options.seed}, torch {torch.__version__}.\n"
    )
    over_ranks = [reduce(ranks, gradients) for ranks in options.ranks]
    print(_table(_OVER_RANKS, over_ranks), end="\n\n", flush=True)
    over_micro_batches = [accumulate(count, gradients) for count in options.micro_batches]
    print(_table(_OVER_MICRO_BATCHES, over_micro_batches))
    if options.json:
        found = {
            "torch": torch.__version__,
            "elements": options.elements,
            "seed": options.seed,
            "ranks": [row._asdict() for row in over_ranks],
            "micro_batches": [row._asdict() for row in over_micro_batches],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


_OVER_RANKS = (
    "mean over ranks",
    "bf16 ring",
    "bf16 tree",
    "ours: bf16 wire",
    "that, rounded to bf16",
    "ours: 8-bit wire",
)
_OVER_MICRO_BATCHES = ("sum of micro-batches", "in bf16", "in fp32", "in fp32, then rounded to bf16")


def _table(head: tuple[str, ...], rows: Sequence[Reduced] | Sequence[Accumulated]) -> str:
    lines = [[f"{count:,}", *(f"{figure:.1e}" for figure in figures)] for count, *figures in rows]
    return bench_report.table([list(head), *lines], left=0)
