"""Packs files into a wheel (the binary distribution format of PEP 427), byte for byte the same each time."""

import argparse
import base64
import hashlib
import os
import re
import stat
import sys
import zipfile

METADATA = """\
Metadata-Version: 2.1
Name: torch_ext
Version: {version}
Summary: Mixed-precision optimizer steps and gradient buckets for PyTorch, in C
Author: torch_ext authors
License: BSD-3-Clause
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: torch>=2.10
Description-Content-Type: text/markdown

{readme}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: torch_ext
Root-Is-Purelib: false
Tag: {tag}
"""


def header_version(header: str) -> str:
    """major.minor.patch, as the header's TX_VERSION_* say."""
    parts = dict(re.findall(r"#define TX_VERSION_(MAJOR|MINOR|PATCH) (\d+)", header))
    return ".".join(parts[part] for part in ("MAJOR", "MINOR", "PATCH"))


def record_line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    """With the earliest date that zip knows, so that the same input gives the same wheel."""
    info = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
    info.external_attr = (stat.S_IFREG | (0o755 if path.endswith(".so") else 0o644)) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="torch_ext-VERSION-TAG.whl")
    parser.add_argument("--version", required=True)
    parser.add_argument("--header", required=True, help="torch_ext.h, whose version has to be the same")
    parser.add_argument("--license", required=True)
    parser.add_argument("--readme", required=True)
    parser.add_argument("--library", required=True, action="append", help="once for each")
    parser.add_argument("files", nargs="+", help="torch_ext/**")
    args = parser.parse_args()

    if (in_header := header_version(read(args.header).decode())) != args.version:
        sys.exit(f"the BUILD file says version {args.version}, {args.header} says {in_header}")

    tag = os.path.basename(args.out).removesuffix(".whl").split("-", 2)[2]
    info = f"torch_ext-{args.version}.dist-info"
    contents = {path[path.rindex("torch_ext/", 0, path.rindex("/") + 1) :]: read(path) for path in args.files}
    contents |= {f"torch_ext/{os.path.basename(path)}": read(path) for path in args.library}
    contents[f"{info}/LICENSE"] = read(args.license)
    contents[f"{info}/METADATA"] = METADATA.format(version=args.version, readme=read(args.readme).decode()).encode()
    contents[f"{info}/WHEEL"] = WHEEL.format(tag=tag).encode()
    record = f"{info}/RECORD"
    lines = [record_line(path, data) for path, data in contents.items()]
    contents[record] = ("".join(lines) + f"{record},,\n").encode()

    with zipfile.ZipFile(args.out, "w") as archive:
        for path, data in contents.items():
            add(archive, path, data)


if __name__ == "__main__":
    main()
