"""The command `zeroshard`. Nothing of it is imported with the library."""

from __future__ import annotations

import sys

from ..config import ShardError


def main() -> None:
    """The console script. A mistake is answered by one line on the standard error; `zeroshard --help` lists the statuses."""
    try:
        from .commands import NAME, commands
    except ModuleNotFoundError as error:
        print(f"error: the command zeroshard needs {error.name}: pip install click rich", file=sys.stderr)
        sys.exit(3)
    try:
        commands(prog_name=NAME)
    except (ShardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
