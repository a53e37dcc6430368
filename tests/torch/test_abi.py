"""Definitions that must agree across languages: the package's ctypes mirrors and numbers with the C headers, the
operator schemas of C with torch's, and published schemas with those of today."""

import ctypes
import importlib
import pathlib
import pkgutil
import re
import shutil
import subprocess
from typing import Any, Literal, Union, get_args

import pytest
import torch

import torch_ext
from torch_ext.native import constants, library, ops
from torch_ext.optim.muon.matrix_exchange import Do
from torch_ext.parallel import cycle
from torch_ext.policy import policy_struct
from torch_ext.policy.policy_fields import Field, PolicyFields

HEADERS = pathlib.Path(torch_ext.__file__).parent.parent / "csrc"


def mirrors() -> list[type[library.Struct]]:
    """Imports the whole package and returns every ctypes mirror of a C struct."""
    for module in pkgutil.walk_packages(torch_ext.__path__, "torch_ext."):
        if module.name != "torch_ext.__main__":
            importlib.import_module(module.name)
    found: list[type[library.Struct]] = []
    waiting: list[type[library.Struct]] = [library.Struct]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            found.append(kind)
    return found


MIRRORS = mirrors()
# Headers whose enums have other names in the package, or are not in it.
ELSEWHERE = {"torch_ext_delta.h", "torch_ext_cuda.h"}
NUMBERS = {name: value for name, value in vars(constants).items() if name.isupper()}


def printed(folder: pathlib.Path, lines: list[str]) -> list[list[str]]:
    """Compiles and runs a C program with the headers and these statements; returns the words of each line that it
    prints. Skips the test if there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to compare the package with the header")
    public = ["torch_ext.h", "torch_ext_cuda.h", "torch_ext_cycle.h", "torch_ext_delta.h"]
    includes = ["<stdio.h>", *(f'"csrc/{name}"' for name in public), '"csrc/math/checksum.h"']
    text = [*(f"#include {file}" for file in includes), "int main(void) {", *lines, "  return 0;", "}", ""]
    (folder / "print.c").write_text("\n".join(text))
    subprocess.run(
        [compiler, "-I", HEADERS.parent, "-I", HEADERS, "-o", folder / "print", folder / "print.c"], check=True
    )
    output = subprocess.run([folder / "print"], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in output.splitlines()]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Returns the (offset, size) of every mirrored field as the C compiler sees it, and (0, size) of every struct."""
    lines = []
    for kind in MIRRORS:
        lines.append(f'  printf("{kind.c_name} 0 %zu\\n", sizeof({kind.c_name}));')
        for name, *_ in kind._fields_:
            where, size = f"offsetof({kind.c_name}, {name})", f"sizeof((({kind.c_name} *)0)->{name})"
            lines.append(f'  printf("{kind.c_name}.{name} %zu %zu\\n", {where}, {size});')
    found = printed(tmp_path_factory.mktemp("layout"), lines)
    return {name: (int(offset), int(size)) for name, offset, size in found}


@pytest.mark.parametrize("kind", MIRRORS, ids=lambda k: k.c_name)
def test_a_mirror_agrees_with_the_header_field_by_field(
    kind: type[library.Struct], layout: dict[str, tuple[int, int]]
) -> None:
    assert ctypes.sizeof(kind) == layout[kind.c_name][1]
    for name, *_ in kind._fields_:
        field = getattr(kind, name)
        assert (field.offset, field.size) == layout[f"{kind.c_name}.{name}"], name


@pytest.mark.parametrize("kind", MIRRORS, ids=lambda k: k.c_name)
def test_a_mirror_leaves_no_field_out(kind: type[library.Struct]) -> None:
    """Bytes that no field covers must be padding (before a larger field or at the end), never a forgotten field."""
    end = 0
    for name, *_ in kind._fields_:
        field = getattr(kind, name)
        assert field.offset - end < 8, f"a gap of {field.offset - end} bytes before {name}"
        end = field.offset + field.size
    assert ctypes.sizeof(kind) - end < ctypes.alignment(kind)


