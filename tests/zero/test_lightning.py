"""zeroshard.integrations.lightning: LightningModules under the strategy, against the same Trainer on one device.

Rows are dealt to the ranks in turn, so what all ranks see in one step is one batch of the single process, and means agree.
Everything is computed in fp64, where only the order of sums may differ.
"""

import contextlib
import csv
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import zeroshard
from tests.harness import RankPools, assert_equal, free_port, run_program
from tests.models import FEATURES, GPT, TARGETS, VOCABULARY, Block, Net
from zeroshard.integrations.lightning import ZeroShardStrategy

ROWS, BATCH = 24, 4  # of all ranks together
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


# ------------------------------------------------------------------------------------------------- modules, data


class Regression(L.LightningModule):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.save_hyperparameters({"width": FEATURES})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("held_out", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Adversaries(L.LightningModule):
    """Manual optimization: two optimizers, whose parameters are toggled, clipped by hand, stepped in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(FEATURES, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        one, two = self.optimizers()
        self.toggle_optimizer(one)
        made = self.generator(batch[0])
        loss = -self.critic(made).mean()
        one.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        one.step()
        self.untoggle_optimizer(one)
        self.toggle_optimizer(two)
        other = (self.critic(self.generator(batch[0]).detach()) - self.critic(batch[0])).square().mean()
        two.zero_grad()
        self.manual_backward(other)
        two.step()
        self.untoggle_optimizer(two)
        return {"loss": loss.detach() + other.detach()}

    def configure_optimizers(self) -> Any:
        one = torch.optim.AdamW(self.generator.parameters(), lr=0.02, eps=1e-3)
        return [one, torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9)]


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, TARGETS))


def data(rows: int = ROWS, seed: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (FEATURES, TARGETS)))


def loader(rows: int = ROWS, seed: int = 7, replicas: int = 1) -> DataLoader:
    """On one process with the sampler that Lightning gives to several: training is shuffled."""
    rows_ = data(rows, seed)
    sampler = DistributedSampler(rows_, 1, 0) if replicas == 1 else None
    return DataLoader(rows_, batch_size=BATCH // replicas, sampler=sampler)


class Losses(Callback):
    """What training_step returned, a mean over ranks."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *rest: Any) -> None:
        self.seen.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone())))


# ------------------------------------------------------------------------------------------------- where it runs


@contextlib.contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """What torchrun leaves in a rank's environment."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
            patch.setenv(name, str(value))
        patch.setenv("TORCHELASTIC_RUN_ID", "test")
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    with launched(0, 1):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(c, ModelCheckpoint) for c in options.get("callbacks", []))
    base = {"accelerator": "cpu", "devices": devices, "precision": "64-true", "max_epochs": 2, "num_sanity_val_steps": 0}
    return L.Trainer(strategy=strategy, **(base | quiet | options))


@dataclasses.dataclass(frozen=True)
class Run:
    """A fit with a validation each epoch. `stage=None`: Lightning's own strategy, DDP on several ranks."""

    kind: str = "net"
    stage: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def strategy(self) -> Any:
        return ZeroShardStrategy(self.stage) if self.stage is not None else None

    def module(self) -> L.LightningModule:
        torch.manual_seed(0)
        made = {"net": lambda: Regression(Net()), "norm": lambda: Regression(normalized()), "manual": Adversaries}
        return made[self.kind]()


def fitted(run: Run, world: int) -> dict[str, Any]:
    module, losses = run.module(), Losses()
    job = trainer(run.strategy or ("auto" if world == 1 else "ddp"), world, callbacks=[losses], **dict(run.options))
    held_out = {} if run.kind == "manual" else {"val_dataloaders": loader(8, seed=8, replicas=world)}
    job.fit(module, loader(replicas=world), **held_out)
    metrics = {name: value.double() for name, value in job.callback_metrics.items()}
    sharded = run.stage is not None
    return {
        "losses": losses.seen,
        "metrics": metrics,
        "weights": zeroshard.full_state_dict(module) if sharded else {n: v.clone() for n, v in module.state_dict().items()},
    }


