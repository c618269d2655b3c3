"""Small models that are awkward in one way each, their data, and the unsharded loop that results are compared with.

    case = CASES["tied"]
    want = train_reference(case, world=2, steps=3)                      # one process, every rank's data in turn
    model = case.build()
    got = train(model, optimizer, case, rank=rank, steps=3)             # the same loop on one rank

Shapes: B batch, S sequence, F features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, TARGETS, VOCABULARY, SEQUENCE, BATCH, EXPERTS = 7, 3, 37, 11, 5, 3


# ------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A residual block whose sizes no number of ranks divides: 7 x 13 + 13, 13 x 7, 7 + 7."""

    def __init__(self, features: int = FEATURES, hidden: int = 13):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Repeated blocks between two layers of their own: the shape automatic units must find."""

    def __init__(self, depth: int = 3, features: int = FEATURES):
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.blocks = nn.ModuleList(Block(features) for _ in range(depth))
        self.head = nn.Linear(features, TARGETS)

    def forward(self, x: Tensor) -> Tensor:  # [B, F] -> [B, TARGETS]
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, width]
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Token ids and positions [B, S] -> logits [B, S, V]; `tied` shares the embedding with the head."""

    def __init__(self, depth: int = 2, width: int = 12, heads: int = 4, kv_heads: int = 2, tied: bool = True):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, kv_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedFunctional(nn.Module):
    """The embedding's weight is used as the head outside its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        self.block = Block()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.block(self.tokens(ids)), self.tokens.weight)


class Frozen(Net):
    """Half of the blocks whole, and one bias inside another, do not train."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class LoRA(Net):
    """Adapters on a frozen base: most of the bytes have no gradient and no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)


class Scalars(nn.Module):
    """0-dim, 1-element and empty parameters, on the root module, on a block and as the temperature of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.net = Net(depth=2)
        self.net.blocks[0].register_parameter("scale", nn.Parameter(torch.tensor([0.7])))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.net.blocks[0].scale) * self.temperature + self.nothing.sum()


class Unused(Net):
    """A layer in a block and one at the root that no forward calls: their gradients stay None."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(FEATURES, FEATURES)
        self.blocks[1].spare = nn.Linear(2, 3)


class Experts(nn.Module):
    """The data chooses one block of three, so ranks differ in what they use and some experts wait several steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.experts = nn.ModuleList(Block() for _ in range(EXPERTS))
        self.head = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return self.head(self.experts[int(choice)](self.embed(x)))


class Reused(nn.Module):
    """One block called three times in a forward, then through one of its children alone."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.head(x + self.block.norm(x))


class Convolutions(nn.Module):
    """BatchNorm: buffers that each rank updates from its own data, an integer one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(c, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU()) for c in (1, 5, 5))
        )
        self.head = nn.Linear(5, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.unsqueeze(1)).mean(-1))


# ------------------------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True)
class Batch:
    inputs: tuple[Tensor, ...]
    target: Tensor


