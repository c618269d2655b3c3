"""Whatever goes wrong while a checkpoint is written or read: the last complete one is there, and the fault is named."""

import errno
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

import zeroshard
from tests.harness import REPOSITORY, RankPools, assert_equal, run_program
from tests.zero.checkpoints import files_in, meet, pair, steps
from zeroshard import ShardError
from zeroshard.checkpoint import files, index

# ------------------------------------------------------------------------------------------ killed


SOAK = REPOSITORY / "examples" / "benchmarks" / "soak.py"


def test_killed_at_any_moment_of_a_save_a_complete_checkpoint_is_there() -> None:
    """Five of the kills of the script that is run at length by hand: a first save and later ones, in the background too."""
    finished = run_program([sys.executable, str(SOAK), "saves", "--kills", "5", "--ranks", "2"]).check()
    told = json.loads(finished.stdout)
    assert told["kills"] == 5 and not told["problems"]
    assert len(told["found"]) > 1, "kills of one kind only"


# ------------------------------------------------------------------------------------------ errors


def no_space(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def expect(words: list[str], call: Callable[[], Any]) -> None:
    with pytest.raises(ShardError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def fails_on_one_rank(rank: int, world: int, path: str) -> None:
    model, opt = pair("net", "adamw", stage=3)
    steps(model, opt, "net", range(2), rank)
    zeroshard.save(path, model, opt, extra=1)
    before = files_in(path)
    whole = zeroshard.full_state_dict(model)
    for culprit, name in ((1, "write"), (0, "write"), (0, "index_of"), (0, "replace_file")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(index if name == "index_of" else files, name, no_space)
            expect([f"rank {culprit}", "No space left"], lambda: zeroshard.save(path, model, opt, extra=2))
            saving = zeroshard.save(path, model, opt, extra=2, blocking=False)
            expect([f"rank {culprit}", "No space left"], saving.wait)
            zeroshard.save(path, model, opt, extra=2, blocking=False)
            expect([f"rank {culprit}", "No space left"], lambda: zeroshard.save(path, model, opt, extra=2))
        meet()
        assert files_in(path) == before
        steps(model, opt, "net", range(2, 3), rank)  # training can go on
    assert zeroshard.load(path, model, opt) == 1
    assert_equal(zeroshard.full_state_dict(model), whole)
    zeroshard.save(path, model, opt, extra=3)
    assert zeroshard.load(path, model, opt) == 3
    in_a_file = pathlib.Path(path).parent / "file"
    in_a_file.write_text("")
    meet()
    expect(["rank 0", "file"], lambda: zeroshard.save(in_a_file / "checkpoint", model, opt))
    expect(["rank 0", "file"], lambda: zeroshard.save(in_a_file, model, opt))


def test_an_error_on_one_rank_is_raised_on_all_and_nothing_is_lost(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(fails_on_one_rank, str(tmp_path / "checkpoint"))


# ------------------------------------------------------------------------------------------ damaged


class Harmful:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: str):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.mark, "w"))


def flip(file: pathlib.Path, other: pathlib.Path, place: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x10
    file.write_bytes(data)


def cut(file: pathlib.Path, other: pathlib.Path, place: float) -> None:
    file.write_bytes(file.read_bytes()[: int(place * (file.stat().st_size - 1))])


def remove(file: pathlib.Path, other: pathlib.Path, place: float) -> None:
    file.unlink()


def mix_up(file: pathlib.Path, other: pathlib.Path, place: float) -> None:
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(data)


def foreign(file: pathlib.Path, other: pathlib.Path, place: float) -> None:
    file.write_bytes(pickle.dumps(Harmful(str(file.parent / "harm"))) * 100)


DAMAGES = [flip, cut, remove, mix_up, foreign]


def read_damaged(rank: int, world: int, folder: str) -> None:
    path, kept = pathlib.Path(folder, "checkpoint"), pathlib.Path(folder, "kept")
    model, opt = pair("net", "adamw", stage=3)
    steps(model, opt, "net", range(2), rank)
    zeroshard.save(path, model, opt)
    zeroshard.save(kept, model, opt)
    steps(model, opt, "net", range(2, 3), rank)
    whole = zeroshard.full_state_dict(model)
    sound = {file: file.read_bytes() for file in files_in(path)}
    draw = random.Random(0)
    for damage in DAMAGES:
        for file in sound:
            others = [each for each in sound if each != file]
            other, place = draw.choice(others), draw.choice([0.0, 0.3, 0.6, 0.99, 1.0])
            mixed = re.escape(other.name) if damage is mix_up else "$^"
            meet()
            if rank == 0:
                damage(file, other, place)
            meet()
            with pytest.raises(ShardError, match=rf"{re.escape(file.name)}|{mixed}"):
                zeroshard.load(path, model, opt)
            assert not list(path.rglob("harm"))
            meet()
            if rank == 0:
                for each, data in sound.items():
                    each.write_bytes(data)
    meet()
    if rank == 0:
        shutil.copy(kept / ".metadata", path / ".metadata")
    meet()
    expect([".distcp", "cannot be read"], lambda: zeroshard.load(path, model, opt))
    assert_equal(zeroshard.full_state_dict(model), whole)  # nothing has been overwritten


def test_damaged_files_are_named_and_nothing_is_loaded(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(read_damaged, str(tmp_path))


def test_every_bit_of_the_index_counts(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(1).run(killed_never, str(tmp_path / "checkpoint"))
    path = tmp_path / "checkpoint" / ".metadata"
    data = path.read_bytes()
    index.read_index(path.parent)
    for place in [*range(0, len(data), 37), *range(len(data) - 40, len(data))]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ShardError, match=r"\.metadata"):
            index.read_index(path.parent)


def killed_never(rank: int, world: int, path: str) -> None:
    zeroshard.save(path, pair("scalars", "sgd")[0])


# ------------------------------------------------------------------------------------------ in the background


def in_the_background(rank: int, world: int, path: str) -> None:
    for stage in (0, 1, 3):
        model, opt = pair("tied", "adamw", stage=stage)
        steps(model, opt, "tied", range(2), rank)
        whole = zeroshard.full_state_dict(model)
        saving = zeroshard.save(path, model, opt, extra=stage, blocking=False)
        steps(model, opt, "tied", range(2, 4), rank)
        if stage:
            saving.wait()
            saving.wait()  # once is enough, twice does no harm
        later = zeroshard.full_state_dict(model)
        assert zeroshard.load(path, model, opt) == stage  # and waits for what nobody has waited for
        assert_equal(zeroshard.full_state_dict(model), whole)
        steps(model, opt, "tied", range(2, 4), rank)
        assert_equal(zeroshard.full_state_dict(model), later)


def test_a_save_in_the_background_has_the_values_of_the_call(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(in_the_background, str(tmp_path / "checkpoint"))


# ------------------------------------------------------------------------------------------ replaced while it is read


def replaced_while_read(rank: int, world: int, folder: str, moment: str) -> None:
    """Another job saves, and clears what it has replaced, when this one has opened the checkpoint, or read half of it."""
    path, other = pathlib.Path(folder, f"checkpoint {moment}"), pathlib.Path(folder, f"other {moment}")
    model, opt = pair("net", "adamw", stage=3)
    steps(model, opt, "net", range(1), rank)
    zeroshard.save(path, model, opt, extra="old")
    steps(model, opt, "net", range(1, 2), rank)
    zeroshard.save(other, model, opt, extra="new")
    whole = zeroshard.full_state_dict(model)
    owner, name = {"opened": (files, "damage"), "read": (index.Reader, "read_parts")}[moment]
    call, calls = getattr(owner, name), []

    def replaced(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == (1 if moment == "opened" else 3):
            meet()
            if rank == 0:
                old = next(path.glob("data-*"))
                shutil.move(next(other.glob("data-*")), path)
                os.replace(other / ".metadata", path / ".metadata")
                shutil.rmtree(old)
            meet()
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replaced)
        assert zeroshard.load(path, model, opt) == "new"
    assert_equal(zeroshard.full_state_dict(model), whole)


@pytest.mark.parametrize("moment", ["opened", "read"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    ranks: RankPools, tmp_path: pathlib.Path, moment: str
) -> None:
    ranks(2).run(replaced_while_read, str(tmp_path), moment)
