"""A pretended libnccl.so.2 (tests/core/fake_nccl.cc) for transport="nccl", and who reads and writes what through it."""

import os
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
from happens_before import FakeStreams

from torch_ext.comm import nccl_transport
from torch_ext.native import nccl

SOURCE = pathlib.Path(__file__).parent.parent / "core/fake_nccl.cc"
VARIANTS = {"newest": [], "plain": ["-DFAKE_NCCL_VERSION=22105"], "old": ["-DFAKE_NCCL_VERSION=21803"]}


def built(folder: pathlib.Path, *variants: str) -> dict[str, str]:
    """The path of each variant."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the pretended NCCL with")
    made = {}
    for name in variants or VARIANTS:
        made[name] = str(folder / f"{name}.so")
        options = VARIANTS[name]
        subprocess.run([compiler, "-std=c++20", "-fPIC", "-shared", *options, "-o", made[name], SOURCE], check=True)
    return made


def use(path: str) -> None:
    """For the rest of the process."""
    os.environ[nccl.PATH_VARIABLE] = path
    nccl.find.cache_clear()


def note_accesses(streams: FakeStreams, patch: pytest.MonkeyPatch) -> None:
    """NCCL reads and writes behind torch's back: what it is given is noted for the stream that it is given to."""
    transport = nccl_transport.NcclTransport
    given: list[Any] = []
    plain = {kind: getattr(transport, kind) for kind in ("all_to_all", "all_gather", "_issue")}

    def all_to_all(self: Any, into: Any, sent: Any, what: str) -> Any:
        given[:] = [sent, into]
        return plain["all_to_all"](self, into, sent, what)

    def all_gather(self: Any, whole: Any, rank: int, what: str) -> Any:
        given[:] = [[], whole]
        return plain["all_gather"](self, whole, rank, what)

    def issue(self: Any, call: Any, messages: Any, what: str, stream: str) -> Any:
        def noted(what: str, messages: Any, pointer: int) -> None:
            with streams.on(stream):
                streams.touch(*given, what)
            call(what, messages, pointer)

        return plain["_issue"](self, noted, messages, what, stream)

    allocate = transport.allocate
    for kind, function in {"all_to_all": all_to_all, "all_gather": all_gather, "_issue": issue}.items():
        patch.setattr(transport, kind, function)
    patch.setattr(transport, "allocate", lambda self, nbytes: streams.foreign(allocate(self, nbytes)))
