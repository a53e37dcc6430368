"""Builds the fuzz targets of this folder, NAME_fuzz.cc, with clang's libFuzzer and sanitizers, and runs them."""

import functools
import pathlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from clang_sources import CLANG, ROOT, Source, clang, in_parallel, library_sources, starlark

HERE = pathlib.Path(__file__).absolute().parent
CORPUS = HERE / "corpus"

JOBS = 2
"""How many targets run at the same time."""

MUTANT_INPUT = "mutant"
"""The name of the kept input that was searched because no other finds the target's mutant (fuzz_mutants.py)."""

_FOLDERS = ["csrc/core", "csrc/cpu", "csrc/nccl", "csrc/ops", "csrc/torch"]
_SANITIZE = ["-fsanitize=address,undefined,float-cast-overflow,fuzzer-no-link", "-fno-sanitize-recover=all"]
# The kernels only branch on sizes and take most of the compile time. The address sanitizer checks their accesses.
_SANITIZE_LOOPS = ["-fsanitize=address"]
_LIMITS = ["-max_len=2048", "-len_control=0", "-timeout=20", "-rss_limit_mb=3000", "-print_final_stats=1"]


class Found(NamedTuple):
    """The result of running a target."""

    target: str
    runs: int
    seconds: float
    problem: str
    """What was found; "" if nothing was."""


def why_not() -> str:
    """Why this machine cannot run fuzz targets; "" if it can."""
    if CLANG is None:
        return "clang is not installed (tests/run.sh installs it)"
    found = subprocess.run(
        [CLANG, "-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", "/dev/null"],
        input='extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }',
        capture_output=True,
        text=True,
    )
    return "" if found.returncode == 0 else "clang has no libFuzzer (Debian: libclang-rt-dev; tests/run.sh installs it)"


def targets() -> list[str]:
    return sorted(path.name.removesuffix("_fuzz.cc") for path in HERE.glob("*_fuzz.cc"))


def compile_source(source: Source, folder: pathlib.Path, text: str | None = None) -> pathlib.Path:
    """text: compiled instead of the file's contents."""
    path, made = source.path, folder / f"{source.name}.o"
    sanitize = _SANITIZE_LOOPS if "kernels_isa" in path else _SANITIZE
    options = ["-O1", "-g1", *sanitize] if source.runs_here else ["-O0"]
    if text is not None:
        (changed := folder / pathlib.Path(path).name).write_text(text)
        path = str(changed)
        options += ["-w"]
    clang(*source.flags, *options, "-c", path, "-o", str(made))
    return made


def sources() -> list[Source]:
    return library_sources(_FOLDERS)


def build_library(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The objects of the library, by Source.name."""
    every = sorted(sources(), key=lambda source: "kernels_isa" not in source.path)  # these take longest to compile
    made = in_parallel(lambda source: compile_source(source, folder), every)
    return {source.name: path for source, path in zip(every, made, strict=True)}


def compile_target(target: str, folder: pathlib.Path) -> pathlib.Path:
    made = folder / f"{target}_fuzz.o"
    flags = [flag for flag in starlark("bazel/copts.bzl")["TEST_OPTS"] if flag != "-Werror"]
    # The library has to reject numbers that are not enumerators, so targets pass them.
    source = f"tests/fuzz/{target}_fuzz.cc"
    clang(*flags, "-O1", "-g1", *_SANITIZE, "-fno-sanitize=enum", "-c", source, "-o", str(made))
    return made


def link(made: pathlib.Path, objects: list[pathlib.Path], program: pathlib.Path) -> pathlib.Path:
    libraries = ["-fsanitize=address,undefined,fuzzer", "-fsanitize-link-c++-runtime", "-lstdc++", "-lm", "-ldl"]
    clang(str(made), *map(str, objects), *libraries, "-o", str(program))
    return program


def build(folder: pathlib.Path, chosen: list[str]) -> dict[str, pathlib.Path]:
    """Builds the programs of the chosen targets; by target."""
    objects = list(build_library(folder).values())
    work = functools.partial(compile_target, folder=folder)
    made = in_parallel(work, chosen)
    programs = in_parallel(lambda pair: link(pair[1], objects, folder / pair[0]), list(zip(chosen, made, strict=True)))
    return dict(zip(chosen, programs, strict=True))


def run(target: str, program: pathlib.Path, seconds: float, grown: pathlib.Path, seed: int = 1) -> Found:
    """Runs the kept inputs first, then new ones for so many seconds, none for 0. grown: the folder for new inputs that
    reach code which no input before reached, and for one that a bug was found with."""
    grown.mkdir(exist_ok=True)
    kept = [str(CORPUS / target)] if (CORPUS / target).is_dir() else []
    until = f"-max_total_time={max(1, round(seconds))}" if seconds else "-runs=0"
    options = [until, f"-seed={seed}", f"-artifact_prefix={grown}/"]
    done = subprocess.run(
        [str(program), *_LIMITS, *options, str(grown), *kept],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
    )
    count = re.search(r"number_of_executed_units: *(\d+)", done.stderr)
    took = re.findall(r"#\d+\s+DONE.*exec/s|Done \d+ runs in (\d+) second", done.stderr)
    problem = "" if done.returncode == 0 else _essence(done.stderr)
    return Found(target, int(count[1]) if count else 0, float(took[-1] or 0) if took else 0.0, problem)


def _essence(text: str) -> str:
    """The lines of libFuzzer's log that show what was found, where, and for which input."""
    lines = text.splitlines()
    tells = re.compile(r"not kept|runtime error|ERROR:|SUMMARY|^\s+#\d+ .*(csrc|tests/fuzz)/|Test unit written|^Base64")
    return "\n".join([line for line in lines if tells.search(line)][:30]) or "\n".join(lines[-30:])


def run_all(programs: dict[str, pathlib.Path], seconds: float, folder: pathlib.Path, seed: int = 1) -> dict[str, Found]:
    """Runs all programs, in so many seconds altogether."""
    each = seconds * JOBS / max(len(programs), 1)
    with ThreadPoolExecutor(JOBS) as pool:
        found = pool.map(lambda target: run(target, programs[target], each, folder / f"{target}.grown", seed), programs)
        return {one.target: one for one in found}


def keep(target: str, program: pathlib.Path, grown: pathlib.Path, most: int = 40) -> int:
    """Replaces the target's corpus by inputs from it and from `grown` that together reach the same code as all of them.
    If these are more than `most`, keeps every k-th in order of size. The mutant's input stays. Returns how many were
    kept."""
    merged = grown.with_suffix(".merged")
    merged.mkdir(exist_ok=True)
    folders = [str(grown), *([str(CORPUS / target)] if (CORPUS / target).is_dir() else [])]
    subprocess.run(
        [str(program), "-set_cover_merge=1", *_LIMITS, str(merged), *folders], check=True, capture_output=True
    )
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for path in CORPUS.glob(f"{target}/*"):
        if path.name != MUTANT_INPUT:
            path.unlink()
    by_size = sorted(merged.iterdir(), key=lambda path: path.stat().st_size)
    chosen = by_size[:: max(1, -(-len(by_size) // most))]
    for path in chosen:
        shutil.copy(path, CORPUS / target / path.name[:12])
    return len(chosen)
