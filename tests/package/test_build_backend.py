"""Tests bazel/build_backend.py, the functions that pip calls to build the package, with a fake Bazel."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import zipfile
from typing import Any

import package_files
import pytest

import torch_ext

ROOT = pathlib.Path(__file__).parent.parent.parent

# The sources that the hooks read themselves. The others are only read by Bazel.
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "csrc/torch_ext_types.h", "bazel", "torch_ext"]

# The fake Bazel: notes its arguments in the file `calls` and "builds" by copying files that are built already.
BAZEL = """#!/bin/sh
echo "$* CUDA=$TORCH_EXT_CUDA" >>calls
case "$*" in *shutdown) exit ;; esac
mkdir -p bazel-bin && cp {wheel} {library} bazel-bin
"""

HOOK = """
import sys
sys.path.insert(0, "bazel")
import build_backend
print(getattr(build_backend, sys.argv[1])(sys.argv[2]))
"""

STEP = """
import site, sys
site.addsitedir(sys.argv[1])
import torch, torch_ext
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch_ext.AdamW([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
assert (weight < 1).all()
print(torch_ext.__file__, torch_ext.library_path(), torch_ext.__version__, sep="\\n")
"""


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """Builds a clone with the files that the hooks read, and next to it a folder `programs` with the fake Bazel."""
    clone = tmp_path / "clone"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    program = tmp_path / "programs" / "bazel"
    program.parent.mkdir()
    program.write_text(BAZEL.format(wheel=package_files.wheel(), library=torch_ext.library_path()))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return clone


def call(tree: pathlib.Path, hook: str, out: pathlib.Path, path: str | None = None) -> Any:
    """Calls a hook in a process of its own, as pip does. path: its PATH; None for one with the fake Bazel."""
    out.mkdir(exist_ok=True)
    path = f"{tree.parent / 'programs'}:/usr/bin:/bin" if path is None else path
    environment = {"PATH": path, "HOME": os.environ.get("HOME", "/"), "TORCH_EXT_CUDA": "0"}
    command = [sys.executable, "-c", HOOK, hook, str(out)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_a_wheel_is_the_one_that_bazel_makes(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = call(tree, "build_wheel", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (made,), given = (tmp_path / "out").iterdir(), package_files.wheel()
    assert made.name == done.stdout.splitlines()[-1] == given.name and made.read_bytes() == given.read_bytes()
    assert (tree / "calls").read_text() == "build --noshow_progress //:wheel CUDA=0\n"


def test_a_source_distribution_leaves_no_server_and_no_outputs(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tree / "PKG-INFO").touch()
    assert call(tree, "build_wheel", tmp_path / "out").returncode == 0
    build, shutdown = (tree / "calls").read_text().splitlines()
    assert build.startswith("--output_user_root=") and shutdown.split(" CUDA")[0].endswith(" shutdown")
    assert not pathlib.Path(build.split()[0].partition("=")[2]).exists()


def test_an_editable_install_steps_with_these_sources(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = call(tree, "build_editable", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "site")
    command = [sys.executable, "-I", "-c", STEP, str(tmp_path / "site")]
    stepped = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert stepped.returncode == 0, stepped.stderr
    assert stepped.stdout.split() == [
        str(tree / "torch_ext/__init__.py"),
        str(tree / "bazel-bin/libtorch_ext.so"),
        wheel.name.split("-")[1],
    ]


def test_metadata_is_there_without_a_build(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = call(tree, "prepare_metadata_for_build_wheel", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    info = done.stdout.strip()
    with zipfile.ZipFile(package_files.wheel()) as archive:
        assert (tmp_path / "out" / info / "METADATA").read_bytes() == archive.read(f"{info}/METADATA")
    assert not (tree / "calls").exists()


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_where_bazel_is_missing_the_message_says_what_to_install(
    tree: pathlib.Path, tmp_path: pathlib.Path, hook: str
) -> None:
    done = call(tree, hook, tmp_path / "out", path=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "apt-get install bazel-bootstrap" in done.stderr and "bazelisk" in done.stderr


def test_where_the_build_fails_so_does_the_hook(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "programs" / "bazel").write_text("#!/bin/sh\necho a reason >&2\nexit 1\n")
    done = call(tree, "build_wheel", tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a reason" in done.stderr and "`bazel build //:wheel` failed" in done.stderr