def on_ranks(rank: int, world: int, runs: list[Run]) -> list[dict[str, Any]]:
    with launched(rank, world):
        return [fitted(run, world) for run in runs]


# ------------------------------------------------------------------------------------------------- training

TRAINER_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped by norm": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated, an incomplete last step": {"accumulate_grad_batches": 4},
}


def test_fit_gives_what_one_process_gives(ranks: RankPools) -> None:
    """Losses of every step, logged metrics and weights, at each stage, with each of the Trainer's flags."""
    flags = [tuple(options.items()) for options in TRAINER_FLAGS.values()]
    runs = [Run(stage=stage, options=options) for stage in (0, 1, 2, 3) for options in flags]
    alone = {options: fitted(Run(options=options), 1) for options in flags}
    for run, results in zip(runs, zip(*ranks(2).run(on_ranks, runs), strict=True), strict=True):
        want = alone[run.options]
        assert len(want["losses"]) == 12 and want["metrics"].keys() >= {"loss", "held_out"}
        for got in results:
            try:
                assert_equal(got, want, **CLOSE)
            except AssertionError as error:
                raise AssertionError(f"{run}\n{error}") from None


def test_manual_optimization_with_two_optimizers(ranks: RankPools) -> None:
    runs = [Run("manual", stage) for stage in (1, 2, 3)]
    want = fitted(Run("manual"), 1)
    for results in ranks(2).run(on_ranks, runs):
        for got in results:
            assert_equal(got, want, **CLOSE)


def batch_norm_on_ranks(rank: int, world: int) -> list[dict[str, Any]]:
    with launched(rank, world):
        return [fitted(Run("norm", stage, (("limit_train_batches", 4),)), world) for stage in (None, 1, 3)]


def test_running_statistics_are_evaluated_as_under_ddp(ranks: RankPools) -> None:
    """Each rank normalizes by its own rows, so there is no single process to compare with; DDP evaluates rank 0's."""
    for rank, (want, *others) in enumerate(ranks(2).run(batch_norm_on_ranks)):
        if rank:  # each rank's own, the last batch's included
            want["weights"] = {name: v for name, v in want["weights"].items() if "running" not in name}
        for got in others:
            assert_equal({**got, "weights": {name: got["weights"][name] for name in want["weights"]}}, want, **CLOSE)


