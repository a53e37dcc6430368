"""The texts of the main job: Python's own standard library, which every machine that runs Python has.

"code": the files listed below, which every Python from 3.10 to 3.13 has, sorted by name. The list makes the text the
same for the same Python; no file is both in TRAINING and in HELD_OUT. "documentation": the text that help() shows about
the language, English in reStructuredText, a file that "code" does not contain; its last fifth is held out. The model
reads bytes; there is no tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TRAINING = """
_collections_abc _pydecimal _pyio argparse ast asyncio/base_events asyncio/streams asyncio/tasks base64 bdb cmd codecs
collections/__init__ compileall concurrent/futures/_base contextlib copy csv dataclasses difflib dis doctest
email/_header_value_parser email/message enum fileinput fractions ftplib functools gettext gzip heapq http/client
http/cookiejar http/cookies http/server imaplib inspect json/decoder json/encoder locale logging/__init__
logging/config logging/handlers mimetypes modulefinder multiprocessing/managers multiprocessing/pool ntpath optparse os
pdb pickle pickletools pkgutil platform plistlib posixpath pprint pstats pydoc queue random selectors shlex shutil site
smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading timeit tokenize trace
traceback turtle typing unittest/case unittest/mock urllib/parse urllib/request uuid warnings weakref webbrowser
xml/dom/minidom xmlrpc/client
""".split()
HELD_OUT = "calendar configparser ipaddress mailbox".split()
DOCUMENTATION = ["pydoc_data/topics"]


class Corpus(NamedTuple):
    """uint8 tensors of one dimension."""

    training: Tensor
    held_out: Tensor


@functools.cache
def corpus(name: str) -> Corpus:
    """Returns a text by its name, "code" or "documentation"."""
    if name == "code":
        return Corpus(read(TRAINING), read(HELD_OUT))
    topics = read(DOCUMENTATION)
    cut = len(topics) * 4 // 5
    return Corpus(topics[:cut], topics[cut:])


def read(names: list[str]) -> Tensor:
    """Returns the named files, concatenated, as one uint8 tensor."""
    folder = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in names if not (folder / f"{name}.py").is_file()]
    if missing:
        raise SystemExit(f"the text needs {missing[0]}.py in {folder}: install this Python's standard library whole")
    joined = bytearray().join((folder / f"{name}.py").read_bytes() for name in sorted(names))
    return torch.frombuffer(joined, dtype=torch.uint8)


def held_out(name: str, context: int, sequences: int) -> Tensor:
    """Returns the first `sequences` windows of a corpus' held-out text, uint8 [sequences, context + 1].

    In each `context` bytes are predicted; together, every byte but the first is predicted once."""
    text = corpus(name).held_out
    if len(text) <= context * sequences:
        raise SystemExit(f"the held-out {name} has {len(text)} bytes; {context * sequences + 1} are needed")
    return text.unfold(0, context + 1, context)[:sequences]


def batch(text: Tensor, context: int, size: int, *, seed: int, step: int, rank: int, world: int) -> Tensor:
    """Returns the batch that `rank` reads at `step`: `size` random windows, uint8 [size, context + 1].

    It depends only on the arguments, so a resumed run continues with the text of the first run's next step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (world, size), generator=generator)[rank]
    return text[starts[:, None] + torch.arange(context + 1)]


def fingerprint() -> str:
    """Returns eight hexadecimal digits that identify this Python's text."""
    digest = hashlib.sha256()
    for part in (*corpus("code"), *corpus("documentation")):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()[:8]
