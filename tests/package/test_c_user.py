"""The headers and the library as somebody has them who has nothing else of this repository: a folder of headers, a
library, any compiler and any dialect."""

import pathlib
import re
import shutil
import subprocess

import pytest
import torch  # noqa: F401  the package wants it first
from package_files import ROOT

import torch_ext

HEADERS = sorted(path.name for path in (ROOT / "csrc").glob("torch_ext*.h"))
DIALECTS = {"gcc": ["c99", "c11", "c17"], "clang": ["c99", "c11", "c17"], "g++": ["c++98", "c++11", "c++17", "c++20"]}
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What docs/install.md says is to be copied."""
    folder = tmp_path_factory.mktemp("include")
    for name in [*HEADERS, "policy.def"]:
        shutil.copy(ROOT / "csrc" / name, folder)
    return folder


def compile_with(compiler: str, *arguments: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def every_initialiser(include: pathlib.Path) -> str:
    """A function with a variable of each struct that has a TX_*_INIT."""
    names = sorted(
        {name for h in HEADERS for name in re.findall(r"#define (TX_\w+)_INIT\b", (include / h).read_text())}
    )
    assert len(names) > 20
    lines = [f"  {name.lower()} of_{name.lower()} = {name}_INIT; (void)of_{name.lower()};" for name in names]
    return "\n".join(["void use(void);", "void use(void) {", *lines, "}\n"])


@pytest.mark.parametrize(("compiler", "dialect"), [(c, d) for c, all_of_them in DIALECTS.items() for d in all_of_them])
def test_headers_compile_without_a_warning_in_any_dialect(
    include: pathlib.Path, tmp_path: pathlib.Path, compiler: str, dialect: str
) -> None:
    initialises = not dialect.startswith("c++") or dialect == "c++20"
    includes = "".join(f'#include "{name}"\n' for name in HEADERS)
    source = tmp_path / ("user.cc" if dialect.startswith("c++") else "user.c")
    source.write_text(includes + (every_initialiser(include) if initialises else ""))
    # A C++ compiler warns of every field that a designated initialiser leaves out.
    quiet = ["-Wno-missing-field-initializers"] if dialect.startswith("c++") else []
    compile_with(compiler, f"-std={dialect}", *WARNINGS, *quiet, f"-I{include}", "-fsyntax-only", str(source))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_example_is_built_from_the_headers_and_the_library_alone(
    include: pathlib.Path, tmp_path: pathlib.Path, compiler: str
) -> None:
    shutil.copy(torch_ext.library_path(), tmp_path / "libtorch_ext.so")
    where = [f"-I{include}", f"-L{tmp_path}", "-ltorch_ext", f"-Wl,-rpath,{tmp_path}"]
    compile_with(compiler, "-std=c11", str(ROOT / "examples/c/fit.c"), *where, "-lm", "-o", str(tmp_path / "fit"))
    done = subprocess.run([tmp_path / "fit"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fp32 masters" in done.stdout
