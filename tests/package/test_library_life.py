"""Tests the library in processes without Python: loaded and closed many times, several copies at once, calls from
short-lived threads with little stack, calls while the process ends. It must work and print nothing."""

import pathlib
import shutil
import subprocess

import pytest
import torch  # noqa: F401  torch_ext expects torch to be loaded
from package_files import ROOT

import torch_ext

LIVES = ["loaded_again_and_again", "several_copies", "threads_that_come_and_go", "calls_at_the_end"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds library_life.c, and copies the library next to it. Returns the program."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("life")
    made = folder / "library_life"
    source = pathlib.Path(__file__).with_name("library_life.c")
    command = [
        compiler,
        "-O1",
        "-Wall",
        "-Werror",
        f"-I{ROOT / 'csrc'}",
        str(source),
        "-o",
        str(made),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    shutil.copy(torch_ext.library_path(), folder / "copy.so")
    return made


@pytest.mark.parametrize("life", LIVES)
def test_it_lives_in_any_process(program: pathlib.Path, life: str) -> None:
    command = [str(program), life, torch_ext.library_path(), str(program.with_name("copy.so"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
