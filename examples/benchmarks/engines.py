"""Engines side by side on one model: step time and peak memory, as ratios to one process without communication.

    python examples/benchmarks/engines.py --out results --rounds 5
    python examples/benchmarks/engines.py --rows base bf16 --engines single ddp zeroshard-3

Every round runs every engine once, one after the other, so that a slow minute of the machine hits all of them; ratios are
taken within a round, and what is printed is their median and spread. Writes engines.json and engines.png. Engines that are
not installed are left out, and said to be. Run it on a quiet machine: the load is printed, and kept in the JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

WORKER = pathlib.Path(__file__).resolve().with_name("worker.py")
ENGINES = ["single", "ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3", "zeroshard-1", "zeroshard-2", "zeroshard-3"]
ROWS: dict[str, tuple[int, list[str]]] = {  # number of ranks, options of worker.py
    "base": (2, []),
    "1 rank": (1, []),
    "4 ranks": (4, ["--batch", "1"]),
    "bf16": (2, ["--bf16"]),
    "accumulation 4": (2, ["--accumulate", "4", "--batch", "1"]),
    "LoRA": (2, ["--lora"]),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has deepspeed")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    return parser.parse_args()


def run(engine: str, world: int, extra: list[str], args: argparse.Namespace) -> dict[str, Any] | None:
    """One run in processes of its own; `None` if it failed."""
    python = args.deepspeed_python if engine.startswith("deepspeed") else sys.executable
    launcher = [] if engine == "single" else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    sizes = ["--width", args.width, "--depth", args.depth, "--steps", args.steps]
    command = [python, *launcher, str(WORKER), engine, *map(str, sizes), *extra]
    paths = [str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    if not lines:
        print(f"{engine} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    result = json.loads(lines[-1])
    return {
        "seconds": statistics.median(max(times) for times in zip(*(r["seconds"] for r in result["ranks"]), strict=True)),
        "peak_bytes": max(r["peak_bytes"] for r in result["ranks"]),
        "steady_bytes": max(r["steady_bytes"] for r in result["ranks"]),
        "loss": statistics.mean(r["losses"][-1] for r in result["ranks"]),
    }


def available(engine: str, args: argparse.Namespace) -> bool:
    if not engine.startswith("deepspeed") or args.deepspeed_python != sys.executable:
        return True
    return importlib.util.find_spec("deepspeed") is not None


def summary(rounds: list[dict[str, dict[str, Any]]], engine: str) -> dict[str, Any] | None:
    """Medians, and ratios to `single` of the same round with their smallest and largest value."""
    mine = [r for r in rounds if engine in r]
    if not mine:
        return None
    found: dict[str, Any] = {"loss": mine[-1][engine]["loss"], "rounds": len(mine)}
    for name in ("seconds", "peak_bytes", "steady_bytes"):
        found[name] = statistics.median(r[engine][name] for r in mine)
        ratios = [r[engine][name] / r["single"][name] for r in mine if "single" in r]
        found[f"{name}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)] if ratios else None
    return found


def table(row: str, results: dict[str, Any]) -> str:
    lines = [f"{row:<16}{'step s':>8}{'ratio':>8}{'spread':>15}{'peak MiB':>10}{'ratio':>8}{'loss':>11}"]
    for engine, seen in results.items():
        time_ratio, low, high = seen["seconds_ratio"] or (float("nan"),) * 3
        memory_ratio = (seen["peak_bytes_ratio"] or [float("nan")])[0]
        spread = f"{low:.2f} to {high:.2f}"
        lines.append(
            f"{engine:<16}{seen['seconds']:>8.3f}{time_ratio:>8.2f}{spread:>15}{seen['peak_bytes'] / 2**20:>10.0f}"
            f"{memory_ratio:>8.2f}{seen['loss']:>11.6f}"
        )
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(results), figsize=(1 + 3.2 * len(results), 7), squeeze=False, layout="constrained")
    for column, (row, engines) in enumerate(results.items()):
        for line, (name, title) in enumerate([("seconds", "step time"), ("peak_bytes", "peak memory")]):
            ax, shown = axes[line][column], {e: s for e, s in engines.items() if s[f"{name}_ratio"]}
            middle = [s[f"{name}_ratio"][0] for s in shown.values()]
            spread = [[m - s[f"{name}_ratio"][1] for m, s in zip(middle, shown.values(), strict=True)]]
            spread += [[s[f"{name}_ratio"][2] - m for m, s in zip(middle, shown.values(), strict=True)]]
            colors = ["tab:orange" if engine.startswith("zeroshard") else "tab:gray" for engine in shown]
            ax.barh(list(shown), middle, xerr=spread, color=colors, error_kw={"elinewidth": 1})
            ax.axvline(1, color="black", linewidth=0.8)
            ax.invert_yaxis()
            ax.set_title(f"{row}: {title}", fontsize=10)
            ax.set_xlabel("ratio to one process")
            if column:
                ax.set_yticklabels([])
    figure.savefig(path, dpi=130)


def main() -> None:
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    engines = [engine for engine in args.engines if available(engine, args)]
    for engine in sorted(set(args.engines) - set(engines)):
        print(f"{engine}: not installed, left out")
    report: dict[str, Any] = {"load_before": os.getloadavg(), "cpus": os.cpu_count(), "rows": {}}
    print("load", " ".join(f"{load:.1f}" for load in os.getloadavg()))
    for row in args.rows:
        world, extra = ROWS[row]
        rounds = []
        for _ in range(args.rounds):
            runs = {engine: run(engine, world, extra, args) for engine in engines}
            rounds.append({engine: seen for engine, seen in runs.items() if seen is not None})
        results = {engine: seen for engine in engines if (seen := summary(rounds, engine)) is not None}
        report["rows"][row] = {"world": world, "options": extra, "engines": results, "rounds": rounds}
        print(table(row, results), flush=True)
        (args.out / "engines.json").write_text(json.dumps(report, indent=1))
    plot({row: seen["engines"] for row, seen in report["rows"].items()}, args.out / "engines.png")
    print(f"wrote {args.out / 'engines.json'} and {args.out / 'engines.png'}")


if __name__ == "__main__":
    main()
