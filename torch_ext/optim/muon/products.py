"""The matrix products of one optimizer's Muon, on the device of its parameters."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_ext.optim.muon.lane_products import LaneProducts
from torch_ext.optim.muon.matrix_member import MatrixMember, Part
from torch_ext.optim.muon.stacked_products import StackedProducts


class Products(Protocol):
    """What the step asks of the products."""

    def reserve(self, members: Sequence[MatrixMember]) -> None:
        """Allocates the memory for these members, unless it is there already. Raises MemoryError, naming the largest
        parameters, if there is not enough."""
        ...

    def windows(self, members: Sequence[MatrixMember]) -> Iterator[list[tuple[MatrixMember, Tensor]]]:
        """Divides members that no other rank shares into windows; the momentum of a window is computed together. Yields
        each window's members with memory for their momentum, which is valid until the next window."""
        ...

    def orthogonalise(self, parts: Iterable[Part], window: bool = False) -> Iterator[tuple[Part, Exception | None]]:
        """Orthogonalises the parts in place. Yields each part, with None or why it failed: NonFiniteProducts, or the
        error of the products. Lazy: when a result is asked for, takes as many parts as are multiplied at a time.
        window: all parts are of one window, and none of its results is needed before the others."""
        ...


def products_on(device: torch.device) -> Products:
    return LaneProducts() if device.type == "cpu" else StackedProducts()
