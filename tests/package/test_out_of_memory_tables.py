"""Tests that there is an out-of-memory test for every public C function that may allocate. Such a test lets each of the
function's requests for memory fail once.

csrc/core allocates nothing. A public function that is defined in another folder of csrc has a row in a table of
tests/core/*_out_of_memory_test.cc, or is listed here with a reason."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent.parent

# Functions that are in no table, and why.
REASONS = {
    "tx_isa_name": "returns static storage, and cannot fail",
    "tx_isa_selected": "returns static storage, and cannot fail",
    "tx_isa_has_tiles": "asks the processor, and cannot fail",
    "tx_nccl_close": "cannot fail",
    "tx_nccl_comm_free": "cannot fail",
    "tx_nccl_comm_abort": "cannot fail",
    "tx_nccl_memory_free": "cannot fail",
    "tx_delta_chain_id": "reads a receiver, and cannot fail",
    "tx_delta_version": "reads a receiver, and cannot fail",
    "tx_delta_close": "cannot fail",
    "tx_delta_mark": "asks for no memory",
    "tx_delta_free": "cannot fail",
    "tx_health_of": "is arithmetic",
    "tx_muon_mirror": "asks for no memory",
    "tx_planes_bound": "is arithmetic, and cannot fail",
    "tx_planes_read": "reads a header",
    "tx_operator_name": "returns static storage, and cannot fail",
    "tx_operator_schema": "returns static storage, and cannot fail",
    "tx_signature": "is arithmetic, and cannot fail",
    "tx_torch_register": "asks torch alone for memory",
    "tx_torch_objects": "asks the dynamic linker alone for memory",
    "tx_torch_call": "asks for what an operator asks for; what it cannot read is left to torch's operator",
    "tx_torch_repeat": "asks for what tx_torch_call asks for, and Python for a list",
    "tx_torch_parallel": "hands out what was found",
    "tx_torch_versions": "asks Python alone for memory",
    "tx_torch_grads": "asks Python alone for memory",
    "tx_torch_orthogonalise": "asks torch alone for memory",
    "tx_torch_cuda_library": "asks the dynamic linker alone for memory",
}

_ALLOCATES = re.compile(r"\b(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|strndup|asprintf)\s*\(")


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def public() -> set[str]:
    """Returns the functions of the public headers, but for those of the CUDA library."""
    headers = [path for path in (ROOT / "csrc").glob("torch_ext*.h") if path.name != "torch_ext_cuda.h"]
    assert len(headers) > 2
    text = "\n".join(without_comments(path.read_text()) for path in headers)
    return set(re.findall(r"^TX_API\b[^;(]*?(tx_\w+)\(", text, flags=re.MULTILINE))


def defined(room: pathlib.Path) -> set[str]:
    """Returns the functions that are defined in a folder: those with a body whose line begins without indentation."""
    found = set()
    for path in room.glob("*.c"):
        text = without_comments(path.read_text())
        found |= set(re.findall(r"^[a-z][\w \*]*?\b(tx_\w+)\([^;{}]*\)\s*\{", text, flags=re.MULTILINE))
    return found


def rows() -> set[str]:
    """Returns the functions in the tables of the out-of-memory tests."""
    files = list((ROOT / "tests/core").glob("*_out_of_memory_test.cc"))
    assert files
    return {name for path in files for name in re.findall(r'"(tx_\w+)"', path.read_text())}


def test_the_core_allocates_nothing() -> None:
    files = list((ROOT / "csrc/core").glob("*.[ch]"))
    assert len(files) > 30
    assert [path.name for path in files if _ALLOCATES.search(without_comments(path.read_text()))] == []


def test_every_other_public_function_is_in_a_table_or_says_why_not() -> None:
    rooms = [room for room in (ROOT / "csrc").iterdir() if room.is_dir() and room.name != "core"]
    elsewhere = public() - defined(ROOT / "csrc/core")
    nowhere = elsewhere - {name for room in rooms for name in defined(room)}
    assert not nowhere, f"where are they defined? {sorted(nowhere)}"
    assert elsewhere - rows() == set(REASONS), "a row in tests/core/*_out_of_memory_test.cc, or a reason here"
    assert not rows() - public(), "rows of functions that are not there"
