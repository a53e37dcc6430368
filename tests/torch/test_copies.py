"""tx_copy and tx_copy_nontemporal: exactly the requested bytes are copied, and no byte outside of them is written."""

from ctypes import c_int64, c_void_p

import c_api
import pytest
import torch

SIZES = [*range(0, 200), *range(1000, 1200), 4096, 5000, 8191]


@pytest.mark.parametrize("name", ["tx_copy", "tx_copy_nontemporal"])
def test_copies_of_every_size_at_every_address(name: str) -> None:
    copy = c_api.function(name, c_void_p, c_void_p, c_int64, restype=None)
    source = torch.randint(1, 256, (9000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for nbytes in SIZES:
        for at, to in ((0, 0), (1, 3), (63, 64), (7, 200)):
            target = torch.zeros(9000, dtype=torch.uint8)
            copy(target.data_ptr() + to, source.data_ptr() + at, nbytes)
            assert torch.equal(target[to : to + nbytes], source[at : at + nbytes])
            assert not target[:to].any() and not target[to + nbytes :].any()
