"""Documents packed into long sequences.

A sequence is documents end to end. Each token knows its document and its position in it, so attention stays inside a
document and the first token of each, which nothing precedes, is no target:

    input_ids     a a a a b b c c c        [S]
    labels        . a a a . b . c c        [S]  (. is -100; not shifted)
    position_ids  0 1 2 3 0 1 0 1 2        [S]
    documents     0 0 0 0 1 1 2 2 2        [S]  (-1 is padding)
"""

from __future__ import annotations

import dataclasses
import pathlib
import pydoc_data.topics
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from finetune.options import UserError

HELD_OUT = 10  # one document in so many is never trained on
IGNORED = -100
MAX_FILE_BYTES = 16 * 2**20  # a larger file in a folder of text is no text of a person's

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts by name."""

    train: dict[str, str]
    held_out: dict[str, str]
    name: str


def read_corpus(folder: pathlib.Path | None) -> Corpus:
    """The Python language reference that CPython carries, or the text files under `folder`."""
    if folder is None:
        texts, name = dict(pydoc_data.topics.topics), "the Python language reference"
    else:
        texts, name = dict(_text_files(folder)), str(folder)
        if len(texts) < 2:
            raise UserError(f"--data {folder}: found {len(texts)} text files, but need one to train on and one to hold out.")
    held_out = set(sorted(texts)[::HELD_OUT])
    return Corpus(
        train={n: t for n, t in texts.items() if n not in held_out},
        held_out={n: t for n, t in texts.items() if n in held_out},
        name=name,
    )


def _text_files(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an image, an archive
            continue
        if text.strip() and "\0" not in text:
            yield name.as_posix(), text


class PackedSequences(Dataset[Batch]):
    """Token lists packed end to end into sequences of `seq_len`; a document cut by a border begins anew after it."""

    def __init__(self, documents: list[list[int]], seq_len: int, keep_rest: bool):
        tokens = torch.tensor([t for d in documents for t in d], dtype=torch.long)
        owner = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([len(d) for d in documents]))
        rest = len(tokens) % seq_len
        if rest and keep_rest:
            tokens = torch.nn.functional.pad(tokens, (0, seq_len - rest))
            owner = torch.nn.functional.pad(owner, (0, seq_len - rest), value=-1)
        whole = len(tokens) // seq_len * seq_len
        self.input_ids = tokens[:whole].view(-1, seq_len)
        self.documents = owner[:whole].view(-1, seq_len)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Batch:
        ids, owner = self.input_ids[index], self.documents[index]
        here = torch.arange(len(ids))
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = owner[1:] != owner[:-1]
        start = torch.where(first, here, 0).cummax(0).values
        labels = ids.masked_fill(first | (owner < 0), IGNORED)
        return {"input_ids": ids, "labels": labels, "position_ids": here - start, "documents": owner}

    def pad(self, multiple: int) -> None:
        """Adds sequences of nothing but padding, so that every replica gets the same number of batches."""
        extra = -len(self) % multiple
        self.input_ids = torch.cat([self.input_ids, self.input_ids.new_zeros(extra, self.input_ids.shape[1])])
        self.documents = torch.cat([self.documents, self.documents.new_full((extra, self.documents.shape[1]), -1)])


def pack(
    corpus: Corpus, encode: Callable[[str], list[int]], *, seq_len: int, seed: int
) -> tuple[PackedSequences, PackedSequences]:
    """(train, held out). Training documents come in an order drawn with `seed`."""
    names = list(corpus.train)
    shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    train = PackedSequences([encode(corpus.train[names[i]]) for i in shuffled], seq_len, keep_rest=False)
    if len(train) == 0:
        raise UserError(
            f"--seq-len {seq_len}: {corpus.name} has fewer tokens to train on. Give more text or a shorter sequence."
        )
    return train, PackedSequences([encode(text) for text in corpus.held_out.values()], seq_len, keep_rest=True)


def batches(data: PackedSequences, *, batch_size: int, first: int, last: int, seed: int) -> DataLoader[Batch]:
    """Batches of the sequences number `first` to `last` in an endless order: every epoch a new permutation.

    The order is a function of `seed` alone. Dealt out batch by batch to the replicas, any number of them, and any
    number of micro-batches, sees the same sequences in a step as long as their product with `batch_size` is the same.
    """
    order: list[int] = []
    for epoch in range(first // len(data), (last - 1) // len(data) + 1):
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(len(data), generator=generator).tolist()
    start = first // len(data) * len(data)
    return DataLoader(data, batch_size=batch_size, sampler=order[first - start : last - start])


def valid_tokens(batch: Batch) -> torch.Tensor:
    """How many tokens of a whole batch are targets: labels count once shifted, so the first column never does."""
    return (batch["labels"][:, 1:] != IGNORED).sum()
