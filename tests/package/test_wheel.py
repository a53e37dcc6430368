"""The wheel installs without a network and works from where pip puts it."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

STEP = """
import torch, torch_ext
main_grad, grad = torch.ones(3), torch.full((3,), 2.0, dtype=torch.bfloat16)
torch.ops.torch_ext.bucket_accumulate_([main_grad], [grad])
assert main_grad.tolist() == [3.0, 3.0, 3.0], main_grad
print(torch_ext.__file__)
print(torch_ext.library_path())
"""


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    (path,) = ROOT.glob("torch_ext-*.whl")
    return path


def test_is_for_every_python_and_torch(wheel: pathlib.Path) -> None:
    assert wheel.name.startswith("torch_ext-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("torch_ext-0.1.0.dist-info/METADATA").decode()
    assert "Requires-Dist: torch>=2.10\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata


def test_holds_the_package_and_the_libraries(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("torch_ext/")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "torch_ext").rglob("*.py")}
    libraries = {"torch_ext/libtorch_ext.so"}
    if (ROOT / "cuda/libtorch_ext_cuda.so").exists():  # built where there is a CUDA toolkit
        libraries.add("torch_ext/libtorch_ext_cuda.so")
    assert names == package | libraries | {"torch_ext/py.typed"}


def test_installs_and_steps_from_an_empty_folder(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target), str(wheel)]
    # -I ignores PYTHONPATH and the current folder, so that the repository's own package can't be meant.
    subprocess.run([sys.executable, "-I", *install], check=True, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n" + STEP
    result = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [pathlib.Path(line).parent for line in result.stdout.splitlines()] == [target / "torch_ext"] * 2


def test_installs_into_a_virtual_environment(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """pip sees the wheel's name, version and requirements, and takes it out again without a trace."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin/python")

    def pip(*arguments: str) -> str:
        command = [python, "-I", "-m", "pip", *arguments]
        return subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout

    pip("install", "--quiet", "--no-index", "--no-deps", str(wheel))
    shown = pip("show", "torch_ext")
    assert "Version: 0.1.0" in shown
    assert "Requires: torch" in shown
    pip("uninstall", "--quiet", "--yes", "torch_ext")
    assert not list(environment.glob("lib/python*/site-packages/torch_ext*"))
