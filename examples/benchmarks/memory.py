"""Memory of a rank, three times over: the closed form beforehand, the ledger while it runs, the operating system.

    python examples/benchmarks/memory.py --out results
    python examples/benchmarks/memory.py --worlds 2 4 --stages 3 --width 512 --depth 8

For each stage and number of ranks one run of worker.py. Printed in MiB: states (parameters, gradients, optimizer) and all of
the engine by `zeroshard.estimate` and by the ledger of `zeroshard.stats`, the process's peak above the bare interpreter, and
what one process without communication needs. Gradients are accumulated once, because that is what `estimate` plans for.
Writes memory.json and memory.png.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import torch

import zeroshard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from model import build

WORKER = pathlib.Path(__file__).resolve().with_name("worker.py")
MIB = 2**20
CATEGORIES = ["parameters", "gradients", "optimizer", "gathered", "reducing"]
SIZES = {"width": 512, "depth": 8, "vocabulary": 8192, "seq-len": 256}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--bf16", action="store_true")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def run(engine: str, world: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank saw."""
    launcher = [] if engine == "single" else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    sizes = [text for name in SIZES for text in (f"--{name}", str(getattr(args, name.replace("-", "_"))))]
    settings = [*sizes, "--steps", "3", "--warmup", "2", "--accumulate", "2", "--batch", "1", *(["--bf16"] * args.bf16)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), *sys.path])}
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), engine, *settings], capture_output=True, text=True, env=env, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    if not lines:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])["ranks"]


def compare(stage: int, world: int, args: argparse.Namespace) -> dict[str, Any]:
    with torch.device("meta"):
        model = build(args.width, args.depth, args.vocabulary, args.seq_len, lora=False)
    precision = zeroshard.Precision(compute=torch.bfloat16) if args.bf16 else None
    plan = zeroshard.estimate(model, stage=stage, world_size=world, precision=precision)
    ranks = run(f"zeroshard-{stage}", world, args)
    most = max(ranks, key=lambda seen: seen["ledger_peak"]["total"])
    return {
        "stage": stage,
        "world": world,
        "parameters": sum(p.numel() for p in model.parameters()),
        "estimate": dict(plan) | {"total": plan.total},
        "ledger": most["ledger_peak"],
        "process": max(seen["peak_bytes"] for seen in ranks),
        "process_steady": max(seen["steady_bytes"] for seen in ranks),
        "ledger_steady": most["ledger_resident"]["total"],
    }


def line(seen: dict[str, Any]) -> str:
    states = [sum(seen[source][name] for name in CATEGORIES[:3]) / MIB for source in ("estimate", "ledger")]
    totals = [seen[source]["total"] / MIB for source in ("estimate", "ledger")]
    return (
        f"{seen['stage']:>5}{seen['world']:>7}{states[0]:>12.1f}{states[1]:>10.1f}{totals[0]:>12.1f}{totals[1]:>10.1f}"
        f"{totals[0] / totals[1]:>8.3f}{seen['process'] / MIB:>12.0f}{seen['process_steady'] / MIB:>9.0f}"
    )


def plot(rows: list[dict[str, Any]], single: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(2 + 1.6 * len(rows), 5), layout="constrained")
    for position, seen in enumerate(rows):
        for shift, source in ((-0.27, "estimate"), (0.0, "ledger")):
            bottom = 0.0
            for index, name in enumerate(CATEGORIES):
                value = seen[source][name] / MIB
                label = name if position == 0 and source == "ledger" else None
                strength = 1 if source == "ledger" else 0.6
                ax.bar(position + shift, value, 0.25, bottom, color=f"C{index}", alpha=strength, label=label)
                bottom += value
        label = "process, peak above the bare interpreter" if position == 0 else None
        ax.bar(position + 0.27, seen["process"] / MIB, 0.25, color="lightgray", label=label)
    ax.axhline(single["peak_bytes"] / MIB, color="black", linewidth=0.8, linestyle="--", label="one process, plain torch")
    ax.set_xticks(range(len(rows)), [f"stage {seen['stage']}\n{seen['world']} ranks" for seen in rows])
    ax.set_ylabel("MiB per rank")
    ax.set_title("estimate (pale), ledger (peaks by category), operating system")
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)


def main() -> None:
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    single = run("single", 1, args)[0]
    print(f"one process, plain torch: peak {single['peak_bytes'] / MIB:.0f} MiB, steady {single['steady_bytes'] / MIB:.0f} MiB")
    print("stage  ranks  states est    ledger   total est    ledger   ratio  process peak  steady")
    rows = []
    for world in args.worlds:
        for stage in args.stages:
            rows.append(compare(stage, world, args))
            print(line(rows[-1]), flush=True)
    (args.out / "memory.json").write_text(json.dumps({"single": single, "rows": rows}, indent=1))
    plot(rows, single, args.out / "memory.png")
    print(f"wrote {args.out / 'memory.json'} and {args.out / 'memory.png'}")


if __name__ == "__main__":
    main()
