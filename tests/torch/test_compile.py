"""Every operator inside torch.compile(fullgraph=True): a traced call gives the bits of the eager call."""

import operator_samples
import pytest
import torch
from operator_samples import bits, copy, overload

import torch_ext  # noqa: F401  registers the operators


@pytest.mark.parametrize("sample", operator_samples.SAMPLES, ids=lambda s: s.id)
def test_traced_call_gives_the_bits_of_the_eager_call(sample: operator_samples.Sample) -> None:
    torch._dynamo.reset()
    eager = sample.make()
    traced = copy(eager)
    function = overload(sample.operator)
    function(*eager)
    torch.compile(lambda *arguments: function(*arguments), backend="aot_eager", fullgraph=True)(*traced)
    assert bits(traced) == bits(eager)


def test_all_operators_in_one_graph_through_inductor() -> None:
    torch._dynamo.reset()
    samples = operator_samples.FIRST_SAMPLES
    eager = [s.make() for s in samples]
    traced = [copy(arguments) for arguments in eager]

    def run(calls: list[list[object]]) -> None:
        for sample, arguments in zip(samples, calls, strict=True):
            overload(sample.operator)(*arguments)

    before = [bits(c) for c in eager]
    run(eager)
    torch.compile(run, fullgraph=True)(traced)
    for sample, a, b, c in zip(samples, traced, eager, before, strict=True):
        assert bits(a) == bits(b), sample.id
        assert bits(b) != c, sample.id


def test_a_gradient_made_inside_the_graph_reaches_the_operator() -> None:
    torch._dynamo.reset()
    x = torch.randn(130, generator=torch.Generator().manual_seed(0))

    def accumulate(main: torch.Tensor) -> torch.Tensor:
        torch.ops.torch_ext.bucket_accumulate_([main], [(x * 2).to(torch.bfloat16)])
        return main * 1

    eager, traced = torch.ones(130), torch.ones(130)
    expected = accumulate(eager)
    assert torch.equal(torch.compile(accumulate, backend="aot_eager", fullgraph=True)(traced), expected)
    assert torch.equal(traced, eager)
