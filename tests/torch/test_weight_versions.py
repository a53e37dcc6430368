"""A thousand versions, one in a hundred of which is lost, repeated, reordered, damaged or another trainer's: bits are
equal, and every fault is reported."""

import pytest
import weight_versions


@pytest.mark.parametrize("exact", [False, True])
def test_a_thousand_versions_of_which_one_in_a_hundred_goes_wrong(exact: bool) -> None:
    found = weight_versions.run(1000, seed=5, exact=exact)
    assert not found.wrong
    assert found.versions >= 1000 and found.faults.keys() == weight_versions.FAULTS.keys()
