"""Fuzz targets find nothing in the library as it is, and each finds a bug that is inserted into it.

`bash tests/fuzz.sh SECONDS` runs them for longer. Their kept inputs are also tests of the ordinary build
(//tests/fuzz:NAME_fuzz)."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import fuzzing
import pytest
from clang_sources import ROOT
from fuzzing import Found

SECONDS = 10.0
"""For all targets together."""

MUTANT_SECONDS = 20.0
"""At most, for one mutant. The kept inputs find nearly all mutants."""

pytestmark = pytest.mark.skipif(bool(fuzzing.why_not()), reason=fuzzing.why_not())


class Mutant(NamedTuple):
    """A bug: in `file`, the first `old` is replaced by `new`."""

    file: str
    old: str
    new: str


# For each target, a bug that it has to find.
MUTANTS = {
    "adamw": Mutant("csrc/ops/adamw_check.c", "if (scales.numel != wanted ||", "if (scales.numel > wanted ||"),
    "bucket": Mutant("csrc/ops/bucket_check.c", " || tensors[i].numel > bucket.numel - offsets[i])", ")"),
    "cast": Mutant("csrc/ops/form_check.c", "if (scales.numel == wanted &&", "if (scales.numel >= wanted - 1 &&"),
    "compress": Mutant("csrc/ops/compress.c", "return outside == 0;", "return outside >= 0;"),
    "cycle": Mutant("csrc/core/cycle.c", "if (bucket < 0 || bucket >= c->args.n_buckets)", "if (bucket < 0)"),
    "delta": Mutant("csrc/core/delta_part.c", " || bytes > n - at)", ")"),
    "dtype": Mutant("csrc/core/dtype.c", "if (length >= capacity) return 0;", "if (length > capacity) return 0;"),
    "layout": Mutant(
        "csrc/core/layout.c", "if (out->buckets) out->buckets[out", "if (out->places) out->buckets[1 + out"
    ),
    "masters": Mutant(
        "csrc/ops/master_check.c",
        'check_same_numel("remainders", remainders, "masters"',
        'check_same_numel("remainders", masters, "masters"',
    ),
    "memory": Mutant("csrc/core/memory.c", "? INT64_MAX : sum;", "? sum : sum;"),
    "muon": Mutant("csrc/ops/muon_check.c", "if (scales.numel == wanted &&", "if (scales.numel >= wanted - 1 &&"),
    "nccl_compare": Mutant(
        "csrc/nccl/nccl_log.c", "(operation - 1) % TX_NCCL_RECORDS", "operation % (TX_NCCL_RECORDS + 1)"
    ),
    "planes": Mutant("csrc/ops/planes_layout.c", " || tx_planes_head_bytes(numel) > message.numel)", ")"),
    "publish": Mutant("csrc/ops/delta_segment_code.c", "> TX_DELTA_BOUND_MOST &&", "> TX_DELTA_BOUND_MOST + 1 &&"),
    "policy": Mutant("csrc/core/policy_fields.c", "x >= low : x > low", "x >= low : x >= low"),
    "staged": Mutant("csrc/ops/staged.c", "if (is_copied_down(a, p.tensor))", "if (is_copied_down(a, 0))"),
    "stats": Mutant(
        "csrc/ops/stats.c", "if (non_finite && (!stats->first_bad || i + 1 < stats->first_bad))", "if (non_finite)"
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pathlib.Path, dict[str, pathlib.Path]]]:
    """The folder of the object files, and the program of each target."""
    folder = tmp_path_factory.mktemp("fuzz")
    yield folder, fuzzing.build(folder, fuzzing.targets())


@pytest.fixture(scope="module")
def found(built: tuple[pathlib.Path, dict[str, pathlib.Path]]) -> dict[str, Found]:
    folder, programs = built
    return fuzzing.run_all(programs, SECONDS, folder)


@pytest.mark.parametrize("target", fuzzing.targets())
def test_a_target_finds_nothing(target: str, found: dict[str, Found]) -> None:
    assert not found[target].problem, found[target].problem
    assert found[target].runs > 50


def test_every_target_has_kept_inputs_and_a_mutant() -> None:
    assert sorted(MUTANTS) == fuzzing.targets()
    assert all(any((fuzzing.CORPUS / target).iterdir()) for target in fuzzing.targets())


@pytest.fixture(scope="module")
def found_mutants(built: tuple[pathlib.Path, dict[str, pathlib.Path]]) -> dict[str, Found]:
    """The results of running each target against its mutant; by target."""
    folder, _ = built
    return {one.target: one for one in fuzzing.in_parallel(lambda target: _find(target, folder), list(MUTANTS))}


def _find(target: str, folder: pathlib.Path) -> Found:
    mutant = MUTANTS[target]
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) >= 1, f"{mutant.file} has the mutant's line no more: follow the change"
    own = folder / f"{target}.mutant"
    own.mkdir()
    (source,) = [source for source in fuzzing.sources() if source.path == mutant.file]
    changed = fuzzing.compile_source(source, own, text.replace(mutant.old, mutant.new, 1))
    objects = [changed, *(folder / f"{each.name}.o" for each in fuzzing.sources() if each != source)]
    program = fuzzing.link(folder / f"{target}_fuzz.o", objects, own / target)
    return fuzzing.run(target, program, MUTANT_SECONDS, own / "grown")


@pytest.mark.parametrize("target", MUTANTS)
def test_a_target_finds_the_bug_that_is_put_in(target: str, found_mutants: dict[str, Found]) -> None:
    assert found_mutants[target].problem, "it was not found"
