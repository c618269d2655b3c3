"""What all commands share: where text goes, `--json`, progress, mistakes, sizes for people.

Results go to the standard output, everything else to the standard error: progress is shown on terminals only, and gone
when the work is done. A command that finds something wrong prints what it found and raises `Wrong`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

EXIT_STATUSES = """\b
Exit status:
  0  done, and nothing is wrong
  1  something is wrong: a damaged checkpoint, ranks that cannot talk, an unreadable run
  2  a mistake in the command: an unknown option, a path that does not exist
  3  a package that this command needs is not installed; it is named
"""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


class Wrong(click.ClickException):
    """What was looked at is not right: one line, exit status 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True, file=file)


class Missing(Wrong):
    """A package is not installed: the line says how to install it, exit status 3."""

    exit_code = 3


@contextlib.contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Around imports of packages that come with an extra of this one."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Missing(f"{what} needs {error.name}: pip install 'zeroshard[{extra}]'") from error


def console() -> Console:
    """For results. Long lines are for the terminal to break: what is piped stays one line a line."""
    return Console(soft_wrap=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def say(text: str) -> None:
    """A line of plain text: nothing in it is markup."""
    console().print(text, markup=False, highlight=False)


@contextlib.contextmanager
def working(text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Shows that work goes on, and how much of it is done: call what it gives after each of `total` parts."""
    where = Console(stderr=True)
    columns: tuple[Any, ...] = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if total is not None:
        columns = (*columns[:2], BarColumn(), MofNCompleteColumn(), columns[2])
    with Progress(*columns, console=where, transient=True, disable=not where.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def size(nbytes: float) -> str:
    """Three digits and a binary unit: `513 MiB`, `1.62 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
