"""Writes the locks of the packages that tests and examples install: requirements.txt from requirements.in, and the same
in tests/.

    pip install uv; python bazel/lock_requirements.py

A lock has the exact version of every listed package and of its dependencies, with the hashes of its files, for Linux
and Python 3.10 to 3.13. torch and its CUDA packages are left out, because the files of one version of torch differ from
index to index (built for CPU, built for CUDA): bazel/setup.sh installs torch by its pin in requirements.in. NVIDIA's
readers of machine code (cuobjdump, nvdisasm) are locked: torch does not depend on them.
"""

import hashlib
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INPUTS = ("requirements.in", "tests/requirements.in")  # a pin that several inputs need is in the first one's lock
OF_TORCH = re.compile(r"(torch|triton|nvidia-(?!cuda-(cuobjdump|nvdisasm)$).*|cuda-.*)$")


def header(source: pathlib.Path) -> str:
    """Returns the first line of the lock of `source`."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return f"# Made by bazel/lock_requirements.py of {source.name}, sha256 {digest}\n"


def pins(lock: str) -> dict[str, str]:
    """Returns, from a lock's text, "name==version" (with its marker, if any) -> the lines of that package."""
    blocks = re.findall(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9]|\Z)", lock, flags=re.MULTILINE | re.DOTALL)
    return {block.split(" \\\n")[0].strip(): block for block in blocks}


def compiled(sources: list[pathlib.Path]) -> dict[str, str]:
    """Returns the pins of everything that `sources` need."""
    command = ["uv", "pip", "compile", "--universal", "--python-version=3.10", "--generate-hashes", "--no-annotate"]
    command += ["--quiet", "--no-header", *map(str, sources)]
    found = pins(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout)
    return {
        pin: block
        for pin, block in found.items()
        if not OF_TORCH.match(pin.split("==")[0]) and "sys_platform == 'win32'" not in pin
    }


def main() -> int:
    known: dict[str, str] = {}
    sources = [ROOT / name for name in INPUTS]
    for i, source in enumerate(sources):
        everything = compiled(sources[: i + 1])
        if known.keys() - everything.keys():
            sys.exit(f"{source} needs other versions than those before it: {sorted(known.keys() - everything.keys())}")
        blocks = [block for pin, block in everything.items() if pin not in known]
        source.with_suffix(".txt").write_text(header(source) + "".join(blocks))
        known |= everything
    return 0


if __name__ == "__main__":
    sys.exit(main())
