"""Tests that the simulator of the gradient cycle (tests/core/cycle_world.cc) finds bugs: those that the cycle once had,
and some more. Each test puts one of them into csrc/core by replacing source text."""

import re
import subprocess

import pytest
from mutants import PROGRAMS, Mutant, Simulator


def mutant(old: str, new: str, file: str = "cycle.c") -> Mutant:
    return Mutant(old, new, file)


MUTANTS = {
    # Bugs that were found in the Python code that this state machine replaced.
    "a wait that was interrupted counts as answered": mutant(
        "if (c->current.kind == TX_DO_RAISE) c->current.kind = TX_DO_NOTHING;",
        "if (c->current.kind == TX_DO_RAISE || c->current.kind == TX_DO_WAIT) tx_cycle_done(c, 0);",
        "cycle_actions.c",
    ),
    "what a backward that raised sent is not waited for": mutant(
        "    if (c->n_answered < c->n_messages) return wait_for_oldest(c, TX_WAIT_DISCARD | unsure);\n",
        "    (void)unsure;\n",
        "cycle_actions.c",
    ),
    "its report is not read": mutant(
        "    if (c->reported == 1) return hand_out(c, TX_DO_READ, 0);\n  }\n  const", "  }\n  const", "cycle_actions.c"
    ),
    "the next backward is in the same cycle": mutant(
        "  c->number++;\n  c->verdict[0] = '\\0';\n", "  c->verdict[0] = '\\0';\n", "cycle_actions.c"
    ),
    "sums that it added are stepped": mutant(
        "    if (c->n_messages > 0 && !c->row->given) memset(c->broken, 1, (size_t)n);\n", "", "cycle_actions.c"
    ),
    "gradients of which no hook told are stepped": mutant(
        "    if (modified[i]) c->state[i] = TX_STATE_READY;\n", "    (void)modified;\n"
    ),
    "an earlier sum counts on every rank": mutant(
        "reduced && c->args.scales_sums ? TX_PREPARE_MULTIPLY : 0", "0 * reduced"
    ),
    "an earlier part of a sum is sent again": mutant(
        "  return reduced ? TX_PREPARE_SET_ASIDE : 0;", "  (void)reduced;\n  return 0;"
    ),
    "what was set aside is added to an assigned gradient": mutant(
        "  if (grad != TX_GRAD_IN_PLACE) return TX_PREPARE_FORGET;", "  if (grad != TX_GRAD_IN_PLACE) return 0;"
    ),
    "an earlier sum counts again after a backward that raised": mutant(
        "tx_tracker_bucket(c->tracker, i) < c->sent", "tx_tracker_bucket(c->tracker, i) < 0", "cycle_actions.c"
    ),
    "a gradient of a no_sync micro-batch is dropped": mutant(
        "  if (held) c->state[i] |= reduced ? TX_STATE_REDUCED : TX_STATE_HELD;\n", ""
    ),
    "a block that no rank used is stepped": mutant(
        "    c->anywhere[i] = (any &", "    c->anywhere[i] = 1 | (any &", "cycle_report.c"
    ),
    "a frozen parameter is waited for": mutant(
        "  tx_tracker_finish(c->tracker);\n  memcpy", "  memcpy", "cycle_actions.c"
    ),
    "a rank that stepped more often is not told": mutant(
        "c->n_steps % (TX_CYCLE_STEP / 4)", "0 * c->n_steps % (TX_CYCLE_STEP / 4)", "cycle_report.c"
    ),
    "what was complete when a backward raised is not sent": mutant(
        "const int sends = !c->row->given", "const int sends = 0 && !c->row->given", "cycle_actions.c"
    ),
    # Other bugs.
    "a bucket is sent when any is complete": mutant(
        "(t->remaining[t->next] > 0 && !t->finished)", "(t->remaining[t->next] > 1 && !t->finished)", "tracker.c"
    ),
    "joined buckets are sent apart on one rank": mutant(
        "if (c->complete > c->sent && c->ends[c->complete - 1])",
        "if (c->complete > c->sent && (c->ends[c->complete - 1] || c->args.rank == 1))",
        "cycle_actions.c",
    ),
    "more is under way than there is memory for": mutant(
        "c->slots_taken + slots > c->args.slots", "c->slots_taken + slots > 99", "cycle_actions.c"
    ),
    "a gradient that is not finite is forgotten": mutant("    c->nonfinite[i] = 1;\n", "", "cycle_report.c"),
    "one rank's is not told to the others": mutant(
        "const int64_t head[2] = {place_of(c), nonfinite};",
        "const int64_t head[2] = {place_of(c), c->args.rank ? -1 : nonfinite};",
        "cycle_report.c",
    ),
    "a missing gradient is told to one rank": mutant(
        "!c->args.find_unused && !c->held_back", "!c->args.find_unused && !c->args.rank", "cycle_report.c"
    ),
    "sums are installed before the last one": mutant(
        "return c->n_answered < c->n_messages ? wait_for_oldest(c, 0) : TX_DO_NOTHING;",
        "return c->n_answered + 1 < c->n_messages ? wait_for_oldest(c, 0) : TX_DO_NOTHING;",
        "cycle_actions.c",
    ),
    "DDP's last bucket is sent in spite of the verdict": mutant(
        "return c->verdict[0] ? TX_DO_NOTHING : next_of_sending(c);", "return next_of_sending(c);", "cycle_actions.c"
    ),
    "a verdict leaves DDP's hook in its backward": mutant(
        "  c->phase = TX_PHASE_IDLE;\n  if (!c->verdict[0])",
        "  c->phase = c->verdict[0] && c->row->given ? TX_PHASE_CLOSING : TX_PHASE_IDLE;\n  if (!c->verdict[0])",
        "cycle_actions.c",
    ),
    "the first cycle's order is sent every time": mutant(
        "      c->may_reorder = 0;\n      break;", "      break;", "cycle_actions.c"
    ),
    "a step is legal after a failure for good": mutant(
        'if (tx_cycle_has_failed(c)) return tx_cycle_refuse(c, "%s after',
        'if (0) return tx_cycle_refuse(c, "%s after',
        "cycle_step.c",
    ),
    "buckets are sent before the ranks agree on their order": mutant(
        "        } else if (!c->may_reorder) {", "        } else {", "cycle_actions.c"
    ),
    "sums are installed before every rank's report was read": mutant(
        "return c->row->reports == TX_REPORTS_LAST ?",
        "return c->row->reports == TX_REPORTS_LAST && c->args.kind ?",
        "cycle_actions.c",
    ),
    "gradients of a no_sync micro-batch are stepped": mutant(
        "if (grads && grads[i] && (c->state[i]", "if (grads && grads[i] && (0", "cycle_step.c"
    ),
    "a step that was interrupted half-way is forgotten": mutant(
        "  tx_cycle_fail(c, kUnfinished);\n", "  (void)kUnfinished;\n", "cycle_step.c"
    ),
    "weights that an interrupted step gathers are not waited for": mutant(
        "if (c->n_gathered == c->n_gathers || tx_cycle_has_failed(c)) return;",
        "if (c->number >= 0) return;",
        "cycle_actions.c",
    ),
    "gathers of the next step take the place of those that have not come": mutant(
        "if (c->n_gathered == c->n_gathers) c->n_gathered", "if (c->n_gathers > 1) c->n_gathered", "cycle_step.c"
    ),
}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    parts = ("program", "rank", "driver", "gradients", "world", "hunt")
    core = ("cycle.c", "cycle_actions.c", "cycle_step.c", "cycle_report.c", "tracker.c")
    made = Simulator("cycle", tmp_path_factory.mktemp("cycle"), parts, core)
    made.compile_core("status.c", "text.c")
    return made


