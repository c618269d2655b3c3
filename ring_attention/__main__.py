"""python -m ring_attention plan --mask causal --layout zigzag --ranks 4

Draws who computes what at which step, and prints the balance. A mask is made of parts joined by `+`:
full, causal, window:LEFT,RIGHT (a side left empty has no limit), documents:LENGTH,LENGTH,... and prefix:LENGTH.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from ring_attention import layouts, picture
from ring_attention.errors import UsageError
from ring_attention.masks import Mask


def parse_mask(text: str, seq_len: int) -> Mask:
    """`causal+window:15,0` and the like; what documents leave over is padding."""
    made: dict[str, Any] = {}
    for part in text.split("+"):
        name, _, values = part.partition(":")
        try:
            if name == "causal":
                made["causal"] = True
            elif name == "window":
                left, right = values.split(",")
                made["window"] = int(left) if left else None, int(right) if right else None
            elif name == "documents":
                ids = [index for index, length in enumerate(values.split(",")) for _ in range(int(length))][:seq_len]
                made["documents"] = torch.tensor(ids + [-1] * (seq_len - len(ids)))
            elif name == "prefix":
                made["prefix"] = torch.tensor([int(values)])
            elif name != "full":
                raise UsageError(f"unknown mask {part!r}; parts are full, causal, window, documents, prefix")
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"cannot read the mask {part!r}: {error}") from error
    return Mask(**made)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ring_attention", description=__doc__.split("\n\n")[1])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("plan", help="draw who computes what at which step")
    command.add_argument("--mask", default="causal", help="e.g. causal+window:15,0 or causal+documents:30,20,14")
    command.add_argument("--layout", default=layouts.ZigZag.__name__, help="zigzag, contiguous, striped, balanced, ...")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--seq-len", type=int, default=64)
    command.add_argument("--output", default="plan.png", help="file to write; its ending says the format")
    options = parser.parse_args(arguments)
    try:
        mask = parse_mask(options.mask, options.seq_len)
        layout = layouts.named(options.layout, mask, options.seq_len, options.ranks)
        picture.draw(layout, mask, options.output)
    except (UsageError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    pairs = picture.work(layout, mask)
    for rank, count in enumerate(pairs.sum(1)):
        print(f"rank {rank}: {layout.size(rank)} tokens, {count} pairs")
    print(f"busiest rank / mean: {picture.balance(pairs):.3f}")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
