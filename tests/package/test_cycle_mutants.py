"""The simulator of the gradient cycle (tests/core/cycle_world.cc) finds each bug that once was in it, and some more.

Each is put back into csrc/core, as a change of its text."""

import pathlib
import re
import subprocess
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

PROGRAMS = 60_000
"""At most: most mutants are found by one of the first thousand."""


class Mutant(NamedTuple):
    """In `file` of csrc/core, `old` becomes `new`."""

    old: str
    new: str
    file: str = "cycle.c"


MUTANTS = {
    # Bugs that were found in the Python that this machine replaced.
    "a wait that was interrupted counts as answered": Mutant(
        "if (c->current.kind == TX_DO_RAISE) c->current.kind = TX_DO_NOTHING;",
        "if (c->current.kind == TX_DO_RAISE || c->current.kind == TX_DO_WAIT) tx_cycle_done(c, 0);",
    ),
    "what a backward that raised sent is not waited for": Mutant(
        "    if (c->n_answered < c->n_messages) return wait_for_oldest(c, TX_WAIT_DISCARD | unsure);\n",
        "    (void)unsure;\n",
    ),
    "its report is not read": Mutant(
        "    if (c->reported == 1) return hand_out(c, TX_DO_READ, 0);\n  }\n  const", "  }\n  const"
    ),
    "the next backward is in the same cycle": Mutant(
        "  c->number++;\n  c->verdict[0] = '\\0';\n", "  c->verdict[0] = '\\0';\n"
    ),
    "sums that it added are stepped": Mutant(
        "    if (c->n_messages > 0 && !c->row->given) memset(c->broken, 1, (size_t)n);\n", ""
    ),
    "gradients of which no hook told are stepped": Mutant(
        "    if (modified[i]) c->state[i] = TX_STATE_READY;\n", "    (void)modified;\n"
    ),
    "an earlier sum counts on every rank": Mutant(
        "reduced && c->args.scales_sums ? TX_PREPARE_MULTIPLY : 0", "0 * reduced"
    ),
    "an earlier part of a sum is sent again": Mutant(
        "  return reduced ? TX_PREPARE_SET_ASIDE : 0;", "  (void)reduced;\n  return 0;"
    ),
    "what was set aside is added to an assigned gradient": Mutant(
        "  if (grad != TX_GRAD_IN_PLACE) return TX_PREPARE_FORGET;", "  if (grad != TX_GRAD_IN_PLACE) return 0;"
    ),
    "an earlier sum counts again after a backward that raised": Mutant(
        "tx_tracker_bucket(c->tracker, i) < c->sent", "tx_tracker_bucket(c->tracker, i) < 0"
    ),
    "a gradient of a no_sync micro-batch is dropped": Mutant(
        "  if (held) c->state[i] |= reduced ? TX_STATE_REDUCED : TX_STATE_HELD;\n", ""
    ),
    "a block that no rank used is stepped": Mutant(
        "    c->anywhere[i] = (any &", "    c->anywhere[i] = 1 | (any &", "cycle_report.c"
    ),
    "a frozen parameter is waited for": Mutant("  tx_tracker_finish(c->tracker);\n  memcpy", "  memcpy"),
    "a rank that stepped more often is not told": Mutant(
        "c->n_steps % (TX_CYCLE_STEP / 4)", "0 * c->n_steps % (TX_CYCLE_STEP / 4)", "cycle_report.c"
    ),
    # Others.
    "a bucket is sent when any is complete": Mutant(
        "(t->remaining[t->next] > 0 && !t->finished)", "(t->remaining[t->next] > 1 && !t->finished)", "tracker.c"
    ),
    "joined buckets are sent apart on one rank": Mutant(
        "if (c->complete > c->sent && c->ends[c->complete - 1])",
        "if (c->complete > c->sent && (c->ends[c->complete - 1] || c->args.rank == 1))",
    ),
    "more is under way than there is memory for": Mutant(
        "c->slots_taken + slots > c->args.slots", "c->slots_taken + slots > 99"
    ),
    "a gradient that is not finite is forgotten": Mutant("    c->nonfinite[i] = 1;\n", "", "cycle_report.c"),
    "one rank's is not told to the others": Mutant(
        "const int64_t head[2] = {place_of(c), nonfinite};",
        "const int64_t head[2] = {place_of(c), c->args.rank ? -1 : nonfinite};",
        "cycle_report.c",
    ),
    "a missing gradient is told to one rank": Mutant(
        "!c->args.find_unused && !c->held_back", "!c->args.find_unused && !c->args.rank", "cycle_report.c"
    ),
    "sums are installed before the last one": Mutant(
        "return c->n_answered < c->n_messages ? wait_for_oldest(c, 0) : TX_DO_NOTHING;",
        "return c->n_answered + 1 < c->n_messages ? wait_for_oldest(c, 0) : TX_DO_NOTHING;",
    ),
    "DDP's last bucket is sent in spite of the verdict": Mutant(
        "return c->verdict[0] ? TX_DO_NOTHING : next_of_sending(c);", "return next_of_sending(c);"
    ),
    "a verdict leaves DDP's hook in its backward": Mutant(
        "  c->phase = TX_PHASE_IDLE;\n  if (!c->verdict[0])",
        "  c->phase = c->verdict[0] && c->row->given ? TX_PHASE_CLOSING : TX_PHASE_IDLE;\n  if (!c->verdict[0])",
    ),
    "the first cycle's order is sent every time": Mutant("      c->may_reorder = 0;\n      break;", "      break;"),
    "a step is legal after a failure for good": Mutant(
        'if (has_failed(c)) return tx_cycle_refuse(c, "step() after an exchange that failed: %s", c->failure);', ""
    ),
    "buckets are sent before the ranks agree on their order": Mutant(
        "        } else if (!c->may_reorder) {", "        } else {"
    ),
    "sums are installed before every rank's report was read": Mutant(
        "return c->row->reports == TX_REPORTS_LAST ?", "return c->row->reports == TX_REPORTS_LAST && c->args.kind ?"
    ),
    "gradients of a no_sync micro-batch are stepped": Mutant(
        "if (grads && grads[i] && (c->state[i]", "if (grads && grads[i] && (0"
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with everything but the machine's own objects."""
    folder = tmp_path_factory.mktemp("cycle")
    for name in ("program", "rank", "driver", "gradients", "world", "hunt"):
        source = ROOT / f"tests/core/cycle_{name}.cc"
        _run("g++", "-std=c++17", "-O1", *_includes(), "-c", source, "-o", folder / f"{name}.cc.o")
    for name in ("status.c", "text.c"):
        _run("gcc", "-std=c11", "-O1", *_includes(), "-c", ROOT / "csrc/core" / name, "-o", folder / f"{name}.o")
    return folder


def _includes() -> list[str]:
    return ["-I", str(ROOT), "-I", str(ROOT / "csrc")]


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _hunt(folder: pathlib.Path, mutant: Mutant | None) -> "subprocess.CompletedProcess[str]":
    objects = [*folder.glob("*.o")]
    own = folder / "mutant"
    own.mkdir(exist_ok=True)
    for name in ("cycle.c", "cycle_report.c", "tracker.c"):
        text = (ROOT / "csrc/core" / name).read_text()
        if mutant is not None and name == mutant.file:
            assert text.count(mutant.old) >= 1, "the mutant's line is not there any more: follow the change"
            text = text.replace(mutant.old, mutant.new, 1)
        (own / name).write_text(text)
        _run("gcc", "-std=c11", "-O1", *_includes(), "-c", own / name, "-o", own / f"{name}.o")
    program = own / "cycle_hunt"
    _run("g++", *objects, *own.glob("*.o"), "-o", program)
    return _run_seeds(program, 0, PROGRAMS if mutant is not None else 2000)


def _run_seeds(program: pathlib.Path, first: int, last: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([program, str(first), str(last)], capture_output=True, text=True, timeout=300)


def test_the_machine_as_it_is_has_none(built: pathlib.Path) -> None:
    assert _hunt(built, None).returncode == 0


@pytest.mark.parametrize("what", MUTANTS)
def test_the_simulator_finds_it(what: str, built: pathlib.Path) -> None:
    done = _hunt(built, MUTANTS[what])
    assert done.returncode != 0, "no program of these seeds shows it"


def _shown(found: "subprocess.CompletedProcess[str]") -> tuple[int, str, str]:
    """The seed of a failure, its program, and what that was shrunk to."""
    whole, shrunk = found.stdout.split("shrunk: ")
    return int(re.match(r"seed (\d+): ", whole)[1]), whole, shrunk  # type: ignore[index]


def test_a_failure_says_its_seed_by_which_it_is_replayed_and_is_shrunk(built: pathlib.Path) -> None:
    found = _hunt(built, MUTANTS["gradients of a no_sync micro-batch are stepped"])
    program = built / "mutant" / "cycle_hunt"
    seed, whole, shrunk = _shown(found)
    while "no_sync" not in shrunk:  # a backward that raised leaves such gradients, too
        assert "raise" in shrunk or "interrupt" in shrunk
        found = _run_seeds(program, seed + 1, PROGRAMS)
        seed, whole, shrunk = _shown(found)
    again = _run_seeds(program, seed, seed + 1)
    assert (again.returncode, again.stdout) == (1, found.stdout)
    steps = [len(re.findall(r" \d+:", text)) for text in (whole, shrunk)]
    assert 1 <= steps[1] < steps[0], "the program is shorter"
    assert "0:backward(no_sync) 1:step\n" in shrunk, "what is left is the mistake itself"
