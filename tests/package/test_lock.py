"""Tests that the lock files, requirements.txt and tests/requirements.txt, belong to the lists that people edit,
*.in."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "bazel"))

import lock_requirements  # noqa: E402

LISTS = list(lock_requirements.INPUTS)


def lock_of(name: str) -> str:
    return (ROOT / name).with_suffix(".txt").read_text()


def listed(name: str) -> set[str]:
    lines = (ROOT / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


@pytest.mark.parametrize("name", LISTS)
def test_a_lock_is_made_of_its_list(name: str) -> None:
    assert lock_of(name).startswith(lock_requirements.header(ROOT / name)), "run bazel/lock_requirements.py"


@pytest.mark.parametrize("name", LISTS)
def test_what_is_listed_is_locked_with_its_version(name: str) -> None:
    pins = {
        pin.split(" ;")[0] for other in LISTS[: LISTS.index(name) + 1] for pin in lock_requirements.pins(lock_of(other))
    }
    wanted = {pin for pin in listed(name) if not lock_requirements.OF_TORCH.match(pin.split("==")[0])}
    assert wanted and wanted <= pins


@pytest.mark.parametrize("name", LISTS)
def test_every_package_is_pinned_with_hashes(name: str) -> None:
    found = lock_requirements.pins(lock_of(name))
    assert len(found) > 20
    for pin, block in found.items():
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ; .+)?", pin), pin
        assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", block.splitlines()[1]), pin


def test_no_list_locks_what_another_one_does() -> None:
    pins = [pin for name in LISTS for pin in lock_requirements.pins(lock_of(name))]
    assert len(pins) == len(set(pins))


def test_the_one_package_without_hashes_is_torch() -> None:
    """torch is not locked, since its bytes differ between package indexes: setup.sh reads its version from the list."""
    assert [pin for name in LISTS for pin in listed(name) if lock_requirements.OF_TORCH.match(pin.split("==")[0])] == [
        *(pin for pin in listed("requirements.in") if pin.startswith("torch=="))
    ]
