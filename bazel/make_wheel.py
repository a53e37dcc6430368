"""Packs files into a wheel (PEP 427); the same input gives the same bytes."""

import argparse
import base64
import hashlib
import os
import stat
import zipfile

import core_metadata

WHEEL = """\
Wheel-Version: 1.0
Generator: torch_ext
Root-Is-Purelib: false
Tag: {tag}
"""


def record_line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    """Adds a file with the earliest date that zip allows, so that the same input gives the same wheel."""
    info = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
    info.external_attr = (stat.S_IFREG | (0o755 if path.endswith(".so") else 0o644)) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data, compresslevel=9)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str, contents: dict[str, bytes], version: str, metadata: str, licence: bytes) -> None:
    """Writes the wheel `path`, torch_ext-VERSION-TAG.whl, with `contents` and the files that every wheel has."""
    name, tag = os.path.basename(path).removesuffix(".whl").split("-", 2)[::2]
    info = f"{name}-{version}.dist-info"
    files = contents | {
        f"{info}/licenses/LICENSE": licence,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": WHEEL.format(tag=tag).encode(),
    }
    record = f"{info}/RECORD"
    lines = [record_line(file, data) for file, data in files.items()]
    files[record] = ("".join(lines) + f"{record},,\n").encode()
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            add(archive, file, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="torch_ext-VERSION-TAG.whl")
    parser.add_argument("--pyproject", required=True)
    parser.add_argument("--header", required=True, help="torch_ext_types.h, which has the version")
    parser.add_argument("--license", required=True)
    parser.add_argument("--readme", required=True)
    parser.add_argument("--libraries", required=True, nargs="+")
    parser.add_argument("--headers", required=True, nargs="+", help="for torch_ext/include")
    parser.add_argument("--files", required=True, nargs="+", help="torch_ext/**")
    args = parser.parse_args()

    version = core_metadata.header_version(read(args.header).decode())
    project = core_metadata.project(read(args.pyproject).decode())
    metadata = core_metadata.text(project, version, read(args.readme).decode())
    contents = {path[path.rindex("torch_ext/", 0, path.rindex("/") + 1) :]: read(path) for path in args.files}
    contents |= {f"torch_ext/{os.path.basename(path)}": read(path) for path in args.libraries}
    contents |= {f"torch_ext/include/{os.path.basename(path)}": read(path) for path in args.headers}
    write(args.out, contents, version, metadata, read(args.license))


if __name__ == "__main__":
    main()
