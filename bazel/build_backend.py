"""The build backend that pip and `python -m build` call (PEP 517 and 660). It builds torch_ext with Bazel.

Neither torch nor nvcc is needed. If nvcc is found the CUDA library is built as well, unless TORCH_EXT_CUDA=0.
"""

import gzip
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any

import core_metadata
import make_wheel

ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent

NO_BAZEL = """\
torch_ext is built by Bazel, which is not on the PATH. Install it and a C compiler:
    Debian, Ubuntu:  apt-get install bazel-bootstrap gcc g++
    elsewhere:       bazelisk (https://github.com/bazelbuild/bazelisk), with USE_BAZEL_VERSION=4.2.4
or install a wheel, which needs neither."""

# The contents of a source distribution: these files, and these folders without what tools leave behind.
FILES = [
    *(".bazelignore", ".bazelrc", ".clang-format", "BUILD", "CHANGELOG.md", "LICENSE", "README.md", "WORKSPACE"),
    *("pyproject.toml", "requirements.in", "requirements.txt"),
]
FOLDERS = ["bazel", "csrc", "cuda", "docs", "examples", "tests", "torch_ext"]
LEFT_BEHIND = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache")


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds the wheel by `bazel build //:wheel` and copies it to `wheel_directory`. Returns its name."""
    version, _ = core_metadata.of_tree(ROOT)
    with _Bazel() as bazel:
        bazel.build("//:wheel")
        (wheel,) = (ROOT / "bazel-bin").glob(f"torch_ext-{version}-*_{platform.machine()}.whl")
        shutil.copyfile(wheel, os.path.join(wheel_directory, wheel.name))
    return wheel.name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds the libraries and writes a wheel that only contains the path of these sources. Returns its name.

    The sources find the libraries in their bazel-bin. After a change in C run `bazel build //:torch_ext` again.
    """
    with _Bazel() as bazel:
        bazel.build("//:torch_ext")
    version, metadata = core_metadata.of_tree(ROOT)
    name = f"torch_ext-{version}-py3-none-any.whl"
    contents = {"__editable__.torch_ext.pth": f"{ROOT}\n".encode()}
    licence = (ROOT / "LICENSE").read_bytes()
    make_wheel.write(os.path.join(wheel_directory, name), contents, version, metadata, licence)
    return name


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Writes the wheel's dist-info folder, without building anything. Returns its name."""
    version, metadata = core_metadata.of_tree(ROOT)
    folder = pathlib.Path(metadata_directory) / f"torch_ext-{version}.dist-info"
    (folder / "licenses").mkdir(parents=True)
    (folder / "METADATA").write_text(metadata)
    shutil.copyfile(ROOT / "LICENSE", folder / "licenses" / "LICENSE")
    return folder.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Packs the sources of this folder, tracked by git or not; the same bytes each time. Returns the archive's name."""
    version, metadata = core_metadata.of_tree(ROOT)
    name = f"torch_ext-{version}"
    target = os.path.join(sdist_directory, f"{name}.tar.gz")
    with (
        open(target, "wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add(archive, f"{name}/PKG-INFO", metadata.encode(), 0o644)
        for path in _sources():
            mode = 0o755 if os.access(path, os.X_OK) else 0o644
            _add(archive, f"{name}/{path.relative_to(ROOT)}", path.read_bytes(), mode)
    return os.path.basename(target)


def _sources() -> Iterator[pathlib.Path]:
    for file in FILES:
        yield ROOT / file
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            made = any(part in LEFT_BEHIND or part.startswith("bazel-") for part in parts)
            if path.is_file() and not made and path.suffix not in (".pyc", ".so"):
                yield path


def _add(archive: tarfile.TarFile, path: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(data), mode
    archive.addfile(info, io.BytesIO(data))


class _Bazel:
    """Bazel in these sources. The sources of a source distribution are built only once: there Bazel's outputs are in a
    temporary folder, which `__exit__` deletes after shutting down Bazel's server."""

    def __enter__(self) -> "_Bazel":
        self._program = shutil.which("bazel") or shutil.which("bazelisk")
        if self._program is None:
            sys.exit(NO_BAZEL)
        self._scratch = tempfile.mkdtemp(prefix="torch_ext_build.") if (ROOT / "PKG-INFO").exists() else None
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._scratch:
            self._run("shutdown")
            # Bazel creates read-only folders.
            subprocess.run(["chmod", "-R", "u+w", self._scratch], check=False)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def build(self, target: str) -> None:
        """Builds `target`. Raises SystemExit if that fails; Bazel has printed why."""
        if self._run("build", "--noshow_progress", target).returncode:
            sys.exit(f"torch_ext: `bazel build {target}` failed; the lines above say why.")

    def _run(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        startup = [f"--output_user_root={self._scratch}"] if self._scratch else []
        # Bazel's Python tools run with this interpreter, which does not need torch.
        environment = {"TORCH_EXT_PYTHON": sys.executable} | os.environ
        return subprocess.run([str(self._program), *startup, command, *arguments], cwd=ROOT, env=environment, text=True)
