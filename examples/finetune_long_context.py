"""Fine-tunes a language model on long sequences. A plain loop; `# <-` marks what this project adds to it.

    accelerate launch --config_file examples/accelerate/cpu.yaml examples/finetune_long_context.py

How states and sequences are split over the ranks changes memory and time, never the loss: with one global batch it is
the same on one rank, on replicas, on ranks that share a sequence and on both, at every stage.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch
import transformers
from accelerate import PartialState
from finetune import run
from finetune.data import batches
from finetune.memory import ProcessMemory
from finetune.model import NextTokenLoss
from finetune.options import Options, UserError, parse
from rich.console import Console


def train(options: Options, console: Console) -> list[float]:
    """The loss of each step. Every rank calls it, with the same options."""
    accelerator = run.build_accelerator(options)  # <- zeroshard's, in place of accelerate's
    memory = ProcessMemory(accelerator.device)
    loaded, sequences, held_out = run.build_inputs(accelerator, options, console)
    model = NextTokenLoss(loaded.model, accelerator.context_parallel)  # <- splits sequences, when ranks share them
    predicted = run.estimate(accelerator, options, model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, run.cosine(options))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)  # <- shards model and optimizer

    done, seen = run.resume(options, model, optimizer, scheduler) if options.goes_on else (0, 0)
    micro_batches = options.gradient_accumulation_steps
    per_step = options.batch_size * micro_batches * accelerator.num_replicas
    last = seen + (options.steps - done) * per_step
    loader = batches(sequences, batch_size=options.batch_size, first=seen, last=last, seed=options.seed)
    test_loader = torch.utils.data.DataLoader(held_out, batch_size=options.batch_size)
    loader, test_loader = accelerator.prepare(loader, test_loader)

    about = {"model": loaded.name, "predicted": predicted, **run.speed(accelerator, options, loaded.model)}
    recorder = run.Recorder(accelerator, options, console, done, **about)
    recorder.held_out(done, run.evaluate(accelerator, model, test_loader))
    losses = []
    with memory, recorder.steps:
        for step, window in enumerate(run.windows(loader, micro_batches), done + 1):
            started, total, norm = time.perf_counter(), torch.zeros((), device=accelerator.device), 0.0
            tokens = run.mean_tokens(accelerator, window)
            with run.traced(options, step - done):  # <- nothing, but for one step of a run with --trace
                for batch in window:
                    with accelerator.accumulate(model):
                        loss = model(batch, tokens)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients and options.max_grad_norm:
                            norm = float(accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm))
                        optimizer.step()
                        optimizer.zero_grad()
                    total += loss.detach() / micro_batches
            lr = scheduler.get_last_lr()[0]
            scheduler.step()
            losses.append(float(accelerator.reduce(total, "mean")))
            seconds = time.perf_counter() - started
            recorder.train(
                step, loss=losses[-1], lr=lr, grad_norm=norm, seconds=seconds,
                tokens_per_s=per_step * options.seq_len / seconds, memory=memory.now() - memory.before,
            )  # fmt: skip
            if options.checkpoint_every and step % options.checkpoint_every == 0 and step < options.steps:
                run.save(options, model, optimizer, scheduler, step, seen + (step - done) * per_step)
    recorder.held_out(options.steps, run.evaluate(accelerator, model, test_loader))
    recorder.finish(model, predicted, memory)
    run.save(options, model, optimizer, scheduler, options.steps, last)
    run.export(options, model, loaded)
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for something the user can put right, 1 when ranks diverged or one was lost."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run.use_all_cores()
    rank = int(os.environ.get("RANK", "0"))
    options = None
    try:
        options = parse(argv)
        train(options, Console(quiet=rank > 0))
        PartialState().destroy_process_group()
    except UserError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(5)  # all ranks got here; the launcher ends the others, rank 0 is to speak first
        return 2
    except Exception as error:
        if options is None or not run.is_told_plainly(error):
            raise
        print(f"error: rank {rank}: {error}\n{run.how_to_go_on(options)}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
