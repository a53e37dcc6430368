"""Folders in which anything may have been changed. A load must raise, name the file and the key, and write to no
target; or load what was saved, bit for bit. Nothing in a folder may be executed."""

import collections
import enum
import os
import pathlib
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import old_folder
import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from folders import bits, blank, load_into, loaded, names, save, state, while_metadata_is_read
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties

import torch_ext

FLIPS, OTHERS = 250, 40


def _save(rank: int, world: int, folder: str) -> None:
    for seed in (1, 2):
        mine = {f"of {rank}": state(10 * seed + rank)} | state(seed)
        dcp.save(mine, storage_writer=torch_ext.CheckpointWriter(pathlib.Path(folder) / f"{seed}"))


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folders "1" and "2" of two ranks, with the states of seeds 1 and 2."""
    folder = tmp_path_factory.mktemp("saves")
    ranks.run(2, _save, str(folder))
    return folder


def saved(seed: int) -> dict[str, Any]:
    """Returns the state that is in folder `seed` of `saves`."""
    return {f"of {rank}": state(10 * seed + rank) for rank in range(2)} | state(seed)


def data(folder: pathlib.Path) -> list[pathlib.Path]:
    found = sorted(folder.glob("__*"))
    assert len(found) == 2
    return found


def items(file: pathlib.Path) -> list[tuple[int, int, str]]:
    """Returns each item of a data file: where it begins and ends, and its key."""
    stored = dcp.FileSystemReader(file.parent).read_metadata().storage_data
    found = [(i.offset, i.offset + i.length, index.fqn) for index, i in stored.items() if i.relative_path == file.name]
    return sorted(found)


def said_of(error: BaseException, told: list[warnings.WarningMessage]) -> str:
    """Returns what a user reads of a load that failed: the error and our warnings.

    Before 2.13 torch raises "metadata is None" whatever is wrong with .metadata, so a warning of ours says it."""
    return "\n".join([str(error), *(str(one.message) for one in told)])


def refused(folder: pathlib.Path) -> str | None:
    """Loads the folder and returns the error's text; None if what was saved was loaded."""
    target = blank(saved(1))
    before = bits(target)
    with warnings.catch_warnings(record=True) as told:
        try:
            load_into(target, folder)
        except CheckpointException as error:
            assert bits(target) == before, "nothing was written to"
            (cause, _) = error.failures[0]
            assert isinstance(cause, ValueError | AssertionError), repr(cause)
            return said_of(cause, told)
    assert bits(target) == bits(saved(1)), "either it is refused, or it is what was saved"
    return None


