"""torch_ext.diagnose: it changes nothing, wrong arguments raise, its report as text and as data; and the command
`python -m torch_ext doctor`."""

import copy
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import their_optimizers as theirs
import torch
from their_optimizers import BF16, FP32, model_of, train
from torch import nn
from training import bits

import torch_ext
from torch_ext import __main__ as command


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns everything that a call could have touched: bytes, version counters, addresses, gradients, state entries,
    the groups' values."""
    inner = [optimizer, *getattr(optimizer, "chained_optimizers", []), getattr(optimizer, "optimizer", None)]
    found: dict[str, Any] = {"rng": torch.random.get_rng_state().tolist(), "dict": [sorted(vars(model))]}
    for name, p in model.named_parameters():
        grad = p.grad
        found[name] = (bits(p), p._version, p.data_ptr(), p.requires_grad, sorted(vars(p)))
        found[f"{name}.grad"] = None if grad is None else (bits(grad), grad._version, grad.data_ptr())
    for i, one in enumerate(o for o in inner if o is not None):
        state = getattr(one, "state", None)
        entries = dict.values(state) if isinstance(state, dict) else []
        found[f"state {i}"] = [
            {key: (bits(v), v._version, v.data_ptr()) if isinstance(v, torch.Tensor) else v for key, v in entry.items()}
            for entry in entries
        ]
        groups = [{k: str(v) for k, v in group.items() if k != "params"} for group in one.param_groups]
        found[f"groups {i}"] = groups, [[id(p) for p in group["params"]] for group in one.param_groups]
        if isinstance(one, torch.optim.Optimizer):
            # Our optimizer's mark that its state tensors were handed out.
            found[f"exposed {i}"] = getattr(state, "exposed", None)
    return found


def _torch() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, torch.optim.AdamW(model.parameters())


def _ours() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, torch_ext.AdamW(model.named_parameters())


