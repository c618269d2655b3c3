"""A model to estimate, from what is on disk: a configuration of transformers, or safetensors files alone."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import torch
from torch import nn

from ..checkpoint.tensorfile import stored_in
from ..config import ShardError
from .terminal import needs


@dataclasses.dataclass(frozen=True)
class Described:
    """A model on the meta device.

    kept: (batch, tokens of one rank) -> bytes that autograd keeps of a forward: all, and with every block recomputed in
    backward; `None` where only the shapes of the weights are known.
    """

    name: str
    model: nn.Module
    kept: Callable[[int, int], tuple[int, int]] | None = None
    logit_width: int = 0  # vocabulary, where there are logits

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.model.parameters())


def read(path: pathlib.Path, compute: torch.dtype | None) -> Described:
    """`path`: a folder with config.json, such a file, or safetensors. `compute`: dtype of activations.

    Raises ShardError if there is nothing to read.
    """
    config = path / "config.json" if path.is_dir() else path
    if config.is_file() and config.suffix == ".json":
        return _from_config(config, compute)
    return Described(path.name, _from_shapes(path))


def _from_config(path: pathlib.Path, compute: torch.dtype | None) -> Described:
    with needs("hf", f"a model from {path.name}"):
        from ..integrations import pretrained
    config = pretrained.read_config(path)
    blocks = getattr(config.get_text_config(), "num_hidden_layers", 1)

    def kept(batch: int, tokens: int) -> tuple[int, int]:
        model = pretrained.on_meta(config, compute or torch.float32)
        everything = pretrained.kept_bytes(model, batch, tokens)
        if not model.supports_gradient_checkpointing:
            return everything, everything
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        inputs = pretrained.kept_bytes(model, batch, tokens)
        return everything, inputs + (everything - inputs) // blocks  # backward recomputes one block at a time

    model = pretrained.on_meta(config)
    head = model.get_output_embeddings()
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return Described(name, model, kept, 0 if head is None else config.get_text_config().vocab_size)


def _from_shapes(path: pathlib.Path) -> nn.Module:
    """Modules as the dotted names tell them. A component whose children are all numbers is a list of blocks."""
    stored = stored_in(path)
    if not stored:
        raise ShardError(f"{path} holds no tensors")
    root: dict[str, object] = {}
    for name, tensor in stored.items():
        node = root
        *parts, leaf = name.split(".")
        for part in parts:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ShardError(f"{path}: {name} lies inside of another tensor, so the names are not those of a model")
            node = inner
        trained = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        node[leaf] = nn.Parameter(values, requires_grad=trained)
    return _module(root)


class Part(nn.Module):
    """A module of which only the names and shapes of its weights are known."""


def _module(node: dict[str, object]) -> nn.Module:
    numbered = bool(node) and all(name.isdigit() and isinstance(value, dict) for name, value in node.items())
    module: nn.Module = nn.ModuleList() if numbered else Part()
    for name in sorted(node, key=int) if numbered else node:
        value = node[name]
        if isinstance(value, dict):
            module.add_module(name, _module(value))
        elif isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
    return module
