"""Every example runs, and what it shows is so: each ends with a status that says whether it is."""

import importlib
import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys

import frameworks
import pytest

ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
NUMBERED = sorted(path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py"))


def run(*command: str, **environment: str) -> str:
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_numbered_examples_are_found() -> None:
    assert [name[:2] for name in NUMBERED] == [f"{i:02}" for i in range(1, len(NUMBERED) + 1)]
    assert NUMBERED


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_example(name: str) -> None:
    run(sys.executable, f"examples/{name}", OMP_NUM_THREADS="1")


# What each example of examples/frameworks imports.
FRAMEWORKS = {
    "accelerate_loop.py": ["accelerate"],
    "fsdp2.py": [],
    "lightning_module.py": ["pytorch_lightning"],
    "trainer.py": ["transformers", "accelerate"],
}


def test_framework_examples_are_found() -> None:
    assert sorted(path.name for path in (ROOT / "examples/frameworks").glob("*.py")) == sorted(FRAMEWORKS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=frameworks.needs(*m)) for n, m in FRAMEWORKS.items()])
def test_framework_example(name: str) -> None:
    run(sys.executable, f"examples/frameworks/{name}", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """OUT and the closing text of the quick main job."""
    # B3: paths come from the environment, one with a blank in it, and no variable is used without a default.
    out = tmp_path_factory.mktemp("main job")
    settings = {"TORCH_EXT_PYTHON": sys.executable, "OUT_DIR": str(out), "OMP_NUM_THREADS": "1"}
    text = run("bash", "-u", "examples/gpt/job.sh", "--quick", **settings)
    return out, text


def records(out: pathlib.Path, run_name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / f"{run_name}.jsonl").read_text().splitlines()]


def test_B3_main_job_ends_with_a_table_and_a_picture(main_job: tuple[pathlib.Path, str]) -> None:
    out, text = main_job
    for recipe in ("torch_ext, bf16 model", "fp32 model", "bf16 model"):
        assert recipe in text
    assert "within 0.02: yes" in text
    assert re.search(r"two seeds of fp32 are \d\.\d{4} apart", text)
    assert (out / "table.md").read_text().strip() in text
    assert (out / "gpt.png").stat().st_size > 10_000


def test_main_job_resumes_in_a_new_process(main_job: tuple[pathlib.Path, str]) -> None:
    out, _ = main_job
    first, second = [r for r in records(out, "ours-0") if "sizes" in r]
    assert first["step"] == second["first"] > 0
    steps = [r["step"] for r in records(out, "ours-0") if "loss" in r]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(
    ("run_name", "memory", "sent"),
    [
        pytest.param("ours-0", 12, 2, id="A2-bf16 weights, gradients, moments and wire, fp32 masters"),
        pytest.param("torch-fp32-0", 16, 4, id="all fp32"),
        pytest.param("torch-bf16-0", 8, 2, id="all bf16"),
    ],
)
def test_main_job_measures(main_job: tuple[pathlib.Path, str], run_name: str, memory: float, sent: float) -> None:
    """Bytes per parameter, in memory and on the wire; up to 2 % of them are padding, counters and small messages. Ours
    may have been compressed, to 194.5 of 256 bytes: where a busy machine let no message through quickly, the wire looks
    slow."""
    out, _ = main_job
    last = [r for r in records(out, run_name) if "sizes" in r][-1]
    assert memory <= sum(last["sizes"].values()) / last["parameters"] < 1.02 * memory
    if last["sent"] is not None:
        least = 194.5 / 256 * sent if run_name.startswith("ours") else sent
        assert least <= last["sent"] / last["parameters"] < 1.02 * sent


def test_bytes_that_were_lost_on_their_way_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets that say in their tcp_info that 300 of 1000 bytes were sent again, and 7 of 50."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gpt"))
    measure = importlib.import_module("measure")
    answers = iter([(1000, 300), (50, 7)])
    pair = socket.socketpair()

    class Told(socket.socket):
        def getsockopt(self, *_asked: int) -> bytes:  # type: ignore[override]
            return b"\xff" * 200 + struct.pack("=QQ", *next(answers))

    with pair[0], pair[1]:
        files = [str(one.fileno()) for one in pair]
        monkeypatch.setattr(measure.os, "listdir", lambda _: files)
        monkeypatch.setattr(measure.socket, "socket", Told)
        assert measure.bytes_sent() == 743


def test_run_sh_refuses_unknown_arguments() -> None:
    result = subprocess.run(["bash", "examples/run.sh", "--fast"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--quick" in result.stderr