def features(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return Batch((x.to(dtype),), torch.randn(BATCH, TARGETS, generator=generator, dtype=torch.float64).to(dtype))


def features_and_choice(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch = features(generator, dtype)
    return Batch((*batch.inputs, torch.randint(EXPERTS, (), generator=generator)), batch.target)


def tokens(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return Batch((ids[:, :-1],), ids[:, 1:])


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its data. Pickles; both are functions of seeds alone, the same on every rank."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator, torch.dtype], Batch] = features

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model().to(dtype)

    def batch(self, step: int, rank: int, micro: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
        return self.data(torch.Generator().manual_seed(1 + micro + 1000 * (rank + 1000 * step)), dtype)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        out = model(*batch.inputs)
        if batch.target.is_floating_point():
            return F.mse_loss(out, batch.target)
        return F.cross_entropy(out.flatten(0, 1), batch.target.flatten())


CASES = {
    case.name: case
    for case in [
        Case("net", Net),
        Case("gpt", functools.partial(GPT, tied=False), tokens),
        Case("tied", GPT, tokens),
        Case("tied_functional", TiedFunctional, tokens),
        Case("frozen", Frozen),
        Case("lora", LoRA),
        Case("scalars", Scalars),
        Case("unused", Unused),
        Case("experts", Experts, features_and_choice),
        Case("reused", Reused),
        Case("batchnorm", Convolutions),
    ]
}


# ------------------------------------------------------------------------------------------------- the loop

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
sgd: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw: MakeOptimizer = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@dataclasses.dataclass
class History:
    """What a run of the loop leaves: one entry per step, and the end. Pickles; compare with `assert_equal`."""

    losses: list[Any] = dataclasses.field(default_factory=list)  # of a rank; the reference holds a list over ranks
    gradients: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)  # whole, before clipping
    norms: list[float] = dataclasses.field(default_factory=list)  # what clipping returned; empty without `clip`
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # rank 0's in the reference


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def backward_pass(
    model: nn.Module, case: Case, step: int, rank: int, accumulate: int, no_sync: bool, dtype: torch.dtype
) -> float:
    """Every micro-batch of one step and rank; returns their mean loss. The part reference and ranks have in common."""
    total = 0.0
    for micro in range(accumulate):
        skip = no_sync and micro < accumulate - 1
        with model.no_sync() if skip else contextlib.nullcontext():
            loss = case.loss(model, case.batch(step, rank, micro, dtype)) / accumulate
            loss.backward()
        total += loss.item()
    return total


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    *,
    rank: int,
    steps: int = 3,
    accumulate: int = 1,
    no_sync: bool = False,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    read_gradients: Callable[[nn.Module], dict[str, Tensor | None]] | None = None,
    read_parameters: Callable[[nn.Module], dict[str, Tensor]] | None = None,
) -> History:
    """The plain loop on one rank, each rank with its own data. `read_*` fetch whole values from a sharded model."""
    history = History()
    for step in range(steps):
        history.losses.append(backward_pass(model, case, step, rank, accumulate, no_sync, dtype))
        if read_gradients:
            history.gradients.append({k: v if v is None else v.clone() for k, v in read_gradients(model).items()})
        if clip is not None:
            history.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    if read_parameters:
        history.parameters = {k: v.clone() for k, v in read_parameters(model).items()}
    history.buffers = {name: b.clone() for name, b in model.named_buffers()}
    return history


def train_reference(
    case: Case,
    *,
    world: int,
    make_optimizer: MakeOptimizer = sgd,
    reduce: str = "mean",
    steps: int = 3,
    accumulate: int = 1,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> History:
    """The same loop in one process: every rank's data in turn on a plain model, gradients reduced in rank order.

    A gradient that some rank lacks counts as zero there; one that every rank lacks stays None. Each rank has its own
    buffers.
    """
    model = case.build(seed, dtype)
    optimizer = make_optimizer(trainable(model))
    history = History()
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(world)]
    for step in range(steps):
        gradients, losses = [], []
        for rank in range(world):
            model.zero_grad()
            _copy_buffers(buffers[rank], dict(model.named_buffers()))
            losses.append(backward_pass(model, case, step, rank, accumulate, False, dtype))
            _copy_buffers(dict(model.named_buffers()), buffers[rank])
            gradients.append(whole_gradients(model))
        for name, p in model.named_parameters():
            p.grad = _reduced([part[name] for part in gradients], reduce)
        history.losses.append(losses)
        history.gradients.append(whole_gradients(model))
        if clip is not None:
            history.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    history.parameters = whole_parameters(model)
    history.buffers = buffers[0]
    return history


def _copy_buffers(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in source.items():
            target[name].copy_(value)


def _reduced(parts: list[Tensor | None], reduce: str) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    total = present[0].clone()
    for part in present[1:]:
        total += part
    return total / len(parts) if reduce == "mean" else total
