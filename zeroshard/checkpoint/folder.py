"""The folder of a checkpoint: where a save goes, how it takes the place of what was there, and which older ones go."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from ..config import ShardError
from . import files, index


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """An OSError inside names `path`, what the caller gave, and not the hidden folder that is written first."""
    try:
        yield
    except OSError as error:
        raise ShardError(f"{path} cannot be written: {error.strerror or error}. What was there before is kept") from error


class Folder:
    """Where a save goes. Rank 0 alone makes, renames and removes anything but the ranks' own files.

    root: the checkpoint's folder if it exists, where the index is renamed over the old one; otherwise a hidden folder beside
    it, which is renamed to it: so a first save that is broken off leaves nothing under the checkpoint's own name.
    """

    def __init__(self, path: pathlib.Path, save_id: str, exists: bool | None = None):
        self.path, self.save_id = path, save_id
        self.exists = path.exists() if exists is None else exists
        self.root = path if self.exists else path.with_name(f".{path.name}.saving-{save_id}")
        self.data_folder, self.published = f"data-{save_id}", False

    def prepare(self) -> None:
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.saving-*"):
            shutil.rmtree(left, ignore_errors=True)
        if self.exists:
            self._remove_data_except(self._in_use())
        (self.root / self.data_folder).mkdir(parents=True)

    def _in_use(self) -> set[str]:
        """Data folders of the checkpoint that is there; all of them if that cannot be told."""
        try:
            there = index.read_index(self.path)
        except ShardError:
            unreadable = (self.path / index.INDEX).exists()
            return {folder.name for folder in self.path.glob("data-*")} if unreadable else set()
        return {info.relative_path.split("/")[0] for info in there.metadata.storage_data.values()}

    def _remove_data_except(self, keep: set[str]) -> None:
        for folder in self.path.glob("data-*"):
            if folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, content: bytes) -> None:
        files.sync_folder(self.root / self.data_folder)
        files.replace_file(self.root / index.INDEX, content)
        self.published = self.exists
        files.sync_folder(self.root)
        if not self.exists:
            os.rename(self.root, self.path)
            self.published = True
            files.sync_folder(self.path.parent)

    def clear_replaced(self) -> None:
        self._remove_data_except({self.data_folder})

    def discard(self, place: int) -> None:
        if place == 0 and not self.published:
            shutil.rmtree(self.root / self.data_folder if self.exists else self.root, ignore_errors=True)


class Series:
    """The checkpoints of one run: paths that differ only in the number they end in."""

    def __init__(self, path: pathlib.Path, keep: int):
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ShardError(f"keep={keep!r}: expected how many checkpoints stay, 1 or more, or None")
        numbered = re.fullmatch(r"(.*?)(\d+)", path.name)
        if numbered is None and keep > 1:
            raise ShardError(
                f"keep={keep}: {path} does not end in a number. Give each checkpoint a path of its own, like {path.name}-200; "
                "saving to one path again replaces what is there"
            )
        self.path, self.keep = path, keep
        self._stem = None if numbered is None else re.escape(numbered[1])

    def clear_leftovers(self) -> None:
        """What saves and removals that were broken off have left beside the path."""
        if self._stem is not None and self.path.parent.is_dir():
            for left in self.path.parent.iterdir():
                if re.fullmatch(rf"\.{self._stem}\d+\.(saving-[0-9a-f]+|removing)", left.name):
                    shutil.rmtree(left, ignore_errors=True)

    def remove_oldest(self) -> None:
        """Leaves the path, and the `keep - 1` others of the highest numbers. What is no complete checkpoint is left alone."""
        others = self._others()
        for old in others[: max(len(others) - self.keep + 1, 0)]:
            gone = old.with_name(f".{old.name}.removing")
            try:
                os.rename(old, gone)
            except OSError as error:
                text = f"{self.path} is saved, but {old}, which keep={self.keep} removes, stays: {error.strerror or error}"
                raise ShardError(text) from error
            shutil.rmtree(gone, ignore_errors=True)

    def _others(self) -> list[pathlib.Path]:
        if self._stem is None:
            return []
        found = [(re.fullmatch(rf"{self._stem}(\d+)", each.name), each) for each in self.path.parent.iterdir()]
        numbered = [(int(match[1]), each) for match, each in found if match is not None and each != self.path]
        return [each for _, each in sorted(numbered) if _is_complete(each)]


def _is_complete(path: pathlib.Path) -> bool:
    try:
        return index.read_index(path).files is not None
    except ShardError:
        return False