def test_a_flipped_bit_anywhere_is_noticed_by_file_and_key(saves: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder, chosen = tmp_path / "folder", random.Random(22)
    shutil.copytree(saves / "1", folder)
    assert refused(folder) is None
    keys: collections.Counter[str] = collections.Counter()
    for file in [folder / ".metadata", *data(folder)]:
        whole, parts = file.read_bytes(), [] if file.name == ".metadata" else items(file)
        for at in [*chosen.sample(range(len(whole)), FLIPS // 3), 0, len(whole) - 1]:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chosen.randrange(8)]) + whole[at + 1 :])
            said = refused(folder)
            assert said is not None, (file.name, at)
            assert str(file) in said
            for key in (key for begin, end, key in parts if begin <= at < end):
                assert repr(key) in said
                keys[key] += 1
        file.write_bytes(whole)
    assert len(keys) > 15


def cut(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    file = chosen.choice([folder / ".metadata", *data(folder)])
    os.truncate(file, chosen.randrange(file.stat().st_size))
    return file


def longer(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    file = chosen.choice([folder / ".metadata", *data(folder)])
    file.write_bytes(file.read_bytes() + chosen.randbytes(chosen.choice([1, 10, 10000])))
    return file


def swapped(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    first, second = data(folder)
    first.rename(folder / "moved")
    second.rename(first)
    (folder / "moved").rename(second)
    return first


def of_another_save(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    rank = chosen.randrange(2)
    file = data(folder)[rank]
    shutil.copy(data(saves / "2")[rank], file)
    return file


def of_another_save_with_the_name_of_this(
    folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random
) -> pathlib.Path:
    file = of_another_save(folder, saves, chosen)
    other = next(each.name for each in data(saves / "2") if each.name[:4] == file.name[:4])
    file.write_bytes(file.read_bytes().replace(other.encode(), file.name.encode()))
    return file


def exchanged(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    """Exchanges the bytes of two items of equal length."""
    file = chosen.choice(data(folder))
    parts, raw = items(file), bytearray(file.read_bytes())
    pairs = [(a, b) for a in parts for b in parts if a < b and a[1] - a[0] == b[1] - b[0]]
    (a, b, _), (c, d, _) = chosen.choice(pairs)
    raw[a:b], raw[c:d] = raw[c:d], raw[a:b]
    file.write_bytes(raw)
    return file


def another_metadata(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    shutil.copy(saves / "2" / ".metadata", folder)
    return data(saves / "2")[0]


def without_its_last_line(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes().rsplit(b"\n", 2)[0])
    return file


def zeros(folder: pathlib.Path, saves: pathlib.Path, chosen: random.Random) -> pathlib.Path:
    """Puts zeros into a data file, like a page that was never written to the disk."""
    file = chosen.choice(data(folder))
    raw = file.read_bytes()
    at = chosen.randrange(0, len(raw), 4096)
    file.write_bytes(raw[:at] + bytes(len(raw[at : at + 4096])) + raw[at + 4096 :])
    return file


OTHER: list[Callable[[pathlib.Path, pathlib.Path, random.Random], pathlib.Path]] = [
    # Each damages a folder and returns the file that the error must name.
    cut,
    longer,
    swapped,
    of_another_save,
    of_another_save_with_the_name_of_this,
    exchanged,
    another_metadata,
    without_its_last_line,
    zeros,
]


@pytest.mark.parametrize("damage", OTHER, ids=lambda damage: damage.__name__)
def test_other_damage_is_noticed_by_file(
    damage: Callable[[pathlib.Path, pathlib.Path, random.Random], pathlib.Path],
    saves: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    for seed in range(OTHERS // len(OTHER) + 1):
        folder = tmp_path / f"{seed}"
        shutil.copytree(saves / "1", folder)
        file = damage(folder, saves, random.Random(seed))
        said = refused(folder)
        assert said is not None, seed
        assert str(folder / file.name) in said, seed


OLD = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5).to(torch.bfloat16)},
    "lr": 1e-3,
    "step": 3,
    "betas": (0.9, 0.95),
    "name": "run",
}


def test_a_folder_of_the_first_versions_loads_and_says_that_it_bears_no_checksums(tmp_path: pathlib.Path) -> None:
    old_folder.write(tmp_path / "old")
    with pytest.warns(UserWarning, match=r"old has no checksums: torch or an earlier torch_ext saved it"):
        assert bits(load_into(blank(OLD), tmp_path / "old")) == bits(OLD)
    save(OLD, tmp_path / "old")
    assert len(names(tmp_path / "old")) == 3, "its data went"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bits(load_into(blank(OLD), tmp_path / "old")) == bits(OLD)


def test_what_torch_checks_of_a_folder_without_checksums_is_checked(tmp_path: pathlib.Path) -> None:
    old_folder.write(tmp_path / "old")
    (file,) = (tmp_path / "old").glob("__0_*")
    raw = file.read_bytes()
    at = raw.index(OLD["model"]["a"].numpy().tobytes()) + 5  # type: ignore[index]
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
    target = blank(OLD)
    with pytest.raises(
        CheckpointException, match=rf"{re.escape(str(file))} is damaged: the record '\S+' of 'model\.a'"
    ):
        load_into(target, tmp_path / "old")
    assert bits(target) == bits(blank(OLD))
    assert bits(load_into(target, tmp_path / "old", check=False)) != bits(OLD)


@pytest.mark.parametrize("states", ["logical", "at_rest"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_tensor_is_refused_and_not_left_as_it_was(
    layout: torch.layout, states: str, tmp_path: pathlib.Path
) -> None:
    """torch's own writer rejects sparse tensors. Copying into a sparse target would silently change nothing."""
    save(state(1), tmp_path / "folder")
    mask = torch.eye(30).to_sparse(layout=layout)
    writer = torch_ext.CheckpointWriter(tmp_path / "folder", states=states)
    with pytest.raises(CheckpointException, match=rf"TypeError: 'model\.mask' is a tensor in {layout}; dense"):
        dcp.save(state(2) | {"model": {"mask": mask}}, storage_writer=writer, no_dist=True)
    assert loaded(tmp_path / "folder") == bits(state(1))
    target: Any = {"model": state(2)["model"], "optimizer": {"exp_avg": torch.zeros(3, 50).to_sparse(layout=layout)}}
    with pytest.raises(CheckpointException, match=rf"ValueError: 'optimizer\.exp_avg' is a tensor in {layout}; dense"):
        load_into(target, tmp_path / "folder")
    assert bits(target["model"]) == bits(state(2)["model"])


@pytest.mark.parametrize("states", ["logical", "at_rest"])
def test_tensors_of_all_kinds_come_back(states: str, tmp_path: pathlib.Path) -> None:
    values = torch.arange(30_000.0)
    kinds = {
        "strided": values.view(100, 300)[:, ::3],
        "transposed": values.view(100, 300).t(),
        "quantized": torch.quantize_per_tensor(values[:300], 1.5, 3, torch.quint8),
        "empty": torch.empty(0, 5),
        "number": torch.tensor(7.5),
        "complex": torch.complex(values[:80], values[80:160]),
        "bool": values[:200] > 77,
        "float8": (values[:200] / 9).to(torch.float8_e4m3fn),
        "unsigned": values[:300].to(torch.int32).to(torch.uint16),
    }
    writer = torch_ext.CheckpointWriter(tmp_path / "folder", states=states)
    dcp.save(dict(kinds), storage_writer=writer, no_dist=True)
    target = {key: t.clone() for key, t in kinds.items()}
    for key in target.keys() - {"quantized"}:
        target[key].zero_()
    target["quantized"].copy_(torch.zeros(300))
    load_into(target, tmp_path / "folder")
    for key, t in kinds.items():
        found = target[key]
        assert found.stride() == t.clone().stride(), key
        if t.is_quantized:
            found, t = found.int_repr(), t.int_repr()
        assert torch.equal(found.reshape(-1).view(torch.uint8), t.reshape(-1).contiguous().view(torch.uint8)), key


def test_torch_reads_the_folders_too(tmp_path: pathlib.Path) -> None:
    save(state(1), tmp_path / "folder")
    target = blank(state(1))
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "folder"), no_dist=True)
    assert bits(target) == bits(state(1))


def test_a_folder_that_python_3_11_0_to_3_11_3_saved_loads(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These Pythons (Debian 12 has one) pickle a member of an enum as an attribute of its class."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    save(state(1), tmp_path / "folder")
    assert b"getattr" in (tmp_path / "folder/.metadata").read_bytes()
    assert bits(load_into(blank(state(1)), tmp_path / "folder")) == bits(state(1))


def _as_torch_saves(later: tuple[Any, ...]) -> Callable[[TensorProperties], tuple[Any, ...]]:
    """Returns a TensorProperties.__getstate__ with these fields after the first five."""
    now = TensorProperties.__getstate__
    return lambda properties: (*now(properties)[:5], *later)  # type: ignore[misc]


# What a torch saves of a tensor's properties after the five fields that every torch saves.
FIELDS_OF_TORCH: dict[str, tuple[Any, ...]] = {
    "2.10": (),
    "2.15, without strides": (None,),
    "2.15": ((3, 1),),
    "a later one": ((3, 1), None, "more"),
}


@pytest.mark.parametrize("later", FIELDS_OF_TORCH.values(), ids=FIELDS_OF_TORCH)
def test_a_folder_that_another_torch_saved_loads(
    later: tuple[Any, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorProperties, "__getstate__", _as_torch_saves(later))
    save(state(1), tmp_path / "folder")
    assert bits(load_into(blank(state(1)), tmp_path / "folder")) == bits(state(1))


def test_an_older_torch_that_does_not_say_why_is_accompanied_by_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.13 torch's loader raises "metadata is None" whatever read_metadata raises, so a warning must say why."""
    save(state(1), tmp_path / "folder")
    without_its_last_line(tmp_path / "folder", tmp_path, random.Random(0))
    for version, warned in (("2.10.0", True), ("2.12.1+cu128", True), ("2.13.0", False), ("2.15.0a0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        with warnings.catch_warnings(record=True) as said, pytest.raises(CheckpointException):
            warnings.simplefilter("always")
            load_into(blank(state(1)), tmp_path / "folder")
        assert warned == any("/.metadata is truncated or damaged" in str(one.message) for one in said), version


class Acts:
    """Makes a folder when its pickle is executed."""

    def __init__(self, made: pathlib.Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


class Own:
    """A class of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value

    def __hash__(self) -> int:
        return self.value


def as_an_item(folder: pathlib.Path, acts: Acts) -> None:
    save({"a": torch.ones(3), "b": acts}, folder)


def as_an_item_of_torchs(folder: pathlib.Path, acts: Acts) -> None:
    dcp.save({"a": torch.ones(3), "b": acts}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def in_metadata(change: Callable[[Any, Acts], Any]) -> Callable[[pathlib.Path, Acts], None]:
    """Returns a function that saves a folder whose metadata `change` has made hostile."""

    def put(folder: pathlib.Path, acts: Acts) -> None:
        writer = dcp.FileSystemWriter(folder)
        dcp.save({"a": torch.ones(3), "b": 1}, storage_writer=writer, no_dist=True)
        metadata = dcp.FileSystemReader(folder).read_metadata()
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata, acts)))

    return put


class Attribute:
    """Pickles as an attribute of a class."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return getattr, self.what


def _planner_data(metadata: Any, acts: Acts) -> Any:
    metadata.planner_data["b"] = acts
    return metadata


def _state(metadata: Any, acts: Acts) -> Any:
    metadata.storage_meta.modules = [acts]
    return metadata


HOSTILE: dict[str, Callable[[pathlib.Path, Acts], None]] = {
    "an item of ours": as_an_item,
    "an item of torch's": as_an_item_of_torchs,
    "instead of metadata": in_metadata(lambda metadata, acts: acts),
    "in the planner's metadata": in_metadata(_planner_data),
    "in the storage's metadata": in_metadata(_state),
    "an attribute": in_metadata(lambda metadata, acts: Attribute(metadata, "planner_data")),
    "an attribute of a class": in_metadata(lambda metadata, acts: Attribute(type(metadata), "__init__")),
}


@pytest.mark.filterwarnings("ignore:.* has no checksums", "ignore:torch.distributed is disabled")
@pytest.mark.parametrize("where", HOSTILE)
def test_nothing_in_a_folder_is_executed(where: str, tmp_path: pathlib.Path) -> None:
    made = tmp_path / "made"
    HOSTILE[where](tmp_path / "folder", Acts(made))
    target = {"a": torch.zeros(3), "b": None}
    with warnings.catch_warnings(record=True) as told, pytest.raises(CheckpointException) as refusal:
        load_into(target, tmp_path / "folder")
    assert re.search(r"(?s)folder/.*weights_only=False", said_of(refusal.value, told))
    assert not made.exists()
    assert target["a"].tolist() == [0, 0, 0]  # type: ignore[union-attr]


def test_objects_of_other_classes_load_where_they_are_trusted(tmp_path: pathlib.Path) -> None:
    saved = {"a": torch.ones(3), "own": Own(3)}
    save(saved, tmp_path / "folder")
    with pytest.raises(CheckpointException, match=r"'own' is not made of tensors and plain.*\.Own\)"):
        load_into(blank(saved), tmp_path / "folder")
    assert load_into(blank(saved), tmp_path / "folder", weights_only=False)["own"] == Own(3)
    with torch.serialization.safe_globals([Own]):
        assert load_into(blank(saved), tmp_path / "folder")["own"] == Own(3)


def test_a_folder_that_is_replaced_while_it_is_loaded_gives_all_of_one_checkpoint(tmp_path: pathlib.Path) -> None:
    """Files that were checked must be read although a save has removed them in the meantime."""
    save(state(1), tmp_path / "folder")

    class Replacing(torch_ext.CheckpointReader):
        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            save(state(2), tmp_path / "folder")
            return super().prepare_global_plan(plans)

    target = blank(state(1))
    dcp.load(target, storage_reader=Replacing(tmp_path / "folder"), no_dist=True)
    assert bits(target) == bits(state(1))
    assert loaded(tmp_path / "folder") == bits(state(2))


def test_a_folder_that_is_replaced_while_its_metadata_is_read_gives_all_of_one_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    save(state(1), tmp_path / "folder")
    seeds = [2, 3]

    def another_job() -> None:
        if seeds:
            save(state(seeds.pop(0)), tmp_path / "folder")

    with while_metadata_is_read(another_job):
        assert loaded(tmp_path / "folder") == bits(state(3))


def test_ranks_that_read_different_checkpoints_are_told(tmp_path: pathlib.Path) -> None:
    save(state(1), tmp_path / "folder")

    class Other(torch_ext.CheckpointReader):
        """Adds the plans of two more ranks, one of which read the next checkpoint."""

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            other = torch_ext.CheckpointReader(tmp_path / "folder")
            save(state(2), tmp_path / "folder")
            metadata = other.read_metadata()
            other.set_up_storage_reader(metadata, False)
            return super().prepare_global_plan([*plans, *plans, other.prepare_local_plan(plans[0])])[:1]

    target = blank(state(1))
    with pytest.raises(CheckpointException, match=r"folder was saved to while it was loaded: rank 2 read another"):
        dcp.load(target, storage_reader=Other(tmp_path / "folder"), no_dist=True)
    assert bits(target) == bits(blank(state(1)))
