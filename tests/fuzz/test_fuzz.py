"""Fuzz targets find nothing in the library as it is, and each finds a bug that is inserted into it.

`bash tests/fuzz.sh SECONDS` runs them for longer. Their kept inputs are also tests of the ordinary build
(//tests/fuzz:NAME_fuzz)."""

import pathlib
from collections.abc import Iterator

import fuzz_mutants
import fuzzing
import pytest
from fuzz_mutants import MUTANTS
from fuzzing import Found

SECONDS = 10.0
"""For all targets together."""

pytestmark = pytest.mark.skipif(bool(fuzzing.why_not()), reason=fuzzing.why_not())


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
    """The results of running the kept inputs of each target against its mutant; by target."""
    folder, _ = built
    found = fuzzing.in_parallel(
        lambda target: fuzz_mutants.run_kept(target, fuzz_mutants.build(target, folder)), list(MUTANTS)
    )
    return {one.target: one for one in found}


@pytest.mark.parametrize("target", MUTANTS)
def test_a_kept_input_finds_the_bug_that_is_put_in(target: str, found_mutants: dict[str, Found]) -> None:
    assert found_mutants[target].problem, f"`bash tests/fuzz.sh 60 --mutants --targets {target}` searches an input"
