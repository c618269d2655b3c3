"""Generation inside `with cp`: the tokens of one process, a cache that stays sharded, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ring_attention as ra
from tests.harness import RankPools
from tests.ring.families import build

transformers = pytest.importorskip("transformers")

S, NEW = 21, 9


def prompt(batch: int = 3, length: int = S) -> dict[str, torch.Tensor]:
    """Left-padded by 0, 4 and 9 tokens."""
    ids = torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : (0, 4, 9)[row % 3] * length // S] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def held(cache: Any) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers]


def generated(rank: int, world: int, families: list[str], layout: str) -> dict[str, Any]:
    """Family -> whether tokens are those of one process, largest error of the scores, keys held by each layer."""
    transformers.logging.set_verbosity_error()
    found = {}
    for name in families:
        model = build(name, use_cache=True).eval()
        options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        alone = model.generate(**prompt(), **options)
        cp = ra.ContextParallel(dist.group.WORLD, getattr(ra, layout))
        cp.attach(model)
        with cp:
            ours = model.generate(**prompt(), **options)
        error = max(float((a - b).abs().max()) for a, b in zip(alone.logits, ours.logits, strict=True))
        found[name] = torch.equal(alone.sequences, ours.sequences), error, held(ours.past_key_values)
    return found


@pytest.mark.parametrize(("world", "layout"), [(2, "ZigZag"), (3, "Balanced"), (4, "Striped")])
def test_greedy_tokens_are_those_of_one_process(ranks: RankPools, world: int, layout: str) -> None:
    families = ["Llama", "Gemma3", "GptOss"] if world > 2 else [
        "Llama", "Gemma3", "GptOss", "Gemma2", "DeepseekV3", "Llama4", "Mistral", "Gpt2", "Opt",
    ]  # fmt: skip
    answers = ranks(world).run(generated, families, layout)
    for name in families:
        for equal, error, _ in (answer[name] for answer in answers):
            assert equal and error < 1e-4, (name, error)
        # every position is on one rank: the last token's key is never computed, and a window keeps what can be seen
        full = [answer[name][2][1] for answer in answers]
        assert sum(full) == S + NEW - 1 or name == "Mistral", (name, full)
        assert max(full) <= -(-S // world) + -(-NEW // world) + 1, (name, full)
    if "Mistral" in families:
        assert sum(answer["Mistral"][2][0] for answer in answers) == 4  # the window of 5, without the token to come


def other_ways(rank: int, world: int) -> dict[str, bool]:
    """What was generated -> whether it is what one process generates."""
    transformers.logging.set_verbosity_error()
    model = build("Gemma3", use_cache=True).eval()
    cp = ra.ContextParallel(dist.group.WORLD)
    found: dict[str, bool] = {}

    def same(name: str, given: dict[str, Any], **options: Any) -> None:
        options = {"max_new_tokens": 6, "do_sample": False} | options
        torch.manual_seed(5)
        want = model.generate(**given, **options)
        if "sample" in name:
            torch.manual_seed(5 + rank)  # only rank 0 has the right numbers
        with cp:
            got = model.generate(**given, **options)
        found[name] = torch.equal(want, got)

    cp.attach(model)
    same("sampled", prompt(), do_sample=True, temperature=2.0)
    same("beams", prompt(), num_beams=3)
    same("sampled beams", prompt(), num_beams=2, do_sample=True)
    same("several answers sampled", prompt(1), num_return_sequences=3, do_sample=True)
    same("repetition penalty", prompt(), repetition_penalty=1.8, no_repeat_ngram_size=2)
    same("short prompt", prompt(2, 3))
    same("one token", {"input_ids": torch.tensor([[7]])})
    same("embeddings", {"inputs_embeds": model.get_input_embeddings()(prompt(1)["input_ids"]).detach()})
    with cp:
        alike = torch.rand(1)
    first = model.generate(**prompt(1), max_new_tokens=4, do_sample=False)
    more = {"input_ids": torch.cat([first, prompt(1)["input_ids"][:, :6]], 1)}
    want = model.generate(**more, max_new_tokens=5, do_sample=False)
    with cp:
        out = model.generate(**prompt(1), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        got = model.generate(**more, max_new_tokens=5, do_sample=False, past_key_values=out.past_key_values)
    found["a second turn"] = torch.equal(want, got)
    cp.detach(model)
    found["detached"] = "generate" not in model.__dict__ and "forward" not in model.__dict__
    found["random numbers stay apart"] = rank == 0 or not torch.equal(alike, torch.rand(1))
    return found


def test_other_ways_to_generate(ranks: RankPools) -> None:
    for found in ranks(3).run(other_ways):
        assert all(found.values()), found


def stage_three(rank: int, world: int) -> list[bool]:
    import zeroshard

    transformers.logging.set_verbosity_error()
    model, whole = build("Llama", use_cache=True).eval(), prompt()
    want = model.generate(**whole, max_new_tokens=NEW, do_sample=False)
    zeroshard.shard(model, stage=3)
    cp = ra.ContextParallel(dist.group.WORLD)
    cp.attach(model)
    with cp:
        got = model.generate(**whole, max_new_tokens=NEW, do_sample=False)
    return [torch.equal(want, got), all("Sharded" in type(p).__name__ for p in model.model.layers.parameters())]


def test_a_model_whose_parameters_are_sharded_too(ranks: RankPools) -> None:
    for found in ranks(2).run(stage_three):
        assert all(found), found


class Attention(torch.nn.Module):
    """A model of one's own: attention with a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.project(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(3, 1)
        return q, k, v


