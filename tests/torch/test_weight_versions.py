"""Of a thousand versions one in a hundred goes wrong on its way: bits are equal, and every fault is named."""

import pytest
import weight_versions


@pytest.mark.parametrize("exact", [False, True])
def test_a_thousand_versions_of_which_one_in_a_hundred_goes_wrong(exact: bool) -> None:
    found = weight_versions.run(1000, seed=5, exact=exact)
    assert not found.wrong
    assert found.versions >= 1000 and found.faults.keys() == weight_versions.FAULTS.keys()
