"""torch_ext.Muon names wrong groups, arguments and gradients, and changes nothing then."""

from typing import Any

import pytest
import torch
from muon_params import F32, Tied, bits, filled, matrices
from torch import Tensor, nn

import torch_ext

WRONG: list[tuple[str, Any, type[Exception], str]] = [
    (
        "1-D in a muon group",
        lambda: [{"params": matrices([(4,)]), "algorithm": "muon"}],
        ValueError,
        "algorithm is 'muon'",
    ),
    ("algorithm", lambda: [{"params": matrices([(4, 4)]), "algorithm": "sgd"}], ValueError, "'sgd'"),
    ("foreach in a group", lambda: [{"params": matrices([(4, 4)]), "foreach": True}], ValueError, "foreach"),
    ("fused in a group", lambda: [{"params": matrices([(4, 4)]), "fused": True}], ValueError, "fused"),
    ("ema_decay in a group", lambda: [{"params": matrices([(4, 4)]), "ema_decay": 0.9}], ValueError, "ema_decay="),
    *(
        (
            f"{key} in a group",
            lambda key=key: [{"params": matrices([(4, 4)]), key: {}}],
            ValueError,
            f"pass {key}= to the",
        )
        for key in ("adamw", "adamw_params", "split")
    ),
]


@pytest.mark.parametrize(("make", "kind", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_groups_that_are_refused(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        torch_ext.Muon(make())


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"foreach": True}, TypeError, "no argument 'foreach'"),
        ({"fused": True}, TypeError, "no argument 'fused'"),
        ({"lr": -1.0}, ValueError, "lr is -1"),
        ({"lr": "1e-3"}, TypeError, "lr is '1e-3'"),
        ({"momentum": 1.5}, ValueError, "momentum is 1.5"),
        ({"ns_steps": 0}, ValueError, "ns_steps is 0"),
        ({"ns_steps": 2.5}, TypeError, "ns_steps is 2.5"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, "three numbers"),
        ({"ns_coefficients": (30.0, 5.0, 5.0)}, ValueError, "singular value"),
        ({"adjust_lr_fn": "other"}, ValueError, "match_rms_adamw"),
        ({"ns": "other"}, ValueError, "'gram'"),
        ({"ns_dtype": torch.float16}, ValueError, "torch.bfloat16"),
        ({"adamw": {"beta": 0.9}}, ValueError, "'beta'"),
        ({"adamw": 0.9}, TypeError, "adamw is a float; a mapping of"),
        ({"lr": torch.ones(2)}, ValueError, "lr is a tensor of 2 elements; one is legal"),
        ({"split": [2]}, TypeError, "split is a list; a mapping of"),
        ({"split": {"a": "44"}}, ValueError, "split of 'a' is '44'"),
        ({"adamw": {"lr": 1e-3}, "lr": 0.0}, ValueError, "ratio"),
        ({"adamw": {"betas": (0.9, 1.0)}}, ValueError, r"AdamW's betas\[1\]"),
        ({"split": {"a": 3}}, ValueError, "split of 'a' is 3.*8 rows"),
        ({"split": {"a": (5, 4)}}, ValueError, r"\(5, 4\).*8 rows"),
        ({"split": {"zzz": 2}}, ValueError, "'zzz'"),
        ({"adamw_params": "zzz"}, ValueError, "'zzz'"),
        ({"policy": {"optimizer": "adam"}}, ValueError, "Muon"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        torch_ext.Muon(zip("ab", matrices([(8, 6), (8,)]), strict=True), **options)


def test_a_parameter_in_two_groups_is_named() -> None:
    model = Tied()
    with pytest.raises(ValueError, match="'head.weight'.*'embed.weight'"):
        torch_ext.Muon(
            [
                {"params": [("embed.weight", model.embed.weight)]},
                {"params": [("head.weight", model.head.weight)]},
            ]
        )


def test_a_group_that_was_changed_is_refused_before_the_step() -> None:
    params = matrices([(8, 8), (8,)])
    optimizer = torch_ext.Muon(params, ns_dtype=F32)
    filled(params, 0)
    optimizer.step()
    before = bits(params)
    optimizer.param_groups[0]["momentum"] = 2.0
    with pytest.raises(ValueError, match=r"group 0: momentum is 2\.0"):
        optimizer.step()
    assert bits(params) == before


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory for a matrix cannot be allocated, the error names the parameter and nothing has changed."""
    params = matrices([(8, 8), (64, 64)])
    optimizer = torch_ext.Muon(zip("ab", params, strict=True), ns_dtype=F32)
    filled(params, 0)
    before, empty = bits(params), torch.empty

    def bounded(*sizes: Any, **options: Any) -> Tensor:
        if sizes == (4096,):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", bounded)
    with pytest.raises(MemoryError, match="'b'"):
        optimizer.step()
    assert bits(params) == before


def test_a_step_after_one_that_had_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with more threads finds no memory; the next one has as many threads as the first."""
    params = matrices([(64, 64), (64, 64)])
    optimizer = torch_ext.Muon(zip("ab", params, strict=True), ns_dtype=torch.bfloat16)
    threads, empty = torch.get_num_threads(), torch.empty

    def none(*sizes: Any, **options: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    try:
        torch.set_num_threads(1)
        filled(params, 0)
        optimizer.step()
        before = bits(params)
        torch.set_num_threads(2)
        monkeypatch.setattr(torch, "empty", none)
        with pytest.raises(MemoryError):
            optimizer.step()
        monkeypatch.setattr(torch, "empty", empty)
        torch.set_num_threads(1)
        optimizer.step()
    finally:
        torch.set_num_threads(threads)
    assert bits(params) != before


def test_sparse_and_differing_gradients_are_named() -> None:
    params = matrices([(8, 8)])
    optimizer = torch_ext.Muon(params, ns_dtype=F32)
    params[0].grad = torch.zeros(8, 8).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is sparse"):
        optimizer.step()


def test_rows_that_do_not_follow_each_other_are_named() -> None:
    """A weight whose rows are not contiguous is an error that names it."""
    params = [nn.Parameter(torch.randn(8, 6).T)]
    optimizer = torch_ext.Muon(params, ns_dtype=F32)
    filled(params, 0)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 has strides"):
        optimizer.step()


def test_a_group_that_is_refused_leaves_nothing() -> None:
    optimizer = torch_ext.Muon([nn.Parameter(torch.randn(8, 8))], ns_dtype=F32)
    with pytest.raises(ValueError, match="Muon steps matrices"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(5))], "algorithm": "muon"})
    assert len(optimizer.state_dict()["state"]) == 1
