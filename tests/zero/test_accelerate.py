"""zeroshard.integrations.accelerate: the loop accelerate's users write, against the same loop in one plain process."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import RankPools, assert_equal, free_port
from tests.models import FEATURES, TARGETS, Net

ROWS, MICRO_BATCH, ACCUMULATION = 48, 2, 2


@contextlib.contextmanager
def launched(rank: int, world: int, **sizes: int) -> Iterator[None]:
    """What `accelerate launch` leaves in a rank's environment. A process group that was not there before is closed."""
    from accelerate.state import AcceleratorState, GradientState

    had_group = dist.is_initialized()
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    section = {f"PARALLELISM_CONFIG_{name.upper()}": size for name, size in sizes.items()}
    if section:
        section["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **local, **section}.items():
            patch.setenv(name, str(value))
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            if dist.is_initialized() and not had_group:
                dist.destroy_process_group()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(ROWS, TARGETS, generator=generator, dtype=torch.float64))


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    # accelerate's convention: a scheduler counts the steps that one process would make
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ROWS // MICRO_BATCH // ACCUMULATION)
    return model, optimizer, scheduler


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(losses, gradient norms) of one epoch of the loop in accelerate's documentation."""
    losses, norms = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean())
    return losses, norms


def alone(world: int) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], float]:
    """The same epoch in plain torch: what `world` ranks see at one time is one batch here."""
    model, optimizer, scheduler = parts()
    losses, norms = [], []
    for number, (inputs, targets) in enumerate(DataLoader(data(), batch_size=MICRO_BATCH * world), 1):
        loss = F.mse_loss(model(inputs), targets)
        (loss / ACCUMULATION).backward()
        losses.append(loss.detach())
        if number % ACCUMULATION == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(world):
                scheduler.step()
    return losses, norms, dict(model.state_dict()), scheduler.get_last_lr()[0]


# --------------------------------------------------------------------------------------------------------- the loop


