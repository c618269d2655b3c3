"""materialize: a model from the meta device holds what a CPU build holds, or what is in the files."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.models import CASES, adamw, trainable
from tests.zero.checkpoints import meet, pair, steps
from zeroshard import Precision, ShardError
from zeroshard.checkpoint import filling


class Parents(nn.Module):
    """Parameters and buffers of its own, filled after its children were; attention's own way of filling; BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.table = nn.Embedding(11, 8, padding_idx=2)
        self.recurrent = nn.GRUCell(8, 5)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.empty(8))
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.register_buffer("places", torch.empty(6, dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.normal_()
            self.angles.copy_(torch.arange(4.0) / 3)
            self.places.copy_(torch.arange(6))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "parents": Parents,
    **{name: CASES[name].model for name in ("net", "tied", "frozen", "batchnorm")},
}


def from_scratch(rank: int, world: int, name: str) -> None:
    make = MODELS[name]
    want = seeded(make)
    after = torch.rand(1)
    for stage in (0, 1, 2, 3):
        for precision in (None, Precision(compute=torch.bfloat16)):
            model = on_meta(make)
            optimizer = adamw(trainable(model))
            zeroshard.shard(model, optimizer, stage=stage, precision=precision)
            torch.manual_seed(3)
            zeroshard.materialize(model)
            assert torch.equal(torch.rand(1), after)  # what is drawn next is what it would have been
            assert_equal(zeroshard.full_state_dict(model), dict(want.state_dict()))
            for buffer, value in want.named_buffers():
                assert_equal(dict(model.named_buffers())[buffer], value)
    if name in CASES:
        steps(model, optimizer, name, range(2), rank)


@pytest.mark.parametrize("name", list(MODELS))
def test_from_scratch_it_is_a_cpu_build(ranks: RankPools, name: str) -> None:
    ranks(2).run(from_scratch, name)


def other_seeds(rank: int, world: int) -> None:
    model = on_meta(CASES["net"].model)
    zeroshard.shard(model, stage=3)
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    zeroshard.materialize(model)
    assert torch.equal(before, torch.get_rng_state()) == (rank > 0)
    torch.manual_seed(0)
    assert_equal(zeroshard.full_state_dict(model), dict(CASES["net"].model().state_dict()))


def test_rank_0s_seed_counts(ranks: RankPools) -> None:
    ranks(3).run(other_seeds)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.bare = nn.Parameter(torch.ones(3))


class BareBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3, dtype=torch.long), persistent=False)


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        pass


def refuses(rank: int, world: int, folder: str) -> None:
    for make, name in ((Bare, "bare"), (BareBuffer, "mask"), (Forgetful, "bare")):
        outer = on_meta(lambda make=make: nn.ModuleDict({"inner": make()}))
        zeroshard.shard(outer, stage=3)
        with pytest.raises(ShardError, match=rf"(?s)(?=.*inner\.{name})(?=.*reset_parameters)"):
            zeroshard.materialize(outer)

    model, _ = pair("net", "sgd", stage=3)
    zeroshard.export(model, f"{folder}/net")
    other = on_meta(Bare)
    zeroshard.shard(other, stage=3)
    with pytest.raises(ShardError, match=r"(?s)(?=.*bare)(?=.*head\.weight)"):
        zeroshard.materialize(other, f"{folder}/net")
    with pytest.raises(ShardError, match=r"nowhere.*does not exist"):
        zeroshard.materialize(other, f"{folder}/nowhere")
    wide = nn.ModuleDict({"layer": nn.Linear(2, 3)})
    zeroshard.shard(wide)
    zeroshard.export(wide, f"{folder}/wide")
    narrow = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    zeroshard.shard(narrow)
    with pytest.raises(ShardError, match=r"(?s)layer\.\w+.*\(3,.*\(2,"):
        zeroshard.materialize(narrow, f"{folder}/wide")
    file = pathlib.Path(folder, "net", "model.safetensors")
    meet()
    if rank == 0:
        file.write_bytes(file.read_bytes()[:-8])
    meet()
    with pytest.raises(ShardError, match=r"model\.safetensors"):
        zeroshard.materialize(model, f"{folder}/net")