def test_mirrors_are_found() -> None:
    assert {"tx_error", "tx_policy", "tx_layout_args", "tx_scale"} <= {kind.c_name for kind in MIRRORS}


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_numbers_agree_with_the_header(tmp_path: pathlib.Path) -> None:
    lines = [f'  printf("{name} %lld\\n", (long long)TX_{name});' for name in NUMBERS]
    assert {name: int(value) for name, value in printed(tmp_path, lines)} == NUMBERS


def test_numbers_of_the_cycle_agree_with_the_header(tmp_path: pathlib.Path) -> None:
    """The package lists these names in the order of the header's enums."""
    kinds = ("NO_SHARD", "OPTIM", "OPTIM_GRADS", "UNITS", "DDP_HOOK")
    grads = ("NONE", "IN_PLACE", "OTHER")
    phases = ("IDLE", "ACCUMULATING", "REDUCING", "CLOSING", "RECOVERING")
    ours = {f"CYCLE_{name}": getattr(cycle, name) for name in kinds}
    ours |= {f"GRAD_{name}": getattr(cycle, f"GRAD_{name}") for name in grads}
    ours |= {f"PHASE_{name}": getattr(cycle, name) for name in phases}
    ours |= {f"PREPARE_{flag.name}": flag.value for flag in cycle.Prepare}
    ours |= {f"DO_{name.upper() or 'NOTHING'}": i for i, name in enumerate(cycle.DO)}
    ours |= {"SEND_STEP": cycle.STEP_WHEN_REDUCED, "WAIT_DISCARD": cycle.DISCARD}
    lines = [f'  printf("{name} %lld\\n", (long long)TX_{name});' for name in ours]
    assert {name: int(value) for name, value in printed(tmp_path, lines)} == ours
    header = (HEADERS / "torch_ext_cycle.h").read_text()
    assert set(re.findall(r"^  TX_(\w+) = ", header, re.MULTILINE)) <= set(ours)


def test_what_the_exchange_of_matrices_does_next_is_the_headers() -> None:
    """The package's enum `Do` has the names and values of the header's tx_muon_do."""
    (body,) = re.findall(r"enum tx_muon_do \{(.*?)\}", (HEADERS / "torch_ext_muon_exchange.h").read_text(), re.DOTALL)
    header = {name: int(number) for name, number in re.findall(r"\bTX_MUON_(\w+) = (\d+)", body)}
    assert header == {"DONE": 0} | {do.name: do.value for do in Do}


def test_every_number_of_an_enum_is_there() -> None:
    """If the package has one value of a header's enum, it must have all of them: a value that is added to the header is
    added to the package too."""
    text = "".join(path.read_text() for path in HEADERS.glob("torch_ext*.h") if path.name not in ELSEWHERE)
    header = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    enums = [
        set(re.findall(r"\bTX_(\w+) = ", body)) for body in re.findall(r"typedef enum \w+ \{(.*?)\}", header, re.DOTALL)
    ]
    known = [names for names in enums if names & NUMBERS.keys() and "OK" not in names]
    assert known and all(names <= NUMBERS.keys() for names in known)


# -- schemas -----------------------------------------------------------------------------------------------------------

