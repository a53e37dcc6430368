"""What `python -m torch_ext plan` prints, and what it rejects."""

import io
import pathlib
import re
import sys

import pytest
import torch
from strategies import STRATEGIES

from torch_ext import __main__ as command


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[float]]:
    """Returns the numbers in each strategy's row."""
    found = (re.match(r"(\w+)((?: +[\d.]+){8,10})$", line) for line in text.splitlines())
    return {row[1]: [float(x) for x in row[2].split()] for row in found if row}


def test_plan_prints_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--params", "7e9", "--world-size", "8")
    table = rows(text)
    assert list(table) == [*STRATEGIES, "optim_grads_params"]
    gib = 7e9 / 2**30
    assert table["no_shard"][:6] == pytest.approx([2 * gib, 2 * gib, 4 * gib, 4 * gib, 0, 12 * gib], abs=0.01)
    assert table["optim"][:6] == pytest.approx([2 * gib, 2 * gib, gib / 2, gib / 2, 0, 5 * gib], abs=0.01)
    assert [row[7] for row in table.values()] == sorted((row[7] for row in table.values()), reverse=True)
    assert "7,000,000,000 trainable parameters" in text and "8 ranks" in text and "a lower bound" in text
    assert "bf16: gradients bf16, wire bf16, exp_avg bf16, exp_avg_sq bf16, master fp32" in text