def test_what_cannot_be_filled_is_named(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(refuses, str(tmp_path))


def from_files(rank: int, world: int, folder: str) -> None:
    for name in ("parents", "tied", "batchnorm"):
        model = MODELS[name]()
        zeroshard.shard(model, stage=3)
        options: dict[str, Any] = {"max_file_bytes": 1000} if name == "tied" else {}
        zeroshard.export(model, f"{folder}/{name}", **options)
        want = zeroshard.full_state_dict(model)
        source = f"{folder}/{name}/model.safetensors" if name == "parents" else f"{folder}/{name}"
        for stage in (0, 1, 3):
            for units in (None, []):
                other = on_meta(MODELS[name])
                zeroshard.shard(other, stage=stage, units=units)
                before = torch.get_rng_state()
                zeroshard.materialize(other, source)
                assert torch.equal(torch.get_rng_state(), before)
                assert_equal(zeroshard.full_state_dict(other), want)
                for buffer, value in model.named_buffers():
                    assert_equal(dict(other.named_buffers())[buffer], value)


def test_from_files_each_rank_reads_its_pieces(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(3).run(from_files, str(tmp_path))


def llama(rank: int, world: int, folder: str) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    if rank == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    meet()
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = on_meta(lambda: transformers.LlamaForCausalLM(config))
    zeroshard.shard(model, stage=3)
    zeroshard.materialize(model, folder)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert_equal(model(ids).logits, plain(ids).logits)


def test_a_transformers_model_with_its_rotary_buffers(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(llama, str(tmp_path / "model"), timeout=120)


SIZES = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}


def of_transformers(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    heads = {"Bert": "Model", "GPT2": "LMHeadModel"}
    model: nn.Module = getattr(transformers, name + heads.get(name, "ForCausalLM"))(config)
    return model


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 3}),
    ("Qwen2", {"num_key_value_heads": 2}),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 4}),
    ("Mistral", {"num_key_value_heads": 2}),
    ("Gemma2", {"num_key_value_heads": 2, "head_dim": 4}),
    ("Phi3", {"pad_token_id": 1}),
    ("OPT", {"ffn_dim": 20, "word_embed_proj_dim": 16}),
    ("GPTNeoX", {}),
    ("Bert", {}),
]


def families_from_scratch(rank: int, world: int) -> list[str]:
    """Bit-equal to a CPU build; the names of the families that are not."""
    other = []
    for name, options in FAMILIES:
        make = functools.partial(of_transformers, name, **options)
        want = seeded(make)
        after = torch.rand(1)
        model = on_meta(make)
        zeroshard.shard(model, stage=3)
        torch.manual_seed(3)
        zeroshard.materialize(model)
        got = {**zeroshard.full_state_dict(model), **dict(model.named_buffers())}
        same = all(torch.equal(got[key], value) for key, value in {**want.state_dict(), **dict(want.named_buffers())}.items())
        if not same or not torch.equal(torch.rand(1), after):
            other.append(name)
    model = on_meta(functools.partial(of_transformers, "GPT2", vocab_size=37, n_embd=16, n_layer=1, n_head=2))
    zeroshard.shard(model, stage=3)
    with pytest.raises(
        ShardError, match=r"(?s)c_attn\.weight.*Conv1D.*Build the model on the CPU.*materialize\(model, source\)"
    ):
        zeroshard.materialize(model)
    return other


def test_transformers_models_from_scratch_are_cpu_builds(ranks: RankPools) -> None:
    assert ranks(2).run(families_from_scratch, timeout=120) == [[], []]


def test_one_block_of_memory_serves_all_modules() -> None:
    scratch = filling.Scratch()
    places = set()
    for width in (64, 32, 64, 16):
        unset = scratch.unset(dict(nn.Linear(width, width, device="meta", dtype=torch.float64).named_parameters()))
        assert all(bool(x.isnan().all()) for x in unset.values())
        assert unset["bias"].data_ptr() - unset["weight"].data_ptr() == unset["weight"].nbytes
        places.add(unset["weight"].data_ptr())
    assert len(places) == 1