def _ours_8bit() -> tuple[nn.Module, Any]:
    config = {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
    model = model_of(BF16)
    policy = torch_ext.load_policy(model, override_optimizer_config=config)
    return model, torch_ext.AdamW(model.named_parameters(), policy=policy)


def _megatron() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, theirs.Float16Optimizer(torch.optim.AdamW(model.parameters()))


def _fused() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, theirs.FusedAdam(model.parameters(), master_weights=True)


@pytest.mark.parametrize("make", [_torch, _ours, _ours_8bit, _megatron, _fused])
def test_nothing_is_changed(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    """Before the first step, with gradients, after steps, and with weights that were written externally."""
    model, optimizer = make()
    before = everything(model, optimizer)
    torch_ext.diagnose(model, optimizer)
    assert everything(model, optimizer) == before
    train(model, optimizer)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with torch.no_grad():
        model[0].weight.add_(1)
    before = everything(model, optimizer)
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            torch_ext.diagnose(model, optimizer)
            assert torch.is_grad_enabled() == grad_enabled
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("make", [_torch, _ours, _ours_8bit, _megatron])
def test_training_goes_on_with_the_same_bits(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    weights = []
    for diagnosed in (True, False):
        model, optimizer = make()
        for _ in range(3):
            if diagnosed:
                torch_ext.diagnose(model, optimizer)
            train(model, optimizer, 1)
        weights.append([bits(p) for p in model.parameters()])
    assert weights[0] == weights[1]


# -- arguments that are not legal ----------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[nn.Module, Any], Any], type[Exception], str]] = {
    "no model": (
        lambda m, o: torch_ext.diagnose(m.parameters(), o),  # type: ignore[arg-type]
        TypeError,
        "diagnose: model is a generator; a torch.nn.Module, or a list of some, is legal",
    ),
    "the other way round": (
        lambda m, o: torch_ext.diagnose(o, m),
        TypeError,
        "diagnose: model is a AdamW; a torch.nn.Module, or a list of some, is legal: the model comes first, then the "
        "optimizer",
    ),
    "no optimizer": (
        lambda m, o: torch_ext.diagnose(m, 3),
        TypeError,
        "diagnose: optimizer is a int; an object with param_groups, as torch.optim.Optimizer, or one that wraps such "
        "an object (.optimizer, .chained_optimizers), or a list of these, is legal",
    ),
    "a class": (
        lambda m, o: torch_ext.diagnose(m, torch.optim.AdamW),
        TypeError,
        "diagnose: optimizer is the class AdamW; an object with param_groups, as torch.optim.Optimizer, or one that "
        "wraps such an object (.optimizer, .chained_optimizers), or a list of these, is legal",
    ),
    "no optimizers": (
        lambda m, o: torch_ext.diagnose(m, []),
        ValueError,
        "diagnose: the list of optimizers is empty; pass what steps the model",
    ),
    "no models": (
        lambda m, o: torch_ext.diagnose([], o),
        ValueError,
        "diagnose: the list of models is empty; pass the module that is trained",
    ),
    "nothing is trained": (
        lambda m, o: torch_ext.diagnose(copy.deepcopy(m).requires_grad_(False), o),
        ValueError,
        "diagnose: no parameter of Sequential requires a gradient; pass the module that is trained",
    ),
    "no policy": (
        lambda m, o: torch_ext.diagnose(m, o, policy="bf16"),  # type: ignore[arg-type]
        TypeError,
        "diagnose: policy is a str; what torch_ext.load_policy returns, or a mapping of its keys, is legal",
    ),
    "no kind": (
        lambda m, o: torch_ext.diagnose(m, o).of("lost"),
        ValueError,
        "'lost' is not a kind of finding; stale_references, in_no_group, in_two_groups, not_of_the_model, "
        "upcast_missing, lost_updates, stalled_exp_avg_sq, stale_masters, missing_moments, misshapen_moments, "
        "inconsistent_moments, nonfinite_state, no_state, not_read are legal",
    ),
    "no severity": (
        lambda m, o: torch_ext.diagnose(m, o).raise_for_findings("fatal"),
        ValueError,
        "severity is 'fatal'; 'error', 'warning', 'note' are legal",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_legal_is_said(name: str) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error) as raised:
        call(*_torch())
    assert str(raised.value) == message


# -- the report ----------------------------------------------------------------------------------------------------


def test_the_report_as_text() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "3.bias"])
    text = str(torch_ext.diagnose(model, optimizer))
    assert text == (
        "AdamW, 6 trainable parameters, 798 elements: 1 error\n"
        "\n"
        "severity  finding      count  figure  parameters\n"
        "error     in_no_group  1              3.bias\n"
        "\n"
        "in_no_group (error)\n"
        "  Parameters of the model that require a gradient but are in no optimizer: they keep their initial values. "
        "If\n"
        "  another optimizer steps them, pass it too: diagnose(model, [first, second]).\n"
        "  write: optimizer.add_param_group({\"params\": [model.get_parameter('3.bias')]})"
    )
    assert str(torch_ext.diagnose(model, torch.optim.SGD(model.parameters()))).endswith("798 elements: nothing found")


def test_names_are_counted_and_the_first_are_shown() -> None:
    model, optimizer = _torch()
    (found,) = torch_ext.diagnose(model, optimizer).of("stalled_exp_avg_sq")
    assert found.count == 6 and found.parameters() == "0.weight, 0.bias, 2.weight and 3 more"
    assert found.amount() == "100 % of exp_avg_sq"


def test_the_report_for_loggers_and_for_exceptions() -> None:
    model, optimizer = _torch()
    report = torch_ext.diagnose(model, optimizer)
    said = json.loads(json.dumps(report.to_dict()))
    assert said["ok"] is False and said["parameters"] == 6 and said["elements"] == 798
    assert [f["kind"] for f in said["findings"]] == [f.kind for f in report.findings]
    assert said["findings"][0]["names"] == list(report.findings[0].names)
    assert set(said["findings"][0]) == {"kind", "severity", "message", "names", "figure", "unit", "fix", "count"}
    with pytest.raises(torch_ext.DiagnosisError) as raised:
        report.raise_for_findings()
    assert str(raised.value) == str(report)
    fine = torch_ext.diagnose(*_ours())
    fine.raise_for_findings("note")
    assert fine.ok and fine.to_dict()["findings"] == []


def test_the_most_serious_finding_is_first() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "3.bias"])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    report = torch_ext.diagnose(model, optimizer)
    assert [f.severity for f in report.findings] == ["error", "note"]
    report = torch_ext.diagnose([model, nn.Linear(2, 2).requires_grad_(False)], optimizer)
    assert report.of("in_no_group")[0].names == ("0.3.bias",)


