"""Tests the headers and the library as a C or C++ user has them, without the rest of the repository: a folder of
headers, a library, any compiler and any dialect."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import package_files
import pytest
import torch  # noqa: F401  torch_ext expects torch to be loaded

import torch_ext

ROOT = package_files.ROOT
HEADERS = sorted(path.name for path in (ROOT / "csrc").glob("torch_ext*.h"))
DIALECTS = {"gcc": ["c99", "c11", "c17"], "clang": ["c99", "c11", "c17"], "g++": ["c++98", "c++11", "c++17", "c++20"]}
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds a folder with the headers that docs/install.md tells users to copy."""
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
    """Returns C code that initialises a variable of each struct that has a TX_*_INIT."""
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
    # C++ compilers warn about every field that a designated initialiser leaves out.
    quiet = ["-Wno-missing-field-initializers"] if dialect.startswith("c++") else []
    compile_with(compiler, f"-std={dialect}", *WARNINGS, *quiet, f"-I{include}", "-fsyntax-only", str(source))


# Each program of examples/c, and a part of what it prints.
EXAMPLES = {"fit": "fp32 masters", "follow": "version 5:"}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_examples_are_built_from_the_headers_and_the_library_alone(
    include: pathlib.Path, tmp_path: pathlib.Path, compiler: str, example: str
) -> None:
    shutil.copy(torch_ext.library_path(), tmp_path / "libtorch_ext.so")
    where = [f"-I{include}", f"-L{tmp_path}", "-ltorch_ext", f"-Wl,-rpath,{tmp_path}"]
    build_and_run(compiler, example, tmp_path, where)


def test_every_example_is_built() -> None:
    assert {path.stem for path in (ROOT / "examples/c").glob("*.c")} == EXAMPLES.keys()


def build_and_run(compiler: str, example: str, folder: pathlib.Path, flags: list[str]) -> None:
    """Builds a program of examples/c in a folder, runs it and checks its output."""
    program = folder / example
    compile_with(compiler, "-std=c11", str(ROOT / f"examples/c/{example}.c"), *flags, "-lm", "-o", str(program))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[example] in done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("site with a space")
    package_files.install(folder)
    return folder


def flags_of(site: pathlib.Path, *options: str) -> list[str]:
    """Returns what `python -m torch_ext config` of the installed wheel prints, split as a shell does."""
    run = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('torch_ext', run_name='__main__')"
    command = [sys.executable, "-I", "-c", run, str(site), "config", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return shlex.split(done.stdout)


def test_the_examples_are_built_from_an_installed_wheel(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = flags_of(site)
    assert flags == flags_of(site, "--cflags") + flags_of(site, "--libs")
    assert flags[0] == f"-I{site}/torch_ext/include"
    for example in EXAMPLES:
        build_and_run("gcc", example, tmp_path, flags)


# An inference engine that uses only libtorch_ext_delta.so.
ENGINE = """
#include <stdio.h>
#include "torch_ext_delta.h"

int main(void) {
  static unsigned short weights[8];
  const tx_delta_param table[] = {{.name = "w", .numel = 8, .dtype = TX_BF16}};
  const tx_delta_piece piece = {.rows = 1, .columns = 8, .data = weights, .column_stride = 1};
  tx_delta_receiver *receiver = NULL;
  tx_error error;
  if (tx_version() >> 8 != (TX_VERSION_MAJOR << 8 | TX_VERSION_MINOR)) return 2;
  if (tx_delta_open(1, table, 1, &piece, &receiver, &error) != TX_OK) return 1;
  puts(tx_status_name(tx_delta_apply(receiver, -1, NULL, TX_DELTA_TOUCHED, NULL, &error)));
  printf("at version %d", (int)tx_delta_version(receiver));
  tx_delta_close(receiver);
  return 0;
}
"""


def test_an_engine_links_to_the_small_library_of_an_installed_wheel(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "engine.c").write_text(ENGINE)
    flags = [
        "-std=c11",
        *WARNINGS,
        str(tmp_path / "engine.c"),
        *flags_of(site, "--delta"),
        "-o",
        str(tmp_path / "engine"),
    ]
    compile_with("gcc", *flags)
    done = subprocess.run([tmp_path / "engine"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "TX_ERROR_INVALID_ARGUMENT\nat version 0"), done.stderr
    needed = subprocess.run(["readelf", "-d", tmp_path / "engine"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\[(libtorch\w*\.so)\]", needed) == ["libtorch_ext_delta.so"]


@pytest.mark.parametrize(("option", "lacks"), [("--cflags", "torch_ext.h"), ("--delta", "libtorch_ext_delta.so")])
def test_what_is_missing_is_named(site: pathlib.Path, tmp_path: pathlib.Path, option: str, lacks: str) -> None:
    package = tmp_path / "torch_ext"
    shutil.copytree(site / "torch_ext", package, ignore=shutil.ignore_patterns(lacks))
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        flags_of(tmp_path, option)
    assert refusal.value.returncode == 2
    assert f"{lacks} is in none of {package}" in refusal.value.stderr