class Mixed(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        made = self.net(batch[0].float())
        self.seen = made.dtype
        return F.mse_loss(made.float(), batch[1].float())


def mixed_on_ranks(rank: int, world: int, stages: list[int | None]) -> list[Any]:
    from lightning.pytorch.plugins import MixedPrecision

    results = []
    for stage in stages:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        for plugin in (MixedPrecision("bf16-mixed", "cpu"), MixedPrecision("16-mixed", "cpu", scaler)):
            torch.manual_seed(0)
            module, losses = Mixed(Net()), Losses()
            flags = {"precision": None, "plugins": [plugin], "gradient_clip_val": 0.5, "callbacks": [losses]}
            with launched(rank, world):
                strategy = "ddp" if stage is None else ZeroShardStrategy(stage)
                trainer(strategy, world, **flags).fit(module, loader(replicas=world))
            results.append((losses.seen, str(module.seen), plugin.scaler and plugin.scaler.get_scale()))
    return results


def test_mixed_precision_and_the_loss_scaler(ranks: RankPools) -> None:
    """The Trainer's own plugins; fp16 with a scaler that starts too high, so that steps are skipped on all ranks alike."""
    for results in ranks(2).run(mixed_on_ranks, [None, 1, 3]):
        want, got = results[:2], results[2:]
        assert [kind for _, kind, _ in results] == ["torch.bfloat16", "torch.float16"] * 3
        for number, (losses, _, scale) in enumerate(got):
            assert scale == want[number % 2][2] and (scale is None or scale < 2.0**24)
            assert losses == pytest.approx(want[number % 2][0], rel=2e-2), "the same roundings but for the sums over ranks"


# ------------------------------------------------------------------------------------------------- checkpoints


def saved_and_resumed(rank: int, world: int, folder: pathlib.Path, save: int, resume: int) -> Any:
    """An epoch under one stage, another from its checkpoint under the other; then tested from the best one."""
    with launched(rank, world):
        first = trainer(ZeroShardStrategy(save), world, max_epochs=1, callbacks=[checkpoints(folder, save_last=True)])
        first.fit(Run().module(), loader(replicas=world), loader(8, 8, world))
        module, losses = Run().module(), Losses()
        second = trainer(ZeroShardStrategy(resume), world, callbacks=[losses, checkpoints(folder)])
        second.fit(module, loader(replicas=world), loader(8, 8, world), ckpt_path=str(folder / "epoch=0.ckpt"))
        best = second.test(dataloaders=loader(8, 8, world), ckpt_path="best", verbose=False)
        weights_only = folder / "weights.ckpt"
        second.save_checkpoint(weights_only, weights_only=True)
        return losses.seen, zeroshard.full_state_dict(module), best, second.checkpoint_callback.best_model_path


def checkpoints(folder: pathlib.Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", monitor="held_out", save_top_k=-1, **options)


def test_checkpoints_resume_at_other_stages_and_numbers_of_ranks(
    ranks: RankPools, tmp_path: pathlib.Path, one_rank: None
) -> None:
    want = fitted(Run(), 1)
    for save, resume in ((3, 1), (1, 3)):
        folder = tmp_path / f"{save}{resume}"
        for losses, weights, best, path in ranks(2).run(saved_and_resumed, folder, save, resume):
            assert_equal(losses, want["losses"][6:], **CLOSE)
            assert path == str(folder / "epoch=1.ckpt")
            assert best[0]["held_out"] == pytest.approx(float(want["metrics"]["held_out"]), rel=1e-6)
            assert {name: value.shape for name, value in weights.items()} == {n: v.shape for n, v in want["weights"].items()}
        assert sorted(p.name for p in folder.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt", "weights.ckpt"]
        assert (folder / "last.ckpt").is_dir()

    module, losses = Run().module(), Losses()
    alone = trainer(ZeroShardStrategy(2), 1, callbacks=[losses])
    alone.fit(module, loader(), loader(8, 8), ckpt_path=str(tmp_path / "31" / "epoch=0.ckpt"))
    assert_equal(losses.seen, want["losses"][6:], **CLOSE)
    assert_equal(zeroshard.full_state_dict(module), want["weights"], **CLOSE)

    plain = Regression.load_from_checkpoint(tmp_path / "13" / "weights.ckpt", net=Net().double())
    assert plain.hparams["width"] == FEATURES
    assert_equal(dict(plain.state_dict()), want["weights"], **CLOSE)
    again = trainer(ZeroShardStrategy(3)).validate(Run().module(), loader(8, 8), str(tmp_path / "13" / "weights.ckpt"), False)
    assert again[0]["held_out"] == pytest.approx(float(want["metrics"]["held_out"]), rel=1e-6)


def resumed_from_a_file(rank: int, world: int, path: str) -> list[float]:
    with launched(rank, world):
        losses = Losses()
        trainer(ZeroShardStrategy(3), world, callbacks=[losses]).fit(Run().module(), loader(replicas=world), ckpt_path=path)
        return losses.seen


def test_a_run_without_sharding_is_continued_sharded(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    before = trainer(max_epochs=1, callbacks=[checkpoint := ModelCheckpoint(tmp_path)])
    before.fit(Run().module(), loader())
    for losses in ranks(2).run(resumed_from_a_file, checkpoint.best_model_path):
        assert_equal(losses, fitted(Run(), 1)["losses"][6:], **CLOSE)


# ------------------------------------------------------------------------------------------------- sequences


class Sequences(Dataset):
    """Each access draws anew, and each rank draws something else: what a random crop does."""

    def __init__(self, rank: int = 0):
        self.generator, self.seen = torch.Generator().manual_seed(rank), []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.seen.append(index)
        ids = torch.randint(VOCABULARY, (18,), generator=self.generator)
        return {"input_ids": ids, "labels": ids}


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        cp = getattr(self.trainer.strategy, "context_parallel", None)
        if cp is None:
            logits = self.model(batch["input_ids"])
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        batch = cp.shard(batch)
        assert batch["input_ids"].shape[1] == 9
        with cp:
            logits = self.model(batch["input_ids"], batch["position_ids"])
            return cp.cross_entropy(logits, batch["shift_labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class TransformersLanguage(Language):
    def __init__(self) -> None:
        import transformers

        super().__init__()
        size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **size))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def language(kind: type[Language], strategy: Any, devices: int, rank: int) -> tuple[list[float], dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    module, losses, sequences = kind(), Losses(), Sequences(rank)
    job = trainer(strategy, devices, callbacks=[losses], max_epochs=1)
    job.fit(module, DataLoader(sequences, batch_size=4, sampler=DistributedSampler(sequences, 1, 0) if devices == 1 else None))
    weights = module.state_dict() if devices == 1 else zeroshard.full_state_dict(module)
    return losses.seen, dict(weights), sequences.seen


def languages_on_ranks(rank: int, world: int, kinds: list[type[Language]]) -> list[Any]:
    with launched(rank, world):
        return [language(kind, ZeroShardStrategy(stage, context=2), world, rank) for kind in kinds for stage in (1, 3)]


def test_context_ranks_share_their_batches(ranks: RankPools) -> None:
    """The first rank's batches, whatever the others draw; losses and weights are those of one process. transformers
    turns positions and logits in fp32."""
    kinds = [Language, TransformersLanguage]
    want = [(kind, *language(kind, "auto", 1, 0)) for kind in kinds for _ in (1, 3)]
    for results in ranks(2).run(languages_on_ranks, kinds):
        for got, (kind, losses, weights, seen) in zip(results, want, strict=True):
            tolerance = CLOSE if kind is Language else {"rtol": 1e-6}
            assert_equal(got[0], losses, **tolerance)
            assert_equal(got[1], weights, **tolerance)
            assert got[2] == seen, "the sampler counts replicas, not ranks"


def test_samplers_count_replicas() -> None:
    from lightning.fabric.plugins.environments import LightningEnvironment

    strategy = ZeroShardStrategy(context=2)
    with launched(5, 6):
        trainer(strategy, 6)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 2}
        with pytest.raises(ValueError, match="context=4 does not divide the 6 ranks"):
            trainer(ZeroShardStrategy(context=4), 6)
    with pytest.raises(ValueError, match="context=4 does not divide the 2 ranks"):  # before any process is started
        trainer(ZeroShardStrategy(context=4), 2, plugins=[LightningEnvironment()])
    with pytest.raises(ValueError, match="context=0"):
        ZeroShardStrategy(context=0)
    with pytest.raises(zeroshard.ShardError, match="stage=4"):
        ZeroShardStrategy(stage=4)


# ------------------------------------------------------------------------------------------- one module, many calls


class Built(Regression):
    """Its layers are made in configure_model, on the meta device."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            torch.manual_seed(0)
            with torch.device("meta"):
                self.net = normalized()


def in_turn(rank: int, world: int, folder: pathlib.Path) -> dict[str, Any]:
    """Everything a user may call on one module, one after the other."""
    seen: dict[str, Any] = {}
    with launched(rank, world):
        module, losses = Run().module(), Losses()
        strategy = ZeroShardStrategy(3)
        stop = EarlyStopping("held_out", patience=1, min_delta=10.0)
        flags = {"logger": CSVLogger(folder), "enable_model_summary": True, "callbacks": [losses, stop, Norms()]}
        job = trainer(strategy, world, max_epochs=9, log_every_n_steps=1, **flags)
        held_out = loader(8, 8, world)
        seen["before"] = job.validate(module, held_out, verbose=False)
        job.fit(module, loader(replicas=world), held_out)
        seen["epochs"], seen["losses"] = job.current_epoch, list(losses.seen)
        seen["rows"] = len(torch.cat(job.predict(module, DataLoader(data(5), batch_size=1))))
        seen["after"] = job.test(module, held_out, verbose=False)
        for other in (ZeroShardStrategy(2), ZeroShardStrategy(3, context=2)):
            with pytest.raises(ValueError, match="sharded with other arguments"):
                trainer(other, world).validate(module, held_out)
        again = trainer(ZeroShardStrategy(3), world, max_epochs=1, callbacks=[losses])
        again.fit(module, loader(replicas=world))
        seen["again"] = losses.seen[len(seen["losses"]) :]
        with pytest.raises(ValueError, match=r"StochasticWeightAveraging.*zeroshard\.EMA"):
            averaging = [StochasticWeightAveraging(1e-2)]
            trainer(ZeroShardStrategy(3), world, callbacks=averaging).fit(Run().module(), loader())
    return seen


class Norms(Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        module.log("norm", nn.utils.get_total_norm([p.grad for p in module.parameters()]))


def test_one_module_validated_fitted_stopped_predicted_and_fitted_again(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    module, losses = Run().module(), Losses()
    stop = EarlyStopping("held_out", patience=1, min_delta=10.0)
    logs = CSVLogger(tmp_path / "one")
    job = trainer(max_epochs=9, callbacks=[losses, stop, Norms()], logger=logs, log_every_n_steps=1)
    before = job.validate(module, loader(8, 8), verbose=False)
    job.fit(module, loader(), loader(8, 8))
    epochs, first = job.current_epoch, list(losses.seen)
    after = job.test(module, loader(8, 8), verbose=False)
    trainer(max_epochs=1, callbacks=[losses]).fit(module, loader())
    results = ranks(2).run(in_turn, tmp_path / "two")
    for got in results:
        assert epochs == got["epochs"] < 9
        assert_equal((got["losses"], got["again"]), (first, losses.seen[len(first) :]), **CLOSE)
        for name, want in (("before", before), ("after", after)):
            assert got[name][0]["held_out"] == pytest.approx(want[0]["held_out"], rel=1e-6)
    assert [got["rows"] for got in results] == [3, 2], "shares of another length are predicted, too"
    tables = [list(csv.DictReader((tmp_path / n).rglob("metrics.csv").__next__().open())) for n in ("one", "two")]
    for got, want in zip(*reversed(tables), strict=True):
        assert got.keys() == want.keys() and {k for k, v in got.items() if v} == {k for k, v in want.items() if v}
        for name, value in want.items():
            assert not value or float(got[name]) == pytest.approx(float(value), rel=1e-6), name


def built_on_ranks(rank: int, world: int) -> dict[str, Tensor]:
    with launched(rank, world):
        module = Built()
        trainer(ZeroShardStrategy(3), world, max_epochs=1).fit(module, loader(replicas=world))
        return zeroshard.full_state_dict(module)


def test_layers_made_in_configure_model_get_their_values_sharded(ranks: RankPools) -> None:
    want = {n: v.shape for n, v in Regression(normalized()).state_dict().items()}
    for got in ranks(2).run(built_on_ranks):
        assert {n: v.shape for n, v in got.items()} == want
        assert all(v.isfinite().all() for v in got.values())


def test_the_trainer_of_the_older_package_takes_the_strategy(tmp_path: pathlib.Path) -> None:
    """lightning and pytorch_lightning are the same library under two names; each refuses the other's classes."""
    (tmp_path / "script.py").write_text(OLDER)
    run_program([sys.executable, str(tmp_path / "script.py")], env={"MASTER_PORT": str(free_port())}).check()


OLDER = """
import pytorch_lightning, torch
from zeroshard.integrations.lightning import ZeroShardStrategy

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pytorch_lightning.Trainer(strategy=ZeroShardStrategy(), accelerator="cpu", devices=1, max_epochs=1, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2)))
assert trainer.global_step == 4
"""