def own_cache(rank: int, world: int) -> tuple[float, str, str]:
    model, x = Attention(), torch.randn(2, 14, 16, dtype=torch.float64)
    with torch.no_grad():
        want = F.scaled_dot_product_attention(*model(x), is_causal=True)[:, :, -3:]
        cp, got = ra.ContextParallel(dist.group.WORLD), []
        with cp:
            _, keys, values = model(cp.shard(x[:, :11]))
            for at in (11, 12, 13):
                q, k, v = model(x[:, at : at + 1])
                if at % world == rank:
                    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
                got.append(cp.decode(q, keys, values))
            with pytest.raises(ra.UsageError) as local:
                F.scaled_dot_product_attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
    with pytest.raises(ra.UsageError) as gradient:
        cp.decode(q.requires_grad_(), keys, values)
    return (torch.cat(got, 2) - want).abs().max().item(), str(local.value), str(gradient.value)


def test_a_cache_of_ones_own(ranks: RankPools) -> None:
    for error, local, gradient in ranks(3).run(own_cache):
        assert error < 1e-12
        assert "cp.decode" in local and "no_grad" in gradient


def refused(rank: int, world: int) -> dict[str, str]:
    transformers.logging.set_verbosity_error()
    model, whole, cp = build("Llama", use_cache=True).eval(), prompt(), ra.ContextParallel(dist.group.WORLD)
    said: dict[str, str] = {}

    def attempt(name: str, error: type[Exception] = ra.UsageError, **given: Any) -> None:
        with pytest.raises(error) as caught, cp:
            model.generate(**({"max_new_tokens": 2, "do_sample": False} | whole | given))
        said[name] = str(caught.value)

    cp.attach(model)
    attempt("a cache of one's own", past_key_values=transformers.DynamicCache())
    attempt("static", cache_implementation="static")
    attempt("no cache", use_cache=False)
    attempt("assisted", prompt_lookup_num_tokens=2)
    attempt("hidden states", output_hidden_states=True, return_dict_in_generate=True)
    attempt("time", max_time=1.0)
    attempt("right padding", attention_mask=whole["attention_mask"].flip(1))
    local = cp.shard(whole)
    attempt("sharded prompt", ra.DivergenceError, **local)
    attempt("other lengths", ra.DivergenceError, max_new_tokens=2 + rank)
    with pytest.raises(ra.UsageError) as caught, cp:
        model(**local, past_key_values=transformers.DynamicCache())
    said["forward with a cache"] = str(caught.value)
    with cp:
        out = model.generate(**whole, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ra.UsageError) as caught:
        model.generate(torch.ones(3, 30).long(), past_key_values=out.past_key_values, max_new_tokens=2, do_sample=False)
    said["outside"] = str(caught.value)
    return said


def test_what_would_not_be_exact_is_refused_by_name(ranks: RankPools) -> None:
    words = {
        "a cache of one's own": "DynamicCache", "static": "cache_implementation", "no cache": "use_cache=False",
        "assisted": "assisted_generation", "hidden states": "output_hidden_states", "time": "max_time",
        "right padding": "padded on the left", "sharded prompt": "whole prompt", "other lengths": "generation_config",
        "forward with a cache": "DynamicCache", "outside": "in `with cp:`",
    }  # fmt: skip
    for said in ranks(2).run(refused):
        for name, pattern in words.items():
            assert re.search(pattern, said[name]), (name, said[name])
