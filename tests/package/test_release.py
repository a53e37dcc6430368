"""Tests the files of a release (docs/release.md): the source distribution, and the wheel for the machine of the
build."""

import pathlib
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from typing import Any

import package_files
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "bazel"))

import build_backend  # noqa: E402
import core_metadata  # noqa: E402

MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine in the ELF header -> name
MOST_BYTES = {True: 6_300_000, False: 2_300_000}  # with and without the CUDA library

VERSION, METADATA = core_metadata.of_tree(ROOT)


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    return package_files.wheel()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("sdist")
    return folder / build_backend.build_sdist(str(folder))


def machines(wheel: pathlib.Path) -> set[str]:
    """Returns the machines that the wheel's libraries are for."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    return {MACHINES[struct.unpack_from("<H", library, 18)[0]] for library in libraries}


def run(*arguments: str, cwd: pathlib.Path) -> str:
    """Runs `python -m` and returns its output on one line."""
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return " ".join(result.stdout.split())


def test_the_wheels_tag_is_what_its_libraries_need(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a machine with a newer glibc than Debian 12's, libraries may require it; such a wheel must not be uploaded."""
    pytest.importorskip("auditwheel")
    (machine,) = machines(wheel)
    tag = f"manylinux_2_34_{machine}"
    assert wheel.name == f"torch_ext-{VERSION}-py3-none-{tag}.whl"
    shown = run("auditwheel", "show", str(wheel), cwd=tmp_path)
    assert f'consistent with the following platform tag: "{tag}"' in shown, shown


def test_the_wheel_is_small(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        with_cuda = "torch_ext/libtorch_ext_cuda.so" in archive.namelist()
    assert wheel.stat().st_size <= MOST_BYTES[with_cuda]


def test_the_package_index_would_take_them(wheel: pathlib.Path, sdist: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("twine")
    run("twine", "check", "--strict", str(wheel), str(sdist), cwd=tmp_path)


def test_both_say_the_same_of_themselves(wheel: pathlib.Path, sdist: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        of_wheel = archive.read(f"torch_ext-{VERSION}.dist-info/METADATA").decode()
        tag = archive.read(f"torch_ext-{VERSION}.dist-info/WHEEL").decode()
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"torch_ext-{VERSION}/PKG-INFO")
        assert member is not None
        of_sdist = member.read().decode()
    assert of_wheel == of_sdist == METADATA
    assert f"Tag: {wheel.stem.split('-', 2)[2]}\n" in tag
    for line in (
        f"Version: {VERSION}",
        "Requires-Dist: torch>=2.10",
        "Requires-Python: >=3.10",
        "Provides-Extra: examples",
        "Provides-Extra: docs",
        'Requires-Dist: tqdm; extra == "examples"',
        "License-Expression: BSD-3-Clause",
    ):
        assert f"{line}\n" in METADATA


def test_the_source_distribution_has_all_that_it_is_made_of(sdist: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A source distribution that is built from the unpacked one, without git, has the same bytes."""
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has it
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **options)
    tree = tmp_path / f"torch_ext-{VERSION}"
    code = (
        "import sys; sys.path.insert(0, 'bazel'); import build_backend; print(build_backend.build_sdist(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path)], cwd=tree, check=True, capture_output=True)
    assert (tmp_path / sdist.name).read_bytes() == sdist.read_bytes()


def test_the_source_distribution_has_what_the_build_names(sdist: pathlib.Path) -> None:
    """It has the package of every label in a BUILD file, and sources of the library, the Python package and the
    tests."""
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    builds = {str(path.relative_to(ROOT)) for path in ROOT.rglob("BUILD")}
    labels = {label for path in builds for label in re.findall(r'"//([\w/]*)[:"]', (ROOT / path).read_text())}
    packages = {f"{label}/BUILD".removeprefix("/") for label in labels - {"conditions", "visibility"}}
    assert builds | packages <= files
    assert {"csrc/torch_ext.h", "csrc/cpu/kernels_isa.c", "cuda/adamw.cu", "torch_ext/__init__.pyi"} <= files
    assert {"pyproject.toml", "WORKSPACE", ".bazelrc", "LICENSE", "bazel/build_backend.py", "tests/run.sh"} <= files
    assert not [name for name in files if name.endswith((".so", ".pyc", ".whl")) or "/__pycache__/" in name]
