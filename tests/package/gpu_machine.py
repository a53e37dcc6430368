"""tests/gpu.sh in a copy of the tree, on this machine or on one that pretends to have a GPU."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def script(*arguments: str, root: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "tests/gpu.sh"), *arguments]
    given = {k: v for k, v in os.environ.items() if k != "OUT"} | {"TORCH_EXT_PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=root, timeout=300)


def path_with_processors(number: int, folder: pathlib.Path) -> str:
    """A PATH on which nproc says so."""
    folder.mkdir(exist_ok=True)
    (folder / "nproc").write_text(f"#!/bin/sh\necho {number}\n")
    (folder / "nproc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


# What takes the place of torch: torch.cuda.dead = True is an illegal access, whose error comes with the next call that
# waits.
TORCH = """
class backends:
    class cuda:
        is_built = staticmethod(lambda: True)

class cuda:
    dead = False
    is_available = is_initialized = staticmethod(lambda: True)

    @staticmethod
    def synchronize():
        if cuda.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore of it")
"""


def pretended(to: pathlib.Path, tests: dict[str, str]) -> pathlib.Path:
    """The script, what it runs tests with, and these files of tests; there is a GPU, and a benchmark that says so."""
    (to / "tests/gpu").mkdir(parents=True)
    for name in ("gpu.sh", "gpu_files.py", "gpu_report.py", "gpu/conftest.py", "gpu/journal.py"):
        shutil.copy(ROOT / "tests" / name, to / "tests" / name)
    texts = {f"tests/gpu/test_gpu_{name}.py": text for name, text in tests.items()}
    texts |= {"tests/gpu/torch.py": TORCH, "tests/bench/__main__.py": "print('the benchmark ran')"}
    texts |= {"torch_ext/__main__.py": "print('the information')", "built/libtorch_ext.so": ""}
    for path, text in texts.items():
        (to / path).parent.mkdir(exist_ok=True)
        (to / path).write_text(text)
    return to
