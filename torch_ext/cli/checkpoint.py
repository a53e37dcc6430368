"""python -m torch_ext checkpoint: prints what is in a file or a folder, and whether it is undamaged."""

import argparse
import json
from collections.abc import Iterator

from torch_ext.checkpoint.contents import Contents, Row, contents_of

_FORMS = {
    "logical": "as torch.optim has them",
    "plain": "at rest",
    "scaled": "at rest: codes and scales",
    "beside": "at rest: remainders of bf16 weights",
    "object": "no tensor",
    "full": "all weights of a version",
    "delta": "what changed since the version before",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a file of torch_ext.save or torch.save, or a folder of a checkpoint or of IncrementalWeights",
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare checksums, which would read all of the file"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for other programs")
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Prints the contents. Returns 0 if no damage was found (checksums may not cover everything, or not be compared),
    1 if there is damage. Raises SystemExit(2), with a message, if the checkpoint cannot be read."""
    try:
        found = contents_of(options.file, not options.no_check)
    except (ValueError, OSError) as error:
        options.refuse(str(error))
        raise AssertionError("argparse leaves") from error
    print(_json(found) if options.json else "\n".join(_text(options.file, found, not options.no_check)))
    return 1 if found.damage else 0


def _json(found: Contents) -> str:
    rows = [row._asdict() for row in found.rows]
    return json.dumps(
        {"bytes": found.nbytes, "checksums": found.checked, "damage": found.damage, "tensors": rows}, indent=2
    )


def _text(path: str, found: Contents, compared: bool) -> Iterator[str]:
    plain = sum(row.plain_bytes for row in found.rows)
    ratio = f", {plain / found.nbytes:.2f} times as many when decoded" if found.nbytes else ""
    yield f"{path}: {len(found.rows)} entries in {found.nbytes} bytes{ratio}"
    lines = [("key", "dtype", "stored in", "shape", "bytes", "of", "form"), *map(_columns, found.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    for line in lines:
        yield "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]])
    for damage in found.damage:
        yield f"damaged: {damage}"
    if not found.checked:
        yield "checksums: not for all of it; torch or an earlier torch_ext saved it"
    elif not found.damage:
        yield "checksums: " + ("all match" if compared else "not compared")


def _columns(row: Row) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "-"
    form = _FORMS.get(row.form, row.form)
    return row.key, row.dtype or "-", row.stored or "-", shape, str(row.nbytes), str(row.plain_bytes), form
