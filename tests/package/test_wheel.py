"""Tests that the wheel has its files, installs without a network, and works where pip installs it."""

import pathlib
import subprocess
import sys
import zipfile

import package_files
import pytest

import torch_ext

ROOT = pathlib.Path(__file__).parent.parent.parent
VERSION = torch_ext.__version__

STEP = """
import torch, torch_ext
main_grad, grad = torch.ones(3), torch.full((3,), 2.0, dtype=torch.bfloat16)
torch.ops.torch_ext.bucket_accumulate_([main_grad], [grad])
assert main_grad.tolist() == [3.0, 3.0, 3.0], main_grad
model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
before = model.weight.detach().clone()
optimizer = torch_ext.AdamW(model.parameters(), lr=0.1, policy=torch_ext.load_policy(model))
model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
assert not torch.equal(model.weight, before)
print(torch_ext.__file__)
print(torch_ext.library_path())
"""


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    return package_files.wheel()


def test_is_for_every_python_and_torch(wheel: pathlib.Path) -> None:
    assert wheel.name.startswith(f"torch_ext-{VERSION}-py3-none-manylinux_2_34_")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"torch_ext-{VERSION}.dist-info/METADATA").decode()
    assert "Requires-Dist: torch>=2.10\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata


def test_holds_the_package_and_the_libraries(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("torch_ext/")}
    found = [path for pattern in ("*.py", "*.pyi", "py.typed") for path in (ROOT / "torch_ext").rglob(pattern)]
    package = {str(path.relative_to(ROOT)) for path in found}
    libraries = {"torch_ext/libtorch_ext.so", "torch_ext/libtorch_ext_delta.so"}
    headers = {f"torch_ext/include/{path.name}" for path in (ROOT / "csrc").glob("torch_ext*.h")}
    headers.add("torch_ext/include/policy.def")
    folders = (ROOT, ROOT / "bazel-bin")  # run by Bazel, or by hand
    if any((folder / "cuda/libtorch_ext_cuda.so").exists() for folder in folders):  # with a CUDA toolkit
        libraries.add("torch_ext/libtorch_ext_cuda.so")
    assert {"torch_ext/py.typed", "torch_ext/__init__.pyi"} < names == package | libraries | headers


def test_installs_and_steps_from_an_empty_folder(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "site"
    package_files.install(target)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n" + STEP
    result = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [pathlib.Path(line).parent for line in result.stdout.splitlines()] == [target / "torch_ext"] * 2


def test_installs_into_a_virtual_environment(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """pip shows the wheel's name, version and requirements, and uninstalls it without leaving files."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin/python")

    def pip(*arguments: str) -> str:
        command = [python, "-I", "-m", "pip", *arguments]
        return subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout

    pip("install", "--quiet", "--no-index", "--no-deps", str(wheel))
    shown = pip("show", "torch_ext")
    assert f"Version: {VERSION}" in shown
    assert "Requires: torch" in shown
    pip("uninstall", "--quiet", "--yes", "torch_ext")
    assert not list(environment.glob("lib/python*/site-packages/torch_ext*"))
