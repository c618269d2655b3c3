"""Lightning: a strategy is given to the Trainer, the LightningModule stays as it was.

    python examples/lightning_trainer.py --devices 2            # Lightning starts the ranks
    torchrun --nproc-per-node 2 examples/lightning_trainer.py --devices 2
    python examples/lightning_trainer.py --devices 2 --context 2         # the ranks share each sequence; the same losses

The lines marked `# <-` are for sharding, those marked `# <=` for sharing sequences over ranks.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from long_context import VOCAB, Transformer, batch_of
from torch import Tensor
from torch.utils.data import DataLoader

from zeroshard.integrations.lightning import ZeroShardStrategy  # <-

SEQUENCES, SEQ_LEN, BATCH, EPOCHS = 32, 32, 8, 3


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        cp = self.trainer.strategy.context_parallel  # <=
        if cp is not None:  # <=
            batch = cp.shard(batch)  # <=
            with cp:  # <=
                logits = self.model(batch["input_ids"], batch["position_ids"])  # <=
                return cp.cross_entropy(logits, batch["shift_labels"])  # <=
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss']:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--context", type=int, default=1)
    options = parser.parse_args()

    L.seed_everything(0)
    sequences = [{name: x[0] for name, x in batch_of(i, 1, SEQ_LEN).items()} for i in range(SEQUENCES)]
    replicas = options.devices // options.context
    trainer = L.Trainer(
        strategy=ZeroShardStrategy(stage=options.stage, context=options.context),  # <-
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Language(), DataLoader(sequences, batch_size=BATCH // replicas))


if __name__ == "__main__":
    main()
