"""Tests the package's annotations: mypy and pyright accept the package and ordinary user code and report mistakes in
it, and annotations agree with the functions at run time."""

import json
import os
import pathlib
import re
import subprocess
import sys

from checked_sources import ROOT, tool

import torch_ext

USER_CODE, MISTAKES = (ROOT / "tests/package" / name for name in ("typed_user_code.py", "typed_mistakes.py"))


def run(*command: str, **environment: str) -> str:
    """Runs a type checker and returns its report. Raises AssertionError with its output if it could not check."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=given)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def run_mypy(*options: str) -> str:
    """Runs mypy with the repository's settings and returns its report. What it derives from torch, which takes most of
    the time, is kept for the next call."""
    cache = os.path.join(os.environ.get("TEST_TMPDIR", "/tmp"), "mypy_cache")
    return run(tool("mypy"), "--cache-dir", cache, *options, MYPYPATH=str(ROOT))


def mypy(*files: pathlib.Path) -> dict[str, set[int]]:
    """Runs mypy and returns, for each file, the lines with an error."""
    text = run_mypy(*map(str, files))
    found: dict[str, set[int]] = {file.name: set() for file in files}
    for name, line in re.findall(r"([\w.]+):(\d+): error: ", text):
        found.setdefault(name, set()).add(int(line))
    assert "Success" in text or sum(map(len, found.values())) > 0, text
    return found


def pyright(tmp_path: pathlib.Path, *files: pathlib.Path) -> dict[str, set[int]]:
    """Runs basedpyright with pyright's rules and returns, for each file, the lines with an error. Unlike pyright,
    basedpyright is on PyPI with everything that it needs."""
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "typeCheckingMode": "standard",
                "pythonVersion": "3.10",
                "include": list(map(str, files)),
                "extraPaths": [str(ROOT)],
            }
        )
    )
    text = run(tool("basedpyright"), "-p", str(settings), "--pythonpath", sys.executable, "--outputjson")
    found: dict[str, set[int]] = {file.name: set() for file in files}
    answer = json.loads(text)
    assert answer["summary"]["filesAnalyzed"] == len(files), text
    for report in answer["generalDiagnostics"]:
        if report["severity"] == "error":
            found[pathlib.Path(report["file"]).name].add(report["range"]["start"]["line"] + 1)
    return found


def wrong_lines() -> set[int]:
    """Returns the lines of MISTAKES that are marked `# wrong`."""
    marked = {i for i, line in enumerate(MISTAKES.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert len(marked) > 20
    return marked


def test_mypy_accepts_the_package() -> None:
    """And the package `bench` in tests/."""
    assert (text := run_mypy("-p", "torch_ext", "-p", "bench")).startswith("Success"), text


def test_mypy_accepts_user_code_and_reports_mistakes() -> None:
    assert mypy(USER_CODE, MISTAKES) == {USER_CODE.name: set(), MISTAKES.name: wrong_lines()}


def test_pyright_accepts_user_code_and_reports_mistakes(tmp_path: pathlib.Path) -> None:
    assert pyright(tmp_path, USER_CODE, MISTAKES) == {USER_CODE.name: set(), MISTAKES.name: wrong_lines()}


def test_annotations_are_shipped() -> None:
    assert pathlib.Path(torch_ext.__file__).with_name("py.typed").exists()


# Reports of mypy's stubtest on the modules of the public names that are accepted, and why.
KNOWN = (
    # Annotations cannot remove a keyword from a signature: AdamW's is Adam's, AdamW8bit's is AdamW's.
    r"torch_ext\.optim\.(adamw\.Adam(W|W8bit)?|muon\.muon\.Muon)\.__init__ is inconsistent, "
    r"(stub parameter \"__arg0\"|runtime does not have parameter \"(decoupled_weight_decay|states)\")",
    # Functions that functools.cache wraps.
    r"torch_ext\.native\.library\.function is inconsistent, stub does not have parameter",
    r"torch_ext\.[\w.]+ is inconsistent, runtime does not have \*",
    # Their base classes are torch's, which are not analysed here, since that takes long.
    r"torch_ext\.checkpoint\.\w+\.Checkpoint(Reader|Writer) is inconsistent, metaclass differs",
    # Aliases of Literal.
    r"torch_ext\.[\w.]+ is not a Union",
)


def test_annotations_are_true(tmp_path: pathlib.Path) -> None:
    """stubtest compares the module of every public name at run time with what mypy derives from its source."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nignore_errors = True\n"
        "[mypy-torch,torch.*,numpy.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n"
    )
    options = ["--mypy-config-file", str(settings), "--ignore-missing-stub", "--concise"]
    text = run(tool("stubtest"), "torch_ext", *options, MYPYPATH=str(ROOT))
    public = {getattr(getattr(torch_ext, name), "__module__", "torch_ext") for name in torch_ext.__all__}
    public |= {base.__module__ for kind in (torch_ext.Policy, torch_ext.Adam) for base in kind.__mro__[1:2]}
    assert len(public) > 10 and "adamw.AdamW.__init__" in text, text  # stubtest did check
    modules = "|".join(re.escape(f"{module}.") for module in public - {"torch_ext"})
    found = [line for line in text.splitlines() if re.match(modules, line)]
    found += [line for line in text.splitlines() if re.match(r"torch_ext\.\w+ ", line)]
    assert [line for line in found if not any(re.match(known, line) for known in KNOWN)] == []
