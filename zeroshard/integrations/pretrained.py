"""A transformers model without its weights: on the meta device, from its configuration alone; and what a forward keeps."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from zeroshard.config import ShardError
from zeroshard.hooks import watch_saved
from zeroshard.memory.estimate import NumbersAreOne

ATTENTION = "zeroshard_meta"


def read_config(path: str | os.PathLike[str]) -> Any:
    """The configuration in a folder or file. Raises ShardError for one that transformers does not know."""
    try:
        return transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # a dozen types for missing keys, unknown families and code of the model's own
        reason = str(error).strip().splitlines()[0]
        raise ShardError(f"{path} is no configuration that transformers {transformers.__version__} knows: {reason}") from error


def on_meta(config: Any, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The model of a configuration, a causal language model where there is one, costing no memory."""
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    transformers.AttentionInterface.register(ATTENTION, _attention)
    transformers.AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    try:
        with torch.device("meta"):
            return kind.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShardError(f"{config.model_type}: transformers cannot build it on the meta device: {reason}") from error


def kept_bytes(model: transformers.PreTrainedModel, batch: int, tokens: int) -> int:
    """What autograd keeps for backward of one forward over `batch` sequences of `tokens`, parameters aside.

    Counted, not calculated: the forward runs on the meta device, with attention that keeps what fused kernels do. The
    loss and what it keeps of the logits are not in it.

    Raises ShardError if this model's forward needs values.
    """
    own = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}  # keeps them alive: an address is taken once

    def see(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage

    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    model.train()
    try:
        with NumbersAreOne(), watch_saved(see):
            model(input_ids=ids, use_cache=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShardError(f"{type(model).__name__} cannot run on the meta device: {reason}") from error
    return sum(storage.nbytes() for storage in kept.values())


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, S, D], key and value [B, Hkv, S, D] -> [B, S, Hq, D]. The fused kernel keeps those, the output and one
    number a row: on a GPU as on a CPU, and in a ring."""
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)[0]
    return out.transpose(1, 2), None
