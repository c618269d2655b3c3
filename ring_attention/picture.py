"""A picture of a plan: who computes which part of the attention matrix at which step, and how even the work is."""

from __future__ import annotations

import numpy as np
import torch

from ring_attention import plan
from ring_attention.layouts import Layout, Positions
from ring_attention.masks import Mask


def steps(layout: Layout, mask: Mask) -> Positions:
    """For each step of the ring the matrix of the first batch row over global positions: 1 + the rank that computes
    a pair in that step, 0 elsewhere. int64 `[world_size, seq_len, seq_len]`"""
    size, seq_len = layout.world_size, layout.seq_len
    matrix = np.zeros((size, seq_len, seq_len), np.int64)
    for rank in range(size):
        for step in plan.make(layout, layout, mask, rank).steps:
            i, j = layout.held(rank), layout.held(step.source)
            for block in (b for b in step.blocks if not b.rows.start):
                inside = plan.banded(block)
                q, k = i[block.q0 : block.q1], j[block.k0 : block.k1]
                if block.dense:
                    inside = mask.allows(torch.from_numpy(q), torch.from_numpy(k))[0]
                at = np.ix_(q, k)
                matrix[step.distance][at] = np.where(inside.numpy(), 1 + rank, matrix[step.distance][at])
    return matrix


def work(layout: Layout, mask: Mask) -> Positions:
    """Visible pairs by rank and step, over all rows that differ. int64 `[world_size, world_size]`"""
    pairs = np.zeros((layout.world_size, layout.world_size), np.int64)
    for rank in range(layout.world_size):
        for step in plan.make(layout, layout, mask, rank).steps:
            pairs[rank, step.distance] = sum(b.pairs * mask.num_rows(b.rows) for b in step.blocks)
    return pairs


def balance(pairs: Positions) -> float:
    """The busiest rank's work over the mean; 1 is even."""
    by_rank = pairs.sum(1)
    return float(by_rank.max() / max(by_rank.mean(), 1e-12)) if by_rank.any() else 1.0


def draw(layout: Layout, mask: Mask, path: str) -> None:
    """Writes the picture; its format is that of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap, to_hex, to_rgb

    size, matrix, pairs = layout.world_size, steps(layout, mask), work(layout, mask)
    palette = pyplot.get_cmap("tab10" if size <= 10 else "tab20")
    ranks = [to_hex(palette(rank % palette.N)) for rank in range(size)]
    columns = min(size, 4)
    lines = -(-size // columns)
    figure, axes = pyplot.subplots(lines + 1, columns, figsize=(3.1 * columns, 3.2 * lines + 2.6), squeeze=False)
    for step, axis in enumerate(axes[:lines].flat):
        if step >= size:
            axis.axis("off")
            continue
        axis.imshow(matrix[step], cmap=ListedColormap(["white", *ranks]), vmin=0, vmax=size, interpolation="nearest")
        axis.set_title(f"step {step}: " + ("own keys" if step == 0 else f"keys from {step} before"), fontsize=9)
        axis.set_xlabel("key position", fontsize=8)
        axis.set_ylabel("query position", fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes[lines]:
        axis.remove()
    bars = figure.add_subplot(lines + 1, 1, lines + 1)
    left = np.zeros(size)
    for step in range(size):
        shade = [(*to_rgb(color), 1.0 - 0.75 * step / max(size, 1)) for color in ranks]
        bars.barh(range(size), pairs[:, step], left=left, color=shade, edgecolor="white")
        left += pairs[:, step]
    bars.axvline(left.mean(), color="black", linewidth=1, linestyle="--")
    bars.set_yticks(range(size), [f"rank {rank}" for rank in range(size)], fontsize=8)
    bars.invert_yaxis()
    bars.tick_params(labelsize=8)
    bars.set_xlabel("query-key pairs, a shade for each step; dashed: the mean", fontsize=8)
    bars.set_title(f"busiest rank / mean = {balance(pairs):.3f}", fontsize=9)
    figure.suptitle(f"{layout!r}, {mask.summary()}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