def test_the_machine_as_it_is_has_none(simulator: Simulator) -> None:
    assert simulator.hunt(None).returncode == 0


@pytest.mark.parametrize("what", MUTANTS)
def test_the_simulator_finds_it(what: str, simulator: Simulator) -> None:
    done = simulator.hunt(MUTANTS[what])
    assert done.returncode != 0, "no program of these seeds shows it"


def _shown(found: "subprocess.CompletedProcess[str]") -> tuple[int, str, str]:
    """Returns the seed of a failure, its program, and the shrunk program."""
    whole, shrunk = found.stdout.split("shrunk: ")
    return int(re.match(r"seed (\d+): ", whole)[1]), whole, shrunk  # type: ignore[index]


def test_a_failure_says_its_seed_by_which_it_is_replayed_and_is_shrunk(simulator: Simulator) -> None:
    found = simulator.hunt(MUTANTS["gradients of a no_sync micro-batch are stepped"])
    seed, whole, shrunk = _shown(found)
    while "no_sync" not in shrunk:  # a backward that raised leaves such gradients too, so it also shows this bug
        assert "raise" in shrunk or "interrupt" in shrunk
        found = simulator.run_seeds(seed + 1, PROGRAMS)
        seed, whole, shrunk = _shown(found)
    again = simulator.run_seeds(seed, seed + 1)
    assert (again.returncode, again.stdout) == (1, found.stdout)
    steps = [len(re.findall(r" \d+:", text)) for text in (whole, shrunk)]
    assert 1 <= steps[1] < steps[0], "the program is shorter"
    assert "0:backward(no_sync) 1:step\n" in shrunk, "what is left is the mistake itself"
