"""torch.library.opcheck, with all of its checks, for every sample of every operator."""

import c_api
import operator_samples
import pytest
import torch


@pytest.mark.parametrize("sample", operator_samples.SAMPLES, ids=lambda s: s.id)
def test_opcheck(sample: operator_samples.Sample) -> None:
    results = torch.library.opcheck(operator_samples.overload(sample.operator), tuple(sample.make()))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) >= 4


def test_every_operator_has_samples() -> None:
    assert {s.operator for s in operator_samples.SAMPLES} == set(c_api.operators())