def test_plan_says_what_moving_takes(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--params", "1e9", "--world-size", "8")
    optim = rows(text)["optim"]
    assert optim[7] == pytest.approx(3 * 1e9 * 2 / 2**30, abs=0.01)
    assert optim[7] > optim[5] + optim[6]
    assert "in addition to parameters and gradients: no_shard 1.86 GiB, optim 1.86 GiB, optim_grads 1.86 GiB" in text
    assert "come on top" not in plan(capsys, "--params", "1e9", "--strategy", "no_shard")


def test_plan_counts_averages_and_a_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--params", "1e9", "--world-size", "4", "--strategy", "no_shard", "optim"]
    without = rows(plan(capsys, *size))
    text = plan(capsys, *size, "--ema-dtype", "24bit", "--publisher")
    assert re.search(r"scales, steps +averages +publisher +total", text)
    table, gib = rows(text), 1e9 / 2**30
    assert table["no_shard"][5:7] == pytest.approx([3 * gib, (9 / 64 + 1 / 512) * gib], abs=0.01)
    assert table["optim"][5:7] == pytest.approx([3 / 4 * gib, (9 / 256 + 1 / 512) * gib], abs=0.01)
    for strategy, row in table.items():
        assert row[7] == pytest.approx(without[strategy][5] + row[5] + row[6], abs=0.02)
    exact = rows(plan(capsys, *size, "--publisher", "exact"))["no_shard"]
    assert exact[5] == pytest.approx((9 / 64 + 1 / 512 + 1 / 2) * gib, abs=0.01) and len(exact) == 9


@pytest.mark.parametrize("threads", [1, 2])
def test_plan_counts_muons_matrices(
    threads: int, module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = ["--model", f"{module}:stack", "--dtype", "bf16", "--world-size", "4", "--strategy", "no_shard", "optim"]
    adamw, muon = plan(capsys, *size), plan(capsys, *size, "--muon", "--ns-dtype", "bfloat16")
    assert re.search(r"scales, steps +products +total +transient +stepping +peak", muon) and "products" not in adamw
    whole, cut = rows(muon)["no_shard"], rows(muon)["optim"]
    mib = 1024 * 1024 / 2**20  # 2^20 elements of a matrix
    assert whole[3] == pytest.approx(rows(adamw)["no_shard"][3] / 2, abs=0.02), "one moment"
    assert cut[5] == pytest.approx(5 * 2 * mib, abs=0.02), "the largest matrix, and four squares"
    assert whole[5] == pytest.approx(threads * 5 * 2 * mib, abs=0.02), "of each that is multiplied at a time"
    assert whole[8] == pytest.approx(8 * 2 * mib, abs=0.02), "all of them"
    assert cut[8] < whole[8]
    less = plan(capsys, *size, "--muon", "--adamw-params", "0", "1")
    assert rows(less)["no_shard"][8] == pytest.approx(6 * 2 * mib, abs=0.02)


def test_plan_counts_slots(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--params", "64e6", "--world-size", "4", "--strategy", "optim", "--override", "bucket_size=250000"]
    of_buckets, of_slots = plan(capsys, *size), plan(capsys, *size, "--slots")
    # In MiB: 256 buckets of 250000 elements and some padding. Four are in flight, of which 3/4 are received, or there
    # are two slots; and one gradient.
    assert rows(of_buckets)["optim"][6] == pytest.approx((4 * 3 / 4 + 1) * 5e5 / 2**20, abs=0.01)
    assert rows(of_slots)["optim"][6] == pytest.approx((2 * 2**19 + 5e5) / 2**20, abs=0.01)
    assert "two slots for each bucket size" in of_slots and "two slots" not in of_buckets


def test_the_second_communicator_s_memory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = plan(capsys, "--params", "1M", "--override", "create_all_gather_group=true")
    assert (
        "create_all_gather_group: NCCL keeps the memory of a second communicator, which is not counted either" in asked
    )
    assert "second communicator" not in plan(capsys, "--params", "1M")


def test_plan_follows_dtype_overrides_and_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp8", "store_param_remainders=true", "grad_comm_dtype=fp8"]
    text = plan(capsys, "--params", "1e9", "--strategy", "0", "--override", *overrides)
    assert "wire uint8, exp_avg uint8, exp_avg_sq uint8, master int16" in text and "lower bound" not in text
    row = rows(text)["no_shard"]
    gib = 1e9 / 2**30
    assert row[2:5] == pytest.approx([2 * gib, 2 * gib, 2 * gib / 128], abs=0.01)
    text = plan(
        capsys, "--params", "1000", "--dtype", "fp32", "--strategy", "optim_grads_params", "--override", "bucket_size=3"
    )
    assert "fp32: gradients fp32" in text and "256 buckets" in text and "buckets in flight" not in text
    assert list(rows(text)) == ["optim_grads_params"]


@pytest.mark.parametrize("source", ["file", "input"])
def test_plan_reads_numbers_of_elements(
    source: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "embedding 1e6\n\n  # layers\n500000\nnorm 1000 # one\n"
    (tmp_path / "numels").write_text(lines)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    text = plan(capsys, "--numels", "-" if source == "input" else str(tmp_path / "numels"))
    assert "1,501,000 trainable parameters (3 tensors" in text and "1 rank\n" in text
    assert rows(text)["no_shard"][0] == pytest.approx(1501000 * 2 / 2**20, abs=0.01)


MODULE = """
import torch

def build():
    torch.empty(1 << 50)  # nothing is allocated
    model = torch.nn.Sequential(torch.nn.Linear(1 << 20, 1 << 10, bias=False), torch.nn.LayerNorm(1 << 10))
    model[0].requires_grad_(False)
    return model

def stack():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))

class Zoo:
    frozen = staticmethod(lambda: build().requires_grad_(False))

def broken():
    raise KeyError("no configuration")

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(1000))
        self.narrow = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))

def words():
    return "a model"
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planned_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "planned_models"


def test_plan_builds_a_model_on_the_meta_device(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--model", f"{module}:build", "--world-size", "4")
    assert "2,048 trainable parameters (Sequential), 4 ranks" in text and "fp32: gradients fp32" in text
    assert rows(text)["optim"][0] == pytest.approx(4.0, abs=0.01), "GiB, nearly all of it frozen"
    assert rows(text)["optim_grads_params"][0] == pytest.approx(1.0, abs=0.01)
    text = plan(capsys, "--model", f"{module}:build", "--dtype", "bf16")
    assert rows(text)["no_shard"][0] == pytest.approx(2.0, abs=0.01) and "bf16: gradients bf16" in text


def test_plan_leaves_out_full_sharding_where_it_refuses_the_model(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan(capsys, "--model", f"{module}:Mixed")
    assert list(rows(text)) == ["no_shard", "optim", "optim_grads"]
    assert "optim_grads_params is not possible for this model: Mixed has trainable parameters in" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param([], "one of the arguments --params --numels --model is required", id="nothing"),
        pytest.param(["--params", "1", "--model", "a:b"], "not allowed with", id="two"),
        pytest.param(["--params", "7X"], "'7X' is not a number", id="no number"),
        pytest.param(["--params", "1.5"], "'1.5'; a whole number", id="no whole number"),
        pytest.param(["--params", "0"], "a whole number from 1", id="zero"),
        pytest.param(["--params", "1e30"], r"to 2\^63", id="too many"),
        pytest.param(["--params", "9e18"], "int64", id="too many bytes"),
        pytest.param(["--params", "1", "--world-size", "-2"], "--world-size.*'-2'", id="ranks"),
        pytest.param(["--params", "1", "--strategy", "4"], r"4; legal are 'no_shard' \(0\), 'optim'", id="strategy"),
        pytest.param(["--params", "1", "--strategy", "zero2"], "ZeRO-2 is optim_grads here", id="other's strategy"),
        pytest.param(["--params", "1", "--states", "int8"], "int8 is 8bit here", id="other's states"),
        pytest.param(["--params", "1", "--min-8bit-size", "x"], "--min-8bit-size: 'x' is not a number", id="size"),
        pytest.param(["--params", "1", "--keep-32bit", "norm"], "has 'norm', which selects none", id="unknown name"),
        pytest.param(["--params", "1", "--ema-dtype", "fp8"], "--ema-dtype: invalid choice: 'fp8'", id="average"),
        pytest.param(
            ["--params", "1", "--ema-dtype", "bf16", "--override", "main_params_dtype=none"],
            "a parameter is in torch.bfloat16 without a master",
            id="average without masters",
        ),
        pytest.param(["--params", "1", "--dtype", "fp64"], "fp64", id="unknown dtype"),
        pytest.param(["--params", "1", "--dtype", "fp8"], "uint8", id="dtype that is not trained"),
        pytest.param(["--params", "1", "--override", "bucket_size"], "KEY=VALUE", id="override without a value"),
        pytest.param(["--params", "1", "--override", "exp_avg_dtyp=fp8"], "exp_avg_dtype", id="unknown key"),
        pytest.param(["--params", "1", "--override", "bucket_size=0"], "bucket_size=0 is not legal", id="bad value"),
        pytest.param(["--params", "1", "--override", "main_params_dtype=fp16"], "main_params_dtype", id="bad master"),
        pytest.param(["--params", "1000", "--muon"], "--muon needs the shapes of matrices", id="muon without shapes"),
        pytest.param(["--params", "9", "--adamw-params", "head"], "need --muon", id="muon's word without it"),
        pytest.param(["--numels", "/nowhere/numels"], "/nowhere/numels", id="no file"),
        pytest.param(["--model", "build"], "MODULE:CALLABLE", id="no callable"),
        pytest.param(["--model", "nowhere:build"], "nowhere:build.*No module", id="no module"),
        pytest.param(["--model", "planned_models:nothing"], "no attribute 'nothing'", id="no attribute"),
        pytest.param(["--model", "planned_models:broken"], "KeyError: 'no configuration'", id="raises"),
        pytest.param(["--model", "planned_models:words"], "returns a str", id="no module returned"),
        pytest.param(
            ["--model", "planned_models:Mixed", "--strategy", "optim_grads_params"],
            "optim_grads_params: Mixed has trainable parameters in",
            id="nothing is left",
        ),
        pytest.param(["--model", "planned_models:Zoo.frozen"], "no trainable parameter", id="nothing trainable"),
    ],
)
def test_what_plan_refuses(arguments: list[str], words: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["plan", *arguments])
    captured = capsys.readouterr()
    assert re.search(words, captured.err) and captured.out == ""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param("5\nmany\n", "line 2: 'many' is not a number", id="no number"),
        pytest.param("w 3 4\n", 'line 1: 3 words; "elements" or "name elements"', id="a shape"),
        pytest.param("# nothing\n", "no line with a number of elements", id="empty"),
    ],
)
def test_what_is_no_list_of_numbers(
    lines: str, words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "numels").write_text(lines)
    with pytest.raises(SystemExit, match="2"):
        command.main(["plan", "--numels", str(tmp_path / "numels")])
    assert words in capsys.readouterr().err
