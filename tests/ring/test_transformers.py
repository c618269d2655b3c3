"""Attached models equal themselves in one process: layouts, checkpoints, coming and going, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_attention as ra
from tests.harness import RankPools
from tests.ring.families import V, build

transformers = pytest.importorskip("transformers")

S = 24
PACKED = torch.cat([torch.arange(n) for n in (5, 1, 11, 7)]).expand(2, S)
def batch(kind: str) -> dict[str, torch.Tensor]:
    made = {"input_ids": torch.randint(V, (2, S), generator=torch.Generator().manual_seed(1))}
    if kind == "packed":
        made["position_ids"] = PACKED.clone()
    if kind == "padded":
        made["attention_mask"] = torch.ones(2, S).long()
        made["attention_mask"][0, -5:] = 0
    return made


def alone(model: torch.nn.Module, kind: str) -> torch.Tensor:
    """Logits of one process. Packed documents go through one by one: not every family tells them apart by itself."""
    whole = batch(kind)
    if kind != "packed":
        return model(**whole).logits
    return torch.cat([model(input_ids=ids).logits for ids in whole["input_ids"].split((5, 1, 11, 7), 1)], 1)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def errors_of(rank: int, world: int, name: str, kinds: list[str], layout: str, checkpointing: bool | None) -> list[Any]:
    """(logits, gradients) errors of each kind of batch, relative to the largest value."""
    transformers.logging.set_verbosity_error()
    model, cp, errors = build(name), ra.ContextParallel(dist.group.WORLD, getattr(ra, layout)), []
    for kind in kinds:
        whole = batch(kind)
        real = whole.get("attention_mask", torch.ones(2, S)).bool()
        want = alone(model, kind)
        want_grads = gradients(model, want[real].square().sum())
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        cp.attach(model)
        local, mine = cp.shard(whole), cp.positions(S)
        with cp:
            got = model(**local).logits
        grads = gradients(model, got[real[:, mine]].square().sum())  # outside
        cp.detach(model)
        error = (got - want[:, mine])[real[:, mine]].abs().max() / want.abs().max()
        worst = 0.0
        for n, grad in want_grads.items():
            total = grads.get(n, torch.zeros_like(grad))
            dist.all_reduce(total)
            worst = max(worst, float((total - grad).abs().max() / grad.abs().max().clamp(min=1e-2)))
        errors.append((float(error), worst))
    return errors


@pytest.mark.parametrize("layout", ["Contiguous", "Striped", "Balanced"])
def test_other_layouts(ranks: RankPools, layout: str) -> None:
    for errors in ranks(3).run(errors_of, "Mistral", ["plain", "packed", "padded"], layout, None):
        assert max(max(pair) for pair in errors) < 1e-10, errors


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_outside_the_context(ranks: RankPools, reentrant: bool) -> None:
    for errors in ranks(2).run(errors_of, "Mistral", ["plain", "packed"], "ZigZag", reentrant):
        assert max(max(pair) for pair in errors) < 1e-10, errors


def life(rank: int, world: int) -> None:
    transformers.logging.set_verbosity_error()
    model, other, cp = build("Llama"), build("Qwen3"), ra.ContextParallel(dist.group.WORLD)
    before, whole = model.config._attn_implementation, batch("padded")
    with torch.no_grad():
        want, want_other = model(**whole).logits, other(**whole).logits
        cp.attach(model)
        ra.ContextParallel(dist.group.WORLD, ra.Striped).attach(model)  # a second context changes nothing
        cp.attach(torch.nn.parallel.DistributedDataParallel(model))
        assert torch.equal(model(**whole).logits, want)  # outside `with cp` nothing is sharded
        model.generate(whole["input_ids"][:, :4], max_new_tokens=2, do_sample=False, use_cache=True)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.forward.__self__ is twin and torch.equal(twin(**whole).logits, want)
        cp.detach(model)
        assert model.config._attn_implementation == before
        assert torch.equal(model(**whole).logits, want) and torch.equal(other(**whole).logits, want_other)


def test_a_model_gets_its_attention_back(ranks: RankPools) -> None:
    ranks(1).run(life)


def refused(rank: int, world: int) -> dict[str, str]:
    transformers.logging.set_verbosity_error()
    said: dict[str, str] = {}

    def attempt(name: str, action: Any) -> None:
        with pytest.raises(ra.UsageError) as error:
            action()
        said[name] = str(error.value)

    small = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
    cp = ra.ContextParallel(dist.group.WORLD)
    attempt("mamba", lambda: cp.attach(transformers.MambaForCausalLM(transformers.MambaConfig(**small, state_size=4))))
    attempt("bloom", lambda: cp.attach(transformers.BloomForCausalLM(transformers.BloomConfig(**small, n_head=4, n_layer=1))))
    attempt("module", lambda: cp.attach(torch.nn.Linear(2, 2)))
    model, whole = build("Llama"), batch("padded")
    cp.attach(model)
    local = cp.shard(whole)

    def forward(**options: Any) -> None:
        with cp:
            model(**(local | options))

    attempt("bias", lambda: forward(attention_mask=torch.zeros(2, 1, S // 2, S // 2, dtype=torch.float64)))
    attempt("attentions", lambda: forward(output_attentions=True))
    cp.shard({"input_ids": whole["input_ids"]})
    attempt("unseen padding", lambda: forward(attention_mask=torch.zeros(2, S // 2).long()))
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    attempt("dropout", lambda: forward())
    model.set_attn_implementation("eager")
    attempt("swapped", lambda: forward())
    return said


def test_what_cannot_be_exact_is_refused_by_name(ranks: RankPools) -> None:
    words = {
        "mamba": r"mixer \(MambaMixer\)", "bloom": "BloomForCausalLM", "module": "Linear is no transformers model",
        "bias": "attention_mask", "attentions": "output_attentions", "unseen padding": "padding", "dropout": "dropout 0.1",
        "swapped": "'eager'",
    }  # fmt: skip
    for said in ranks(2).run(refused):
        for name, pattern in words.items():
            assert re.search(pattern, said[name]), (name, said[name])
