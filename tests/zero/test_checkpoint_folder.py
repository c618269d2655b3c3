"""Where checkpoints lie: how many of a run stay, full disks and read-only folders, and what an error calls the place."""

import contextlib
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Iterator

import pytest

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.zero.checkpoints import files_in, meet, pair, steps
from zeroshard import DivergenceError, ShardError
from zeroshard.checkpoint import convert

# ------------------------------------------------------------------------------------------ keep


def names_in(folder: str) -> list[str]:
    meet()
    names = sorted(each.name for each in pathlib.Path(folder).iterdir())
    meet()
    return names


def keeps(rank: int, world: int, folder: str) -> None:
    model, opt = pair("scalars", "sgd", stage=3)

    def save(name: str, **options: object) -> None:
        saving = zeroshard.save(f"{folder}/{name}", model, opt, extra=name, **options)  # type: ignore[arg-type]
        if saving is not None:
            saving.wait()

    save("other-1")
    for number in range(8, 12):
        save(f"step-{number}", keep=2, blocking=number % 2 == 0)
    assert names_in(folder) == ["other-1", "step-10", "step-11"]  # by number, not by letters
    if rank == 0:
        for name in ("step-1", ".step-7.saving-0123abcd", ".step-6.removing", "step-9-best", ".step-x.removing"):
            pathlib.Path(folder, name, "data").mkdir(parents=True)
    save("step-9", keep=2)  # a run that went back: what is saved now stays, whatever its number
    assert names_in(folder) == [".step-x.removing", "other-1", "step-1", "step-11", "step-9", "step-9-best"]
    save("step-9", keep=1)
    assert names_in(folder) == [".step-x.removing", "other-1", "step-1", "step-9", "step-9-best"]
    assert zeroshard.load(f"{folder}/step-9", model, opt) == "step-9"
    save("last", keep=1)
    save("step-12")
    assert {"last", "step-9", "step-12"} <= set(names_in(folder))
    with pytest.raises(ShardError, match=r"keep=2.*last does not end in a number"):
        save("last", keep=2)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ShardError, match=rf"keep={wrong}.*1 or more"):
            save("step-13", keep=wrong)
    with pytest.raises(DivergenceError, match="keep 1 on rank 0 and 2 on rank 1"):
        save("step-13", keep=rank + 1)
    assert not any("13" in name for name in names_in(folder))


def test_of_a_run_the_last_ones_stay(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(keeps, str(tmp_path))


# ------------------------------------------------------------------------------------------ disks


@contextlib.contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    """The kernel refuses to make files longer: a write fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disk(rank: int, world: int, folder: str) -> None:
    path, fresh = pathlib.Path(folder, "checkpoint"), pathlib.Path(folder, "fresh")
    model, opt = pair("net", "adamw", stage=3)
    steps(model, opt, "net", range(1), rank)
    zeroshard.save(path, model, opt, extra="old")
    before = files_in(folder)
    whole = zeroshard.full_state_dict(model)
    steps(model, opt, "net", range(1, 2), rank)
    for culprit, nbytes in ((1, 1000), (0, 1000), (1, 5)):
        for target in (path, fresh):
            limit = no_file_above(nbytes) if rank == culprit else contextlib.nullcontext()
            with limit, pytest.raises(ShardError, match=rf"rank {culprit}: {target} cannot be written: File too large"):
                zeroshard.save(target, model, opt)
            meet()
            assert files_in(folder) == before
    limit = no_file_above(100) if rank == 0 else contextlib.nullcontext()
    with limit, pytest.raises(ShardError, match=rf"{folder}/model cannot be written: File too large"):
        zeroshard.export(model, f"{folder}/model")
    meet()
    assert files_in(folder) == before
    steps(model, opt, "net", range(2, 3), rank)  # training goes on
    assert zeroshard.load(path, model, opt) == "old"
    assert_equal(zeroshard.full_state_dict(model), whole)


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(full_disk, str(tmp_path))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def read_only(rank: int, world: int, folder: str) -> None:
    path = pathlib.Path(folder, "checkpoint")
    model, opt = pair("net", "adamw", stage=3)
    zeroshard.save(path, model, opt, extra="old")
    before = files_in(folder)
    meet()
    for each in (path, path.parent):
        each.chmod(0o555)
    meet()
    with as_nobody():
        for target in (path, path.with_name("fresh")):
            with pytest.raises(ShardError, match=rf"{target} cannot be written: Permission denied"):
                zeroshard.save(target, model, opt)
        with pytest.raises(ShardError, match=r"model cannot be written: Permission denied"):
            zeroshard.export(model, path.with_name("model"))
        steps(model, opt, "net", range(1), rank)
        assert zeroshard.load(path, model, opt) == "old"
    meet()
    assert files_in(folder) == before


def test_a_read_only_folder_is_named_and_can_be_loaded_from(ranks: RankPools) -> None:
    folder = tempfile.mkdtemp()  # others may not enter pytest's own folders
    try:
        os.chmod(folder, 0o755)
        ranks(2).run(read_only, folder)
    finally:
        shutil.rmtree(folder)


def test_what_converts_names_the_folder_it_was_given(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(1).run(saved, str(tmp_path / "step[1]"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardError, match=r"file/out cannot be written: Not a directory"):
        convert.to_safetensors(tmp_path / "step[1]", tmp_path / "file" / "out")
    convert.to_safetensors(tmp_path / "step[1]", tmp_path / "out")
    with pytest.raises(ShardError, match=r"file/back cannot be written: Not a directory"):
        convert.from_safetensors(tmp_path / "out", tmp_path / "file" / "back")


def saved(rank: int, world: int, path: str) -> None:
    left = pathlib.Path(path).with_name(f".{pathlib.Path(path).name}.saving-01234567")
    left.mkdir()
    zeroshard.save(path, pair("scalars", "sgd")[0])
    assert not left.exists()
