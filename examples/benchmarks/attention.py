"""Attention over split sequences beside torch's fused kernel and beside other rings: time and memory, as ratios.

    python examples/benchmarks/attention.py --out results --rounds 5
    python examples/benchmarks/attention.py --rows "causal 8k" memory --rounds 3 --scale 0.25

Every round of a row runs every contender once, one after the other, so that a slow minute of the machine hits all of
them; ratios are taken within a round, and what is printed is their median and spread. In all rows 8 heads of 64, fp32,
forward and backward; the rings have 2 ranks of one thread, `fused` is one process of two threads on the whole sequence.

causal      ratio to the fused kernel's time.
others      the same beside other rings, in one round, with peak bytes above the inputs. Those that are not installed are
            left out, and said to be.
documents,  ratio to the floor: the fused kernel's time at causal attention of that length, times the part of its pairs
window      that the mask lets through.
memory      peak bytes per rank above the inputs, ratio to those of one rank.

Writes attention.json and attention.png. Run it on a quiet machine: the load is printed, and kept in the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

WORKER = pathlib.Path(__file__).resolve().with_name("attention_worker.py")
MODULES = {
    "ringmaster": "ringmaster",
    "ringmaster-balanced": "ringmaster",
    "ring-attention-pytorch": "ring_attention_pytorch",
}
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Row:
    seq_len: int
    options: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ("fused", "ring")
    floor: bool = False  # compare with the work that the mask leaves, instead of all
    brief: bool = False  # one round of one call, and the memory
    target: float | None = None


ROWS = {
    "causal 8k": Row(8192, target=1.00),
    "causal 32k": Row(32768, target=0.97),
    "documents": Row(16384, ("--documents", "1024"), floor=True, target=1.10),
    "window": Row(16384, ("--window", "1024"), floor=True, target=1.30),
    "others": Row(8192, contenders=("fused", "ring", *MODULES), brief=True, target=1.00),
}
MEMORY_ROW, MEMORY_WORLDS = Row(8192), (1, 2, 4, 8)
MEMORY_TARGETS = {4: 0.45, 8: 0.225}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[*ROWS, "memory"], choices=[*ROWS, "memory"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of a contender in a round; the fastest counts")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for a quick look")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    return parser.parse_args()


def run(contender: str, world: int, row: Row, args: argparse.Namespace, *extra: str) -> dict[str, Any] | None:
    """One run in processes of its own; `None` if it failed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    seq_len, threads = int(row.seq_len * args.scale), 1
    own = list(row.options)
    if contender == "fused":
        launcher, threads, own = [], world, []
    command = [sys.executable, *launcher, str(WORKER), contender, "--seq-len", str(seq_len), "--threads", str(threads)]
    paths = [str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command += ["--repeats", str(1 if row.brief else args.repeats), *own, *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"contender"')]
    if not lines:
        print(f"{contender} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    ranks = json.loads(lines[-1])["ranks"]
    seen: dict[str, Any] = {"visible_pairs": ranks[0]["visible_pairs"], "causal_pairs": seq_len * (seq_len + 1) // 2}
    if "seconds" in ranks[0]:
        seen["seconds"] = min(max(times) for times in zip(*(r["seconds"] for r in ranks), strict=True))
        seen["checksum"] = sum(r["checksum"] for r in ranks)
    else:
        seen["peak_bytes"] = max(r["peak_bytes"] for r in ranks)
    return seen


def timed(row: Row, contenders: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Medians of all rounds, and ratios within a round with their smallest and largest value."""
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(1 if row.brief else args.rounds):
        rounds.append({})
        for contender in contenders:
            seen = run(contender, 2, row, args)
            if seen is not None:
                rounds[-1][contender] = seen
                print(f"round {number} {contender}: {seen['seconds']:.3f} s", flush=True)
    found: dict[str, Any] = {}
    for contender in contenders:
        mine = [r for r in rounds if contender in r and "fused" in r]
        if not mine:
            continue
        part = mine[0][contender]["visible_pairs"] / mine[0][contender]["causal_pairs"] if row.floor else 1.0
        ratios = [r[contender]["seconds"] / (r["fused"]["seconds"] * part) for r in mine]
        memory = run(contender, 2, row, args, "--memory") if row.brief else None
        found[contender] = {
            "seconds": statistics.median(r[contender]["seconds"] for r in mine),
            "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
            "part_of_pairs": part,
            "checksum": mine[0][contender]["checksum"],
            "peak_bytes": None if memory is None else memory["peak_bytes"],
        }
    return {"seq_len": int(row.seq_len * args.scale), "target": row.target, "contenders": found, "rounds": rounds}


def table(name: str, seen: dict[str, Any]) -> str:
    lines = [f"{name:<24}{'seconds':>9}{'ratio':>8}{'spread':>15}{'target':>8}{'peak MiB':>10}"]
    for contender, of in seen["contenders"].items():
        middle, low, high = of["ratio"]
        target = f"{seen['target']:.2f}" if contender == "ring" else ""
        peak = "-" if of["peak_bytes"] is None else f"{of['peak_bytes'] / MIB:.0f}"
        spread = f"{low:.2f} to {high:.2f}"
        lines.append(f"{contender:<24}{of['seconds']:>9.3f}{middle:>8.2f}{spread:>15}{target:>8}{peak:>10}")
    return "\n".join(lines)


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of the busiest rank by number of ranks, and ratios to one rank."""
    peaks = {world: run("ring", world, MEMORY_ROW, args, "--memory") for world in MEMORY_WORLDS}
    held = {world: seen["peak_bytes"] for world, seen in peaks.items() if seen is not None}
    print(f"{'memory per rank':<24}{'peak MiB':>9}{'ratio':>8}{'target':>8}")
    for world, peak in held.items():
        target = f"{MEMORY_TARGETS[world]:.3f}" if world in MEMORY_TARGETS else ""
        print(f"{f'{world} ranks':<24}{peak / MIB:>9.1f}{peak / held[1]:>8.3f}{target:>8}")
    return {"seq_len": int(MEMORY_ROW.seq_len * args.scale), "peak_bytes": held}


def plot(rows: dict[str, Any], held: dict[str, Any] | None, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num = len(rows) + (held is not None)
    figure, axes = pyplot.subplots(1, num, figsize=(1 + 3.4 * num, 3.2), squeeze=False, layout="constrained")
    for ax, (name, seen) in zip(axes[0], rows.items(), strict=False):
        found = seen["contenders"]
        middle = [of["ratio"][0] for of in found.values()]
        spread = [[of["ratio"][0] - of["ratio"][1] for of in found.values()]]
        spread += [[of["ratio"][2] - of["ratio"][0] for of in found.values()]]
        colors = ["tab:orange" if contender == "ring" else "tab:gray" for contender in found]
        ax.barh(list(found), middle, xerr=spread, color=colors, error_kw={"elinewidth": 1})
        ax.axvline(seen["target"], color="black", linewidth=0.8, linestyle="--")
        ax.invert_yaxis()
        ax.set_title(f"{name}, {seen['seq_len']:,} tokens", fontsize=10)
        ax.set_xlabel("time over the fused kernel's" + (" floor" if name in ("documents", "window") else ""))
    if held is not None:
        ax, peaks = axes[0][-1], held["peak_bytes"]
        worlds = list(peaks)
        ax.plot(worlds, [peak / peaks[1] for peak in peaks.values()], "o-", color="tab:orange", label="ring")
        ax.plot(worlds, [1 / world for world in worlds], color="tab:gray", label="1/N")
        ax.plot(list(MEMORY_TARGETS), list(MEMORY_TARGETS.values()), "k_", markersize=14, label="target")
        ax.set(xscale="log", yscale="log", xticks=worlds, xticklabels=worlds, xlabel="ranks")
        ax.set_title(f"peak bytes per rank, {held['seq_len']:,} tokens", fontsize=10)
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    missing = {name for name, module in MODULES.items() if importlib.util.find_spec(module) is None}
    report: dict[str, Any] = {"load_before": os.getloadavg(), "cpus": os.cpu_count(), "scale": args.scale, "rows": {}}
    print("load", " ".join(f"{load:.1f}" for load in os.getloadavg()))
    for name in (name for name in args.rows if name in ROWS):
        row = ROWS[name]
        for contender in sorted(missing.intersection(row.contenders)):
            print(f"{contender}: not installed, left out")
        report["rows"][name] = timed(row, [c for c in row.contenders if c not in missing], args)
        print(table(name, report["rows"][name]), flush=True)
        (args.out / "attention.json").write_text(json.dumps(report, indent=1))
    report["memory"] = memory(args) if "memory" in args.rows else None
    (args.out / "attention.json").write_text(json.dumps(report, indent=1))
    plot(report["rows"], report["memory"], args.out / "attention.png")
    print(f"wrote {args.out / 'attention.json'} and {args.out / 'attention.png'}")


if __name__ == "__main__":
    main()