def run_epoch(rank: int, world: int, stage: int, sizes: dict[str, int]) -> tuple[Any, ...]:
    from zeroshard import full_state_dict
    from zeroshard.integrations.accelerate import Accelerator

    with launched(rank, world, **sizes):
        accelerator = Accelerator(shard={"stage": stage}, gradient_accumulation_steps=ACCUMULATION)
        model, optimizer, scheduler = parts()
        kept = model
        loader = DataLoader(data(), batch_size=MICRO_BATCH)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        assert model is kept and type(model) is Net
        losses, norms = train(accelerator, model, optimizer, scheduler, loader)
        return losses, norms, full_state_dict(model), scheduler.get_last_lr()[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_documented_loop_is_that_of_one_process(ranks: RankPools, stage: int) -> None:
    """Losses, gradient norms, clipped steps, learning rate and weights, with gradient accumulation."""
    want = alone(2)
    for losses, norms, weights, lr in ranks(2).run(run_epoch, stage, {}):
        assert_equal(losses, want[0], atol=1e-12)
        assert_equal(norms, want[1], atol=1e-12)
        assert_equal(weights, want[2], atol=1e-12)
        assert lr == pytest.approx(want[3], abs=1e-15)


def test_replicas_of_shards(ranks: RankPools) -> None:
    """dp_replicate_size x dp_shard_size in the YAML: hybrid sharding over all four ranks' gradients."""
    want = alone(4)
    for losses, _, weights, _ in ranks(4).run(run_epoch, 3, {"dp_replicate_size": 2, "dp_shard_size": 2}):
        assert_equal(losses, want[0], atol=1e-12)
        assert_equal(weights, want[2], atol=1e-12)


def run_prepare_variants(rank: int, world: int) -> dict[str, Any]:
    from zeroshard import full_state_dict, stats
    from zeroshard.integrations.accelerate import Accelerator, prepare

    answers: dict[str, Any] = {}
    with launched(rank, world):
        accelerator = Accelerator(shard={"stage": 3}, gradient_accumulation_steps=ACCUMULATION)
        model, optimizer, scheduler = parts()
        accelerator.prepare_model(model, evaluation_mode=True)  # evaluated first, sharded later
        answers["whole"] = sum(p.numel() for p in model.parameters())
        loader, scheduler, optimizer, model = accelerator.prepare(
            DataLoader(data(), batch_size=MICRO_BATCH), scheduler, optimizer, model
        )
        again = accelerator.prepare(model, optimizer)
        assert again[0] is model and again[1] is optimizer, "a second prepare changes nothing"
        train(accelerator, model, optimizer, scheduler, loader)
        answers["weights"] = full_state_dict(model)

        frozen = parts(seed=1)[0]
        want = frozen.eval()(data()[:][0])
        frozen = accelerator.prepare(frozen)  # alone: for inference
        with torch.no_grad():
            assert_equal(frozen(data()[:][0]), want, atol=1e-12)
        assert stats(frozen).gathers > 0
        late = torch.optim.SGD(frozen.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="prepared without it"):
            accelerator.prepare(late)

        first, second = parts()[0], parts(seed=1)[0]
        both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        with pytest.raises(ValueError, match="2 models"):
            accelerator.prepare(first, second, both)

    with launched(rank, world):  # an accelerator that somebody else built
        import accelerate

        stock = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        model, optimizer, scheduler = parts()
        loader = DataLoader(data(), batch_size=MICRO_BATCH)
        prepared = prepare(stock, model, optimizer, scheduler, loader, shard={"stage": 2})
        train(stock, *prepared)
        answers["adopted"] = full_state_dict(model)
    return answers


def test_prepare_in_any_order_twice_alone_and_adopted(ranks: RankPools) -> None:
    want = alone(2)
    for answers in ranks(2).run(run_prepare_variants):
        assert answers["whole"] == sum(x.numel() for x in want[2].values())
        assert_equal(answers["weights"], want[2], atol=1e-12)
        assert_equal(answers["adopted"], want[2], atol=1e-12)


def uneven() -> TensorDataset:
    return TensorDataset(*data()[: 5 * MICRO_BATCH])  # five batches for two ranks


def run_uneven(rank: int, world: int, stage: int) -> tuple[int, dict[str, Tensor]]:
    from zeroshard import full_state_dict
    from zeroshard.integrations.accelerate import Accelerator

    with launched(rank, world):
        accelerator = Accelerator(shard={"stage": stage})
        model, optimizer, _ = parts()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(uneven(), batch_size=MICRO_BATCH))
        steps = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for inputs, targets in loader:
                accelerator.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        assert len(loader) == 3, "even again"
        return steps, full_state_dict(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_uneven_inputs(ranks: RankPools, stage: int) -> None:
    """The last batch is one rank's alone: a mean over the ranks that have work is that of one process."""
    model, optimizer, _ = parts()
    for inputs, targets in DataLoader(uneven(), batch_size=2 * MICRO_BATCH):
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = ranks(2).run(run_uneven, stage)
    assert [steps for steps, _ in results] == [3, 2]
    for _, weights in results:
        assert_equal(weights, dict(model.state_dict()), atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ state


def run_save(rank: int, world: int, folder: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from zeroshard.integrations.accelerate import Accelerator

    with launched(rank, world):
        accelerator = Accelerator(shard={"stage": 3}, gradient_accumulation_steps=ACCUMULATION)
        loader = DataLoader(data(), batch_size=MICRO_BATCH)
        prepared = accelerator.prepare(*parts(), loader)
        train(accelerator, *prepared)
        accelerator.save_state(folder / "state")
        at_save = accelerator.get_state_dict(prepared[0])
        accelerator.save_model(prepared[0], folder / "model")
        train(accelerator, *prepared)
        return at_save, accelerator.get_state_dict(prepared[0])


def run_load(rank: int, world: int, folder: pathlib.Path, train_on: bool) -> tuple[dict[str, Tensor], Any]:
    from zeroshard.integrations.accelerate import Accelerator

    with launched(rank, world):
        accelerator = Accelerator(shard={"stage": 2}, gradient_accumulation_steps=ACCUMULATION)
        loader = DataLoader(data(), batch_size=MICRO_BATCH)
        model, optimizer, scheduler, loader = accelerator.prepare(*parts(seed=3), loader)
        accelerator.load_state(folder / "state")
        loaded = accelerator.get_state_dict(model)
        if train_on:
            train(accelerator, model, optimizer, scheduler, loader)
        return loaded, accelerator.get_state_dict(model)


def test_state_is_saved_whole_and_loaded_by_other_ranks(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    """save_state at 2 ranks, stage 3; load_state at 3 ranks and at 2, stage 2; save_model as accelerate reads it."""
    from safetensors.torch import load_file

    (weights, later), (nothing, _) = ranks(2).run(run_save, tmp_path)
    assert set(weights) == set(Net().state_dict()) and nothing == {}, "whole on the main process, none elsewhere"
    assert_equal(load_file(tmp_path / "model" / "model.safetensors"), weights)
    assert_equal(ranks(3).run(run_load, tmp_path, False)[0][0], weights)
    loaded, trained = ranks(2).run(run_load, tmp_path, True)[0]
    assert_equal(loaded, weights)
    assert_equal(trained, later, atol=1e-12)


# ------------------------------------------------------------------------------------------------- context ranks


def tiny_llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().train()


def sequences(rows: int = 4, length: int = 18) -> dict[str, Tensor]:
    ids = torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def run_context(rank: int, world: int, stage: int, sizes: dict[str, int]) -> tuple[Any, ...]:
    from zeroshard import full_state_dict
    from zeroshard.integrations.accelerate import Accelerator

    with launched(rank, world, **sizes):
        accelerator = Accelerator(shard={"stage": stage})
        model = tiny_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        rows = [{name: x[i] for name, x in sequences().items()} for i in range(4)]
        loader = DataLoader(rows, batch_size=4 // accelerator.num_replicas)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        batches = list(loader)
        assert len(batches) == 1
        cp = accelerator.context_parallel
        with torch.no_grad(), cp:
            part = cp.shard({"input_ids": batches[0]["input_ids"]})
            with cp:
                pass
            assert model(**part).logits.shape[:2] == part["input_ids"].shape, "still inside: split once"
        loss = model(**batches[0]).loss  # the line of a loop that knows nothing of context ranks
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        scheduler.step()
        seen = accelerator.gather_for_metrics(batches[0]["input_ids"])
        names = accelerator.gather_for_metrics([f"replica {rank // accelerator.context_parallel_size}"])
        count = accelerator.gather_for_metrics(torch.tensor(1))
        mean = accelerator.reduce(loss.detach(), "mean")
        assert accelerator.context_parallel_rank == rank % sizes["cp_size"]
        return mean, norm, full_state_dict(model), scheduler.scheduler.last_epoch, seen, names, count


@pytest.mark.parametrize(("world", "sizes"), [(2, {"cp_size": 2}), (4, {"dp_shard_size": 2, "cp_size": 2})])
def test_context_ranks_of_a_loop_that_knows_nothing_of_them(ranks: RankPools, world: int, sizes: dict[str, int]) -> None:
    """Loss, norm and step are those of one process; the scheduler and metrics count each sequence once."""
    model, batch = tiny_llama(), sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loss = model(**batch).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    replicas = world // sizes["cp_size"]
    for stage in (1, 3):
        for mean, got_norm, weights, steps, seen, names, count in ranks(world).run(run_context, stage, sizes):
            assert_equal(mean, loss.detach(), atol=2e-6)  # transformers' loss is fp32
            assert_equal(got_norm, norm, atol=1e-6)
            assert_equal(
                {n: weights[n] for n, _ in model.named_parameters()},
                {n: p.detach() for n, p in model.named_parameters()},
                atol=1e-7,
            )
            assert steps == replicas
            assert_equal(seen, batch["input_ids"])
            assert names == [f"replica {r}" for r in range(replicas)]
            assert len(count) == world, "scalars are partial sums: they come from every rank"


# ---------------------------------------------------------------------------------------------------- what is refused


def run_refusals(rank: int, world: int) -> None:
    from accelerate.utils import ParallelismConfig

    from zeroshard.integrations.accelerate import Accelerator

    wrong = {
        "tp_size=2 is not supported": {"tp_size": 2},
        "= 4, but there are 2 processes": {"dp_shard_size": 2, "cp_size": 2},
        "leaves no ranks to shard over": {"dp_replicate_size": 2},
    }
    for words, sizes in wrong.items():
        with launched(rank, world, **sizes), pytest.raises(ValueError, match=words):
            Accelerator()
        with launched(rank, world), pytest.raises(ValueError, match=words):
            Accelerator(parallelism_config=ParallelismConfig(**sizes))
    with launched(rank, world), pytest.raises(ValueError, match="fp16 does nothing on CPU"):
        Accelerator(mixed_precision="fp16")


def test_what_cannot_be_done_is_refused_by_name(ranks: RankPools) -> None:
    ranks(2).run(run_refusals)


def run_mixed_precision(rank: int, world: int) -> None:
    from zeroshard.integrations.accelerate import Accelerator

    with launched(rank, world):
        accelerator = Accelerator(mixed_precision="bf16", shard={"stage": 3})
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        seen: list[torch.dtype] = []
        model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        output = model(torch.randn(2, FEATURES))
        assert seen == [torch.bfloat16] and output.dtype == torch.float32
        accelerator.backward(output.sum())
        optimizer.step()
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        accelerator.free_memory()
        assert accelerator._models == [] and accelerator._sharded == []


def test_autocast_by_accelerate(ranks: RankPools) -> None:
    ranks(2).run(run_mixed_precision)


def test_private_names_that_are_relied_upon() -> None:
    """accelerate has no extension point for these; a release that moves them must fail here, not in a training."""
    import accelerate
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import ParallelismConfig

    config = ParallelismConfig(cp_size=2)
    assert isinstance(vars(ParallelismConfig)["cp_enabled"], property) and config.cp_enabled
    for name in ("_validate_accelerator", "build_device_mesh", "total_size"):
        assert hasattr(ParallelismConfig, name)
    for name in ("prepare_model", "prepare_optimizer", "prepare_scheduler", "get_state_dict", "gather_for_metrics"):
        assert hasattr(accelerate.Accelerator, name)
    accelerator = accelerate.Accelerator(cpu=True)
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
        assert getattr(accelerator, name) == []
    assert {"step_with_optimizer", "split_batches", "gradient_state", "optimizers"} <= set(
        AcceleratedScheduler(None, []).__dict__
    )
    assert os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") is None
