"""IncrementalWeights: every version in the folder has the trainer's bits, at whatever point a save was interrupted."""

import os
import pathlib
import random
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_sync import Trainer, weights

import torch_ext


def loaded(folder: pathlib.Path, version: int | None = None) -> tuple[int, dict[str, Tensor]]:
    tensors = {name: torch.zeros_like(t) for name, t in weights(Trainer().model).items()}
    return torch_ext.load_weights(folder, tensors, version=version), tensors


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name].view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8)) for name in a)


def saved(folder: pathlib.Path, versions: int, full_every: int = 3) -> dict[int, dict[str, Tensor]]:
    """Saves that many versions to the folder; returns the weights of each."""
    trainer = Trainer()
    saver = torch_ext.IncrementalWeights(folder, trainer.publisher, full_every=full_every)
    found = {}
    for version in range(1, versions + 1):
        trainer.step()
        saver.save()
        found[version] = weights(trainer.model)
    return found


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[list[pathlib.Path]]:
    """Yields a list of copies of the folder "weights": one before and one after each file operation of a save."""
    found: list[pathlib.Path] = []
    copying, opened = False, open

    def copied() -> None:
        nonlocal copying
        if not copying and (tmp_path / "weights").is_dir():
            found.append(tmp_path / f"moment {len(found)}")
            copying = True  # copytree calls the watched functions too
            shutil.copytree(tmp_path / "weights", found[-1])
            copying = False

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if real is opened and not str(arguments[0]).startswith(f"{tmp_path / 'weights'}{os.sep}"):
                return real(*arguments, **options)
            copied()
            result = real(*arguments, **options)
            copied()
            return result

        return call

    for name in ("rename", "unlink", "fsync", "makedirs"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr("builtins.open", watched(open))
    yield found
    monkeypatch.undo()


@pytest.mark.parametrize(("seed", "policy"), [(0, "bf16"), (1, "8bit"), (2, "fp32"), (3, "bf16")])
def test_a_kill_at_any_moment_leaves_a_version(
    seed: int, policy: str, moments: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """Random steps, external writes, saves, missed saves and restarts. A copy of the folder at some moment is what a
    kill at that moment would leave."""
    draw = random.Random(seed)
    # Per save: number of moments at its begin and at its end, weights.
    truth: list[tuple[int, int, dict[str, Tensor]]] = []
    for _ in range(2):  # two jobs in succession
        trainer = Trainer(policy, exact=draw.random() < 0.5)
        saver = torch_ext.IncrementalWeights(tmp_path / "weights", trainer.publisher, full_every=draw.choice([1, 2, 5]))
        for _ in range(draw.randrange(2, 6)):
            trainer.step(draw.randrange(3))
            if draw.random() < 0.3:
                with torch.no_grad():
                    trainer.params[draw.randrange(len(trainer.params))].mul_(1.25)
            if draw.random() < 0.2:
                trainer.publisher.publish()  # a version that is not saved
            begun = len(moments)
            saver.save(trainer.publisher.publish() if draw.random() < 0.5 else None)
            truth.append((begun, len(moments), weights(trainer.model)))
    assert len(moments) > 40
    for at, folder in enumerate(list(moments)):
        done = [values for _, end, values in truth if end <= at][-1:]
        under_way = [values for begun, end, values in truth if begun <= at < end]
        tensors = {name: torch.full_like(t, 3.0) for name, t in truth[0][2].items()}
        try:
            torch_ext.load_weights(folder, tensors)
        except (FileNotFoundError, ValueError) as error:
            assert not done, f"moment {at}: {error}"
        else:
            assert any(same(values, tensors) for values in done + under_way), f"moment {at} has another version"


def test_each_version_since_the_last_full_one_loads(tmp_path: pathlib.Path) -> None:
    truth = saved(tmp_path, 8)
    for version in (6, 7, 8):
        number, tensors = loaded(tmp_path, version)
        assert number == version and same(tensors, truth[version])
    assert loaded(tmp_path)[0] == 8
    with pytest.raises(ValueError, match=r"no version up to 5"):
        loaded(tmp_path, 5)
    with pytest.raises(ValueError, match=r"version 9 is not there: .*00000009.0of1\.\* is missing"):
        loaded(tmp_path, 9)
    with pytest.raises(FileNotFoundError, match="no weights that"):
        loaded(tmp_path.parent)


def test_damage_is_named_and_changes_no_weight(tmp_path: pathlib.Path) -> None:
    """Every file is damaged by bit flips, truncation, extension, or another file's content."""
    draw, truth = random.Random(1), saved(tmp_path / "good", 7, full_every=4)
    names = sorted(name for name in os.listdir(tmp_path / "good") if not name.endswith("run000001"))
    assert [name[-5:] for name in names] == [".full", "delta", "delta", "delta"]
    for round_ in range(40 * len(names)):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        name = names[round_ % len(names)]
        file = tmp_path / "bad" / name
        raw = bytearray(file.read_bytes())
        kind = draw.choice(["flip", "cut", "swap", "longer"])
        if kind == "flip":
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del raw[draw.randrange(len(raw)) :]
        elif kind == "longer":
            raw += b"\0" * draw.randrange(1, 9)
        else:
            raw[:] = (tmp_path / "bad" / draw.choice([other for other in names if other != name])).read_bytes()
        file.write_bytes(raw)
        like = {key: torch.full_like(t, 2.0) for key, t in truth[7].items()}
        with pytest.raises(ValueError) as caught:
            torch_ext.load_weights(tmp_path / "bad", like)
        assert name in str(caught.value), (kind, str(caught.value))
        assert all(bool((t == 2.0).all()) for t in like.values())
        version = int(name.split(".")[2])
        if version > 4:
            assert f"version {version - 1} can be loaded" in str(caught.value)
            number, tensors = loaded(tmp_path / "bad", version - 1)
            assert number == version - 1 and same(tensors, truth[version - 1])


def test_files_that_are_gone_are_named(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "good", 7, full_every=4)
    for name in os.listdir(tmp_path / "good"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        (tmp_path / "bad" / name).unlink()
        if name.endswith("00000007.0of1.delta"):  # then it is as if that version had never been saved
            assert loaded(tmp_path / "bad")[0] == 6
        else:
            with pytest.raises(ValueError, match="missing") as caught:
                loaded(tmp_path / "bad")
            assert re.sub("(000001|full|delta)$", "*", name) in str(caught.value)
        shutil.rmtree(tmp_path / "bad")


def test_another_job_takes_the_folder_over(tmp_path: pathlib.Path) -> None:
    first, second = Trainer(), Trainer()
    one = torch_ext.IncrementalWeights(tmp_path, first.publisher, full_every=100)
    one.save()
    first.step()
    one.save()
    other = torch_ext.IncrementalWeights(tmp_path, second.publisher)
    second.step(2)
    other.save()
    for _ in range(2):
        first.step()
        with pytest.raises(RuntimeError, match="another job has begun to save there"):
            one.save()
    assert len(os.listdir(tmp_path)) == 2, "what the first one saved is gone when the second one's weights are there"
    number, tensors = loaded(tmp_path)
    assert number == 1 and same(tensors, weights(second.model))


def test_a_file_that_somebody_removed_is_followed_by_all_weights(tmp_path: pathlib.Path) -> None:
    trainer = Trainer()
    saver = torch_ext.IncrementalWeights(tmp_path / "weights", trainer.publisher)
    for _ in range(2):
        trainer.step()
        saver.save()
    shutil.rmtree(tmp_path / "weights")
    trainer.step()
    saver.save()
    number, tensors = loaded(tmp_path / "weights")
    assert number == 3 and same(tensors, weights(trainer.model))


def test_what_is_saved_serves_engines_too(tmp_path: pathlib.Path) -> None:
    trainer = Trainer()
    engine = weights(trainer.model)
    subscriber = torch_ext.WeightSubscriber(engine)
    saver = torch_ext.IncrementalWeights(tmp_path, trainer.publisher)
    for turn in range(4):
        trainer.step()
        subscriber.apply(saver.save(trainer.publisher.publish() if turn % 2 else None))
    assert same(engine, weights(trainer.model)) and same(loaded(tmp_path)[1], engine)


def test_wrong_arguments_write_nothing(tmp_path: pathlib.Path) -> None:
    trainer = Trainer()
    for full_every in (0, -1, True, 1.5, "2"):
        with pytest.raises(ValueError, match="full_every is"):
            torch_ext.IncrementalWeights(tmp_path, trainer.publisher, full_every=full_every)  # type: ignore[arg-type]
    saver = torch_ext.IncrementalWeights(tmp_path, trainer.publisher)
    old = trainer.publisher.publish()
    trainer.step()
    trainer.publisher.publish()
    with pytest.raises(ValueError, match="has just returned"):
        saver.save(old)
    with pytest.raises(ValueError, match="no delta|damaged|delta"):
        saver.save(b"nothing")
    assert os.listdir(tmp_path) == []


def test_weights_of_another_model_are_refused(tmp_path: pathlib.Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises((ValueError, RuntimeError), match=str(tmp_path)):
        torch_ext.load_weights(tmp_path, {"other": torch.zeros(3, dtype=torch.bfloat16)})
