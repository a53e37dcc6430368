"""Runs the soak's command in a process that is forked from one that has imported torch, once for all.

Each soak is a new process with a torch_ext of its own choice; to start one from nothing takes some ten seconds, nearly
all of them for importing torch."""

import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile

from soak.torch_modules import TORCH_MODULES

# Before torch is imported: ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(TORCH_MODULES)  # nothing of torch_ext


def run(arguments: list[str], package: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs `python tests/soak ARGUMENTS`. package: a folder with another torch_ext."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        process = _context.Process(target=_main, args=(arguments, package, *map(str, files)))
        process.start()
        process.join()
        out, errors = (file.read_text() if file.exists() else "" for file in files)
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, errors)


def _main(arguments: list[str], package: str, out: str, errors: str) -> None:
    """The body of the new process."""
    for number, path in enumerate((out, errors), 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ["PYTHONPATH"] = package
    if package:
        sys.path.insert(0, package)
    from soak import __main__ as command

    command.find_packages()
    sys.argv = ["tests/soak", *arguments]
    sys.exit(command.main())
