"""Helpers for tests of tests/gpu.sh: run it in a copy of the tree, with a fake GPU if there is none."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def script(*arguments: str, root: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs tests/gpu.sh of a tree."""
    command = ["bash", str(root / "tests/gpu.sh"), *arguments]
    given = {k: v for k, v in os.environ.items() if k != "OUT"} | {"TORCH_EXT_PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=root, timeout=300)


def path_with_processors(number: int, folder: pathlib.Path) -> str:
    """Returns a PATH with an nproc, in `folder`, that prints the number."""
    folder.mkdir(exist_ok=True)
    (folder / "nproc").write_text(f"#!/bin/sh\necho {number}\n")
    (folder / "nproc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


# The fake torch module. A test sets torch.cuda.dead = True to simulate an illegal access; as on a GPU, the next call
# that waits for the device raises the error.
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
    """Builds a tree with tests/gpu.sh, the files that it needs and the given test files (name -> text). Its torch has a
    fake GPU; its benchmark only prints that it ran."""
    (to / "tests/gpu").mkdir(parents=True)
    for name in ("gpu.sh", "gpu_files.py", "gpu_report.py", "device_processes.py", "gpu/conftest.py", "gpu/journal.py"):
        shutil.copy(ROOT / "tests" / name, to / "tests" / name)
    texts = {f"tests/gpu/test_gpu_{name}.py": text for name, text in tests.items()}
    texts |= {"tests/gpu/torch.py": TORCH, "tests/bench/__main__.py": "print('the benchmark ran')"}
    texts |= {"torch_ext/__main__.py": "print('the information')", "built/libtorch_ext.so": ""}
    for path, text in texts.items():
        (to / path).parent.mkdir(exist_ok=True)
        (to / path).write_text(text)
    return to
