"""A walk through the families of transformers: each equals itself in one process, packed and padded, or is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_attention as ra
from tests.harness import RankPools
from tests.ring.families import FAMILIES, V, build

transformers = pytest.importorskip("transformers")

S, LENGTHS, LR = 24, (5, 1, 11, 7), 0.1


def batch(kind: str) -> dict[str, torch.Tensor]:
    made = {"input_ids": torch.randint(1, V, (2, S), generator=torch.Generator().manual_seed(1))}
    if kind == "packed":
        made["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, S)
    if kind == "padded":
        made["attention_mask"] = torch.ones(2, S).long()
        made["attention_mask"][0, -5:] = 0
        made["attention_mask"][1, :4] = 0
    return made


def output(model: torch.nn.Module, **given: torch.Tensor) -> torch.Tensor:
    out = model(**given)
    return out.logits if "logits" in out else out.last_hidden_state


def alone(model: torch.nn.Module, kind: str) -> torch.Tensor:
    """What one process computes. Packed documents go through one by one: not every family tells them apart by itself."""
    if kind != "packed":
        return output(model, **batch(kind))
    return torch.cat([output(model, input_ids=ids) for ids in batch(kind)["input_ids"].split(LENGTHS, 1)], 1)


def step(model: torch.nn.Module, out: torch.Tensor, start: dict[str, torch.Tensor], world: int = 1) -> dict[str, torch.Tensor]:
    """The parameters after one step of SGD on the sum of squares; the model goes back to `start`."""
    model.zero_grad()
    out.square().sum().backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if world > 1:
            dist.all_reduce(p.grad)
    torch.optim.SGD(model.parameters(), LR).step()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(start)
    return after


def walk(rank: int, world: int) -> dict[str, float]:
    """Family and kind of batch -> the largest error, of the output and of each parameter's step, relative to its largest."""
    transformers.logging.set_verbosity_error()
    worst, cp = {}, ra.ContextParallel(dist.group.WORLD)
    for name in FAMILIES:
        model = build(name)
        start = {n: x.clone() for n, x in model.state_dict().items()}
        for kind in ("plain", "padded", "packed"):
            whole = batch(kind)
            real = whole.get("attention_mask", torch.ones(2, S)).bool()
            want = alone(model, kind)
            expected = step(model, want[real], start)
            cp.attach(model)
            local, mine = cp.shard(whole), cp.positions(S)
            with cp:
                got = output(model, **local)
            reached = step(model, got[real[:, mine]], start, world)
            cp.detach(model)
            errors = [float((got - want[:, mine])[real[:, mine]].abs().max() / want[real].abs().max())]
            for n, p in expected.items():
                moved = (p - start[n]).abs().max().clamp(min=1e-2 * LR)
                errors.append(float((reached[n] - p).abs().max() / moved))
            worst[f"{name} {kind}"] = max(errors) if all(e == e for e in errors) else float("inf")
    return worst


def test_every_family_equals_itself(ranks: RankPools) -> None:
    for worst in ranks(2).run(walk, timeout=180):
        assert len(worst) == 3 * len(FAMILIES)
        assert {case: error for case, error in worst.items() if not error < 2e-5} == {}


SMALL = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
REFUSED = {
    "Mamba": ({"state_size": 4}, r"mixer \(MambaMixer\) carries state"),
    "Rwkv": ({"attention_hidden_size": 32}, "Rwkv.* carries state"),
    "Lfm2": ({"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}, "conv .*carries state"),
    "Bloom": ({"n_head": 4, "n_layer": 1}, "BloomForCausalLM"),
    "Bart": ({"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}, "no position_ids"),
}  # fmt: skip


def refused(rank: int, world: int) -> dict[str, str]:
    transformers.logging.set_verbosity_error()
    said, cp = {}, ra.ContextParallel(dist.group.WORLD)

    def attempt(name: str, action: Any) -> None:
        with pytest.raises(ra.UsageError) as error:
            action()
        said[name] = str(error.value)

    for name, (options, _) in REFUSED.items():
        config = getattr(transformers, f"{name}Config")(**SMALL | options)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        attempt(name, lambda model=model: cp.attach(model))
        assert "forward" not in model.__dict__ and "generate" not in model.__dict__
    roberta = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, max_position_embeddings=64)).eval()
    llama = build("Llama")
    for model in (roberta, llama):
        cp.attach(model)
    local = cp.shard(batch("plain"))

    def inside(model: torch.nn.Module, given: dict[str, Any]) -> None:
        with cp:
            model(**given)

    attempt("counts by itself", lambda: inside(roberta, local))
    attempt("no positions", lambda: inside(llama, {"input_ids": local["input_ids"]}))
    attempt("pixels", lambda: inside(llama, local | {"pixel_values": torch.ones(1)}))
    return said


def test_what_cannot_be_split_is_refused_by_name(ranks: RankPools) -> None:
    words = {name: pattern for name, (_, pattern) in REFUSED.items()}
    words |= {"counts by itself": "padding token", "no positions": "no position_ids", "pixels": "pixel_values"}
    for said in ranks(2).run(refused):
        for name, pattern in words.items():
            assert re.search(pattern, said[name]), (name, said[name])
