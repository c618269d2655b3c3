"""The command `zeroshard` and what it does, in the order of its help."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .checkpoints import convert_command, inspect_command
from .doctor import doctor_command
from .estimate import estimate_command
from .report import report_command
from .terminal import EXIT_STATUSES

NAME = "zeroshard"


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_STATUSES)
@click.version_option(package_name="zeroshard")
def commands() -> None:
    """Training with sharded states, from the shell: this machine, memory beforehand, runs, checkpoints."""


@commands.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Prints what completes this command in SHELL with the tab key.

    \b
    bash:  eval "$(zeroshard completion bash)"   in ~/.bashrc
    zsh:   eval "$(zeroshard completion zsh)"    in ~/.zshrc
    fish:  zeroshard completion fish > ~/.config/fish/completions/zeroshard.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(commands, {}, NAME, "_ZEROSHARD_COMPLETE").source())


for command in (doctor_command, estimate_command, report_command, inspect_command, convert_command):
    commands.add_command(command)