# The published schemas. New operators may be added, and new trailing arguments with defaults; nothing listed here ever
# changes.
PUBLISHED = """
adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] masters, Tensor(e!)[] scales, Tensor(f!)[] steps, Tensor[] lrs, Tensor groups, Tensor meta, Tensor grad_scale, Tensor clip_coef, Tensor found_inf, Tensor(g!) skipped, int seed=0, int moment_rounding=1, int weight_rounding=1
grad_stats_(Tensor[] grads, Tensor(a!) stats, Tensor(b!) first_bad
grad_norm_(Tensor stats, Tensor grad_scale, float max_norm, Tensor(a!) norm, Tensor(b!) clip_coef, Tensor(c!) found_inf
bucket_pack_(Tensor[] grads, Tensor offsets, Tensor(a!) bucket, Tensor(b!) scales, int seed=0, int step=0, int rounding=1
bucket_accumulate_(Tensor(a!)[] main_grads, Tensor[] grads
bucket_reduce_(Tensor[] chunks, Tensor[] scales, Tensor(a!) shard, Tensor(b!) stats, float scale=1.0, bool accumulate=False
bucket_unpack_(Tensor bucket, Tensor scales, Tensor offsets, Tensor(a!)[] tensors
cast_(Tensor[] srcs, Tensor(a!)[] dsts, Tensor[] src_scales, Tensor(b!)[] dst_scales, Tensor meta, int format=0, int rounding=0, int seed=0, int step=0
master_encode_(Tensor[] masters, Tensor(a!)[] params, Tensor(b!)[] remainders
master_decode_(Tensor[] params, Tensor[] remainders, Tensor(a!)[] masters
master_resync_(Tensor[] params, Tensor(a!)[] masters, Tensor(b!) changed, bool force=False, bool check=False
adamw_flat_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, Tensor slices, Tensor[] lrs, Tensor groups, Tensor meta, Tensor grad_scale, Tensor clip_coef, Tensor found_inf, Tensor(c!) skipped, int seed=0, int moment_rounding=1, int weight_rounding=1, int on_external_write=0
master_checksum_(Tensor[] params, Tensor(a!)[] masters, Tensor(b!)[] checksums, Tensor(c!) stale, int action=0
""".strip().split("\n")  # noqa: E501


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.split("(")[0])
def test_schemas_only_grow(published: str) -> None:
    schema = library.operators()[published.split("(")[0]]
    assert schema.startswith(published)
    added = schema[len(published) :].removesuffix(") -> ()")
    assert all("=" in argument for argument in added.split(", ")[1:]), f"a new argument without a default: {added}"


@pytest.mark.parametrize("name", library.operators())
def test_torch_knows_the_schema_of_the_table(name: str) -> None:
    overload = getattr(torch.ops.torch_ext, name).default
    assert overload._schema == torch._C.parse_schema("torch_ext::" + library.operators()[name])
    assert not any(str(a.type).startswith("Optional") or a.name == "self" for a in overload._schema.arguments)


def test_operators_carry_the_compile_tag_where_torch_can_set_it() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    for name in library.operators():
        tags = getattr(torch.ops.torch_ext, name).default.tags
        assert (torch.Tag.pt2_compliant_tag in tags) == (version >= (2, 12))


# -- the helpers that call the library ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status, kind",
    [
        (100, ValueError),
        (102, ValueError),
        (200, ValueError),
        (201, TypeError),
        (205, RuntimeError),
        (300, MemoryError),
        (302, RuntimeError),
    ],
)
def test_a_status_becomes_an_exception_with_the_message(status: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="what and where"):
        library.check(status, library.Error(b"what and where"))
    library.check(0, library.Error())


def test_a_library_of_another_build_is_named() -> None:
    for call, name in (
        (lambda: library.function("tx_of_later"), "tx_of_later"),
        (lambda: ops.call("of_later_"), "torch_ext::of_later_"),
    ):
        with pytest.raises(ImportError, match="built from other sources") as refusal:
            call()
        assert f"{torch_ext.library_path()} has no {name}: " in str(refusal.value)


# -- the types that checkers see ----------------------------------------------------------------------------------


def type_of(row: Any) -> Any:
    """Returns the Python type of a policy field, computed from the library's table."""
    if row.type == constants.FIELD_ENUM:
        kind: Any = Literal[tuple(choice for choice in row.choices if choice is not None)]  # type: ignore[valid-type]
    else:
        kind = {
            constants.FIELD_F64: float,
            constants.FIELD_I64: int,
            constants.FIELD_I32: int,
            constants.FIELD_DTYPE: torch.dtype,
            constants.FIELD_BOOL: bool,
            constants.FIELD_TEXT: str,
        }[row.type]
    resolved = row.name == "main_grads_dtype"  # None is legal as a setting only; the resolved value is always a dtype
    return Union[kind, None] if None in row.choices and not resolved else kind  # noqa: UP007


def test_the_annotations_are_the_fields_of_the_library() -> None:
    fields = {name: value for name, value in vars(PolicyFields).items() if isinstance(value, Field)}
    assert list(fields) == [row.name for row in policy_struct.rows()]
    policy = torch_ext.load_policy(torch.bfloat16)
    for row in policy_struct.rows():
        (annotated,) = get_args(fields[row.name].__orig_class__)
        assert annotated == type_of(row), row.name
        assert fields[row.name].__doc__ and getattr(policy, row.name) == policy._values[row.name]
        with pytest.raises(AttributeError, match="frozen"):
            setattr(policy, row.name, None)
