"""`zeroshard doctor`: is this machine ready, and how fast do ranks talk on it?"""

from __future__ import annotations

import dataclasses

import click
from rich.table import Table
from rich.text import Text

from ..config import ShardError, launched_ranks
from . import comm, machine, terminal
from .machine import Finding, Machine
from .terminal import Wrong, json_option, print_json, say, size, working

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Start no ranks and measure nothing.")
@json_option
def doctor_command(quick: bool, as_json: bool) -> None:
    """Says what is installed, what this machine is like for ranks, how fast they talk, and what to fix.

    By itself it starts two ranks on this machine, for a few seconds. Started by a launcher it measures the ranks it was
    started with, on all nodes:

    \b
      torchrun --nproc-per-node 4 -m zeroshard doctor
    """
    speed, tells, failure = None, True, None
    if not quick:
        ranks = launched_ranks()
        with working("measuring two ranks" if ranks == 1 else f"measuring {ranks} ranks"):
            try:
                speed, tells = comm.measure()
            except ShardError as error:
                failure = str(error)
    if not tells:
        return
    here = machine.look()
    findings = machine.judge(here)
    if failure is not None:
        remedy = "check GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, MASTER_ADDR and firewalls"
        findings.insert(0, Finding("error", failure, remedy))
    if as_json:
        measured = None if speed is None else dataclasses.asdict(speed)
        print_json({**here.as_dict(), "speed": measured, "findings": [dataclasses.asdict(each) for each in findings]})
    else:
        _show(here, speed, findings)
    errors = [each.what for each in findings if each.level == "error"]
    if errors:
        raise Wrong("; ".join(errors))


def _show(here: Machine, speed: comm.Speed | None, findings: list[Finding]) -> None:
    console, table = terminal.console(), Table(box=None, show_header=False)
    installed = [f"{name} {version}" for name, version in here.packages.items() if version is not None]
    missing = [name for name, version in here.packages.items() if version is None]
    shm = "none" if here.shm_bytes is None else f"{size(here.shm_bytes)} free"
    locked = "unlimited" if here.locked_bytes is None else size(here.locked_bytes)
    rows = {
        "python": here.python,
        "installed": ", ".join(installed),
        "not installed": ", ".join(missing) or "nothing",
        "backends": ", ".join(here.backends) or "none",
        "devices": ", ".join(here.devices) or "CPU only",
        "cores": f"{here.cores} usable, {here.physical_cores} physical; torch computes with {here.threads} threads",
        "memory": f"{size(here.memory_bytes)}, {size(here.available_bytes)} available",
        "/dev/shm": shm,
        "limits": f"{here.open_files:,} open files, {locked} of locked memory",
        "network": f"gloo takes {here.interface or 'no interface'} (host {here.host})",
        "environment": ", ".join(f"{name}={value}" for name, value in here.environment.items()) or "nothing set",
    }
    if speed is not None:
        rows["ranks"] = (
            f"{speed.ranks} on {speed.backend}, {speed.device}: gather {speed.gather_bytes_per_s / 1e9:.2f} GB/s, "
            f"reduce-scatter {speed.reduce_bytes_per_s / 1e9:.2f} GB/s sent by each, latency {speed.latency_s * 1e6:,.0f} µs"
        )
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", Text(value))
    console.print(table, highlight=False)
    for each in findings:
        console.print(f"[{_STYLES[each.level]}]{each.level}[/]: ", end="")
        say(f"{each.what}. To do: {each.remedy}")
    if not findings:
        say("nothing to fix")
