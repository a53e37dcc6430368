"""Tests that the simulator of Muon's rounds (tests/core/muon_world.cc) finds bugs. Each test puts one of them into
csrc/core by replacing source text."""

import pytest
from mutants import Mutant, Simulator

_EXCHANGE = "muon_exchange.c"

MUTANTS = {
    "a round's momentum is sent after its products": Mutant("{TX_MUON_GATHER, 1},", "{TX_MUON_GATHER, 0},", _EXCHANGE),
    "one rank installs before it sends": Mutant(
        "const int64_t round = x->turn + kSteps[x->step].after;",
        "const int64_t round = x->turn + kSteps[x->step].after * (kSteps[x->step].kind == 6 ? 1 - x->args.rank : 1);",
        _EXCHANGE,
    ),
    "a parameter is stepped with the last matrix of the last owner": Mutant(
        "x->last[param] = most(x->last[param], at - x->first[r]);", "x->last[param] = at - x->first[r];", _EXCHANGE
    ),
    "a parameter of which a matrix failed is stepped": Mutant(
        "const int failed = (x->state[param] & TX_MUON_FAILED) != 0;", "const int failed = 0;", _EXCHANGE
    ),
    "the last matrix that failed is named": Mutant("matrix < x->failed", "matrix > x->failed", _EXCHANGE),
    "there are as many rounds as the last rank has matrices": Mutant(
        "x->n_rounds = most(x->n_rounds, x->first[r + 1]);", "x->n_rounds = x->first[r + 1];", _EXCHANGE
    ),
    "a part ends where its rank's does": Mutant(
        "least(run.end, m->begin + m->rows * m->columns)", "run.end", _EXCHANGE
    ),
    "updates are not planned for": Mutant("      x->held += parts_bytes(x, round);\n", "", _EXCHANGE),
    "what is sent is not planned for": Mutant(
        "x->held += own_bytes(x, round) + parts_bytes(x, round);", "x->held += own_bytes(x, round);", _EXCHANGE
    ),
    "momentum is planned in the dtype of no parameter": Mutant(
        "x->item[m->param] = (uint8_t)item_bytes(m);", "x->item[m->param] = 2;", _EXCHANGE
    ),
    "plans of other parameters have one fingerprint": Mutant(
        "const int64_t of[] = {ids[i], ", "(void)ids;\n    const int64_t of[] = {", _EXCHANGE
    ),
}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    made = Simulator("muon", tmp_path_factory.mktemp("muon"), ("world", "hunt"), (_EXCHANGE, "owners.c"))
    made.compile_core("status.c", "text.c", "muon_rules.c", "muon_iteration.c")
    return made


def test_the_machine_as_it_is_has_none(simulator: Simulator) -> None:
    assert simulator.hunt(None).returncode == 0


@pytest.mark.parametrize("what", MUTANTS)
def test_the_simulator_finds_it(what: str, simulator: Simulator) -> None:
    assert simulator.hunt(MUTANTS[what]).returncode != 0, "no program of these seeds shows it"
