"""For each fuzz target a bug that it has to find, and with which of its kept inputs it does."""

import pathlib
import shutil
from typing import NamedTuple

import fuzzing
from clang_sources import ROOT
from fuzzing import CORPUS, Found


class Mutant(NamedTuple):
    """A bug: in `file`, the first `old` is replaced by `new`."""

    file: str
    old: str
    new: str


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


def build(target: str, folder: pathlib.Path) -> pathlib.Path:
    """Builds the target's program with its mutant. folder: where fuzzing.build() left the objects of the others."""
    mutant = MUTANTS[target]
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) >= 1, f"{mutant.file} has the mutant's line no more: follow the change"
    own = folder / f"{target}.mutant"
    own.mkdir()
    (source,) = [source for source in fuzzing.sources() if source.path == mutant.file]
    changed = fuzzing.compile_source(source, own, text.replace(mutant.old, mutant.new, 1))
    objects = [changed, *(folder / f"{each.name}.o" for each in fuzzing.sources() if each != source)]
    return fuzzing.link(folder / f"{target}_fuzz.o", objects, own / target)


def run_kept(target: str, program: pathlib.Path) -> Found:
    """Runs the kept inputs alone, so that the same bug is found every time."""
    return fuzzing.run(target, program, 0, program.parent / "grown")


def keep_one(target: str, program: pathlib.Path, seconds: float, seed: int) -> bool:
    """If no kept input of the target finds its mutant, searches for one, and keeps it. Returns whether one finds it
    now."""
    if run_kept(target, program).problem:
        return True
    grown = program.parent / "grown"
    fuzzing.run(target, program, seconds, grown, seed)
    for found in grown.glob("crash-*"):
        shutil.copy(found, CORPUS / target / fuzzing.MUTANT_INPUT)
    return bool(run_kept(target, program).problem)
