"""Fine-tunes a language model with LoRA through the Trainer of transformers. `# <-` marks what this project adds to it.

    accelerate launch --config_file examples/accelerate/cpu.yaml examples/finetune_transformers.py

With that YAML two ranks share each sequence of 8,192 tokens. The frozen base is sharded like everything else, and the
result in the output folder is the adapter alone. Options are those of finetune_long_context.py; instead of --resume, a run
that is started again goes on from the last checkpoint in its output folder (--checkpoint-every).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import peft
import torch
import transformers
from accelerate import PartialState
from finetune import run
from finetune.data import pack, read_corpus
from finetune.model import convert_embedded, embedded_available, load
from finetune.options import Options, UserError, parse

from zeroshard.integrations.transformers import Trainer  # <- instead of `from transformers import Trainer`

DEFAULTS = ["--seq-len", "8192", "--steps", "4", "--gradient-checkpointing", "--output", "runs/finetune_transformers"]
LORA_RANK = 16


def arguments(options: Options) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(options.output),
        use_cpu=not torch.accelerator.is_available(),
        parallelism_config=run.parallelism(options),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": options.min_lr},
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
        save_strategy="steps" if options.checkpoint_every else "no",
        save_steps=options.checkpoint_every or 1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )


def train(options: Options) -> dict[str, float]:
    """Held-out losses before and after. Every rank calls it, with the same options."""
    args = arguments(options)
    if options.model == "smollm2" and embedded_available():
        with args.main_process_first():
            convert_embedded()
    loaded = load(options)
    sequences, held_out = pack(read_corpus(options.data), loaded.encode, seq_len=options.seq_len, seed=options.seed)
    torch.manual_seed(options.seed)
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(r=LORA_RANK, target_modules="all-linear"))

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sequences,
        eval_dataset=held_out,
        processing_class=loaded.tokenizer,
        data_collator=transformers.default_data_collator,
        shard={"stage": options.stage, "precision": run.precision(options)},  # <- shards model and optimizer
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(args.output_dir))
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"{loaded.name}: held-out loss {before:.4f} -> {after:.4f}; adapter in {options.output}", flush=True)
    return {"before": before, "after": after}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for something the user can put right."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run.use_all_cores()
    try:
        train(parse([*DEFAULTS, *(sys.argv[1:] if argv is None else argv)]))
        PartialState().destroy_process_group()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
