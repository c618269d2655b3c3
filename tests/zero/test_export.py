"""export: folders that other libraries open, one tensor in memory at a time."""

import importlib
import json
import pathlib
import weakref

import pytest
import torch
from safetensors.torch import load_file

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.zero.checkpoints import meet, pair, steps
from zeroshard import Precision, ShardError

module = importlib.import_module("zeroshard.checkpoint.export")  # the function has the same name


def read(folder: str | pathlib.Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in sorted(pathlib.Path(folder).glob("*.safetensors")) for name, value in load_file(file).items()
    }


def once(model: torch.nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    whole = zeroshard.full_state_dict(model)
    return {name: whole[name] for name in names}


def export_all(rank: int, world: int, folder: str) -> None:
    for case in ("tied", "scalars", "batchnorm", "lora"):
        for stage in (0, 1, 3):
            model, opt = pair(case, "sgd", stage=stage)
            steps(model, opt, case, range(2), rank)
            names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
            want = once(model, names)
            for target, options in (("one", {}), ("many", {"max_file_bytes": 700}), ("half", {"dtype": torch.bfloat16})):
                zeroshard.export(model, f"{folder}/{target}", **options)
                half = options.get("dtype")
                expected = {n: v.to(half) if half and v.is_floating_point() else v for n, v in want.items()}
                if rank == 0:
                    assert_equal(read(f"{folder}/{target}"), expected)
                meet()
            trained = [n for n, p in model.named_parameters() if p.requires_grad]
            zeroshard.export(model, f"{folder}/trained", trainable_only=True)
            if rank == 0:
                assert_equal(read(f"{folder}/trained"), {n: want[n] for n in trained})
            meet()


def test_the_whole_tensors_are_in_the_files(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(export_all, str(tmp_path))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read(tmp_path / "many"))
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "many").glob("*.safetensors")}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["half", "many", "one", "trained"]


def with_transformers(rank: int, world: int, folder: str) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    zeroshard.shard(model, stage=3)
    zeroshard.export(model, folder, dtype=torch.bfloat16)
    whole = zeroshard.full_state_dict(model)
    meet()
    back = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(back) is transformers.LlamaForCausalLM and back.dtype == torch.bfloat16
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert_equal(dict(back.state_dict()), {name: value.bfloat16() for name, value in whole.items()})
    inner = torch.nn.ModuleDict({"language": transformers.LlamaForCausalLM(config)})
    zeroshard.shard(inner, stage=1, precision=Precision(compute=torch.bfloat16))
    zeroshard.export(inner["language"], f"{folder}/inner", config=config)
    if rank == 0:
        assert set(read(f"{folder}/inner")) == set(read(folder))
        assert all(value.dtype == torch.float32 for value in read(f"{folder}/inner").values())
    meet()


def test_transformers_opens_the_folder(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(with_transformers, str(tmp_path / "model"), timeout=120)


def into_the_same_folder(rank: int, world: int, folder: str) -> None:
    model, _ = pair("net", "sgd", stage=3)
    pathlib.Path(folder).mkdir(exist_ok=True)
    pathlib.Path(folder, "README.md").write_text("mine")
    meet()
    zeroshard.export(model, folder, max_file_bytes=500)
    zeroshard.export(model, folder)
    if rank == 0:
        assert sorted(file.name for file in pathlib.Path(folder).iterdir()) == ["README.md", "model.safetensors"]
    meet()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(module.Writer, "close", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(ShardError, match=r"No space left"):
            zeroshard.export(model, folder)
    if rank == 0:
        assert read(folder) and sorted(file.name for file in pathlib.Path(folder).parent.iterdir()) == ["model"]
    meet()


def test_an_older_export_is_replaced_or_kept(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(into_the_same_folder, str(tmp_path / "model"))


def one_at_a_time(rank: int, world: int, folder: str) -> None:
    model, _ = pair("gpt", "sgd", stage=3)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]
    whole = module._whole

    def watched(*args: object) -> torch.Tensor | None:
        tensor = whole(*args)  # type: ignore[arg-type]
        if tensor is not None:
            alive.append(weakref.ref(tensor))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_whole", watched)
        zeroshard.export(model, folder)
    assert most[0] == (1 if rank == 0 else 0)


def test_one_tensor_is_whole_at_a_time_on_one_rank(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(3).run(one_at_a_time, str(tmp_path / "model"))