def test_wrappers_are_named_and_read_through() -> None:
    class Framework:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model, optimizer = _torch()
    assert torch_ext.diagnose(model, Framework(optimizer)).optimizer == "Framework of AdamW"
    assert torch_ext.diagnose(model, Framework(optimizer)).findings == torch_ext.diagnose(model, optimizer).findings


# -- python -m torch_ext doctor ------------------------------------------------------------------------------------

MODULE = """
import torch

def broken():
    model = torch.nn.Linear(64, 64).bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)

def healthy():
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())

def raises():
    raise KeyError("no configuration")

def alone():
    return torch.nn.Linear(4, 4)

def three():
    return 1, 2, 3

def swapped():
    return healthy()[::-1]

number = 3
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "diagnosed_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("diagnosed_module", None)
    return "diagnosed_module"


def test_doctor_ends_with_1_where_something_was_found(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", f"{module}:broken"]) == 1
    assert "lost_updates (error)" in capsys.readouterr().out
    assert command.main(["doctor", f"{module}:healthy"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert command.main(["doctor", f"{module}:broken", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_doctor_in_a_process_of_its_own(module: str, tmp_path: pathlib.Path) -> None:
    """Modules are looked up in the working directory, as by any `python -m`."""
    root = str(pathlib.Path(torch_ext.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-m", "torch_ext", "doctor", "diagnosed_module:broken"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join([root, *filter(None, sys.path)]), "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 1 and "lost_updates" in run.stdout and run.stderr == ""


@pytest.mark.parametrize(
    "target, message",
    [
        ("build", "MODULE:FUNCTION is 'build'; MODULE:CALLABLE is legal, such as my_package.train:build"),
        ("nowhere:build", "MODULE:FUNCTION nowhere:build: No module named 'nowhere'"),
        ("diagnosed_module:nothing", "module 'diagnosed_module' has no attribute 'nothing'"),
        ("diagnosed_module:number", "diagnosed_module:number is a int; something that can be called is legal"),
        ("diagnosed_module:raises", "diagnosed_module:raises() raised KeyError: 'no configuration'"),
        ("diagnosed_module:alone", "diagnosed_module:alone() returns a Linear; (model, optimizer) is expected"),
        ("diagnosed_module:three", "diagnosed_module:three() returns 3 values; (model, optimizer) is expected"),
        ("diagnosed_module:swapped", "the model comes first, then the optimizer"),
    ],
)
def test_doctor_says_what_it_was_given_instead(
    module: str, target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(["doctor", target])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_container_of_optimizers_and_properties_that_raise() -> None:
    """Shaped like torchtitan's OptimizersContainer, with a property that raises because it needs a process group."""

    class Container(torch.optim.Optimizer):
        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            self.optimizers = optimizers
            super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

        @property
        def master_params(self) -> Any:
            raise RuntimeError("no process group")

    model = model_of(FP32)
    params = list(model.parameters())
    container = Container([torch.optim.AdamW(params[:2]), torch.optim.AdamW(params[2:4])])
    (found,) = torch_ext.diagnose(model, container).findings
    assert found.kind == "in_no_group" and found.names == ("3.weight", "3.bias")
