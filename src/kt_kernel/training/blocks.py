"""Joins encoded documents and cuts them into blocks: for training, and held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from .documents import read_documents
from .encoding import IGNORED, Encoded, Encoder


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens, int32 [n, length] inside. Those without a token whose loss counts, such as
    the middle of a long question, are left out.

    Args:
        documents: joined in this order. Tokens at the end that do not fill a block are left out.
        length: tokens in a block.
        short: make one shorter block if there are too few tokens for a whole one.
    """

    def __init__(self, documents: Sequence[Encoded], length: int, *, short: bool = False) -> None:
        self.available = sum(len(ids) for ids, _ in documents)
        if short:
            length = max(1, min(length, self.available))
        whole = self.available // length * length
        self.ids, self.labels = (
            torch.from_numpy(np.concatenate([empty, *parts])[:whole].reshape(-1, length))
            for empty in [np.empty(0, np.int32)]
            for parts in (zip(*documents, strict=True) if documents else ((), ()))
        )
        counts = (self.labels[:, 1:] != IGNORED).any(1)
        if not counts.all():
            self.ids, self.labels = self.ids[counts], self.labels[counts]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index].long(), "labels": self.labels[index].long()}

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    @property
    def counted(self) -> int:
        """Tokens whose loss counts. The first one of a block is not predicted."""
        return int((self.labels[:, 1:] != IGNORED).sum())


@dataclass(frozen=True)
class Data:
    """The blocks of a run."""

    train: Blocks
    held_out: Blocks

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens and labels."""
        found = hashlib.sha256()
        for blocks in (self.train, self.held_out):
            for tensor in (blocks.ids, blocks.labels):
                found.update(str(list(tensor.shape)).encode() + tensor.numpy().tobytes())
        return found.hexdigest()


def make_data(
    encoder: Encoder,
    train: Sequence[str],
    held_out: Sequence[str],
    fraction: float,
    length: int,
) -> Data:
    """Reads, encodes and cuts the data.

    Args:
        train, held_out: paths of files.
        fraction: the part at the end of each file of ``train`` that is held out where ``held_out``
            is empty: whole documents, unless the file is a single one.
        length: tokens in a block.

    Raises:
        OSError, ValueError: as `read_documents` and `Encoder.encode`; too few tokens.
    """
    training: list[Encoded] = []
    kept: list[Encoded] = []
    for path in train:
        encoded = [encoder.encode(document) for document in read_documents(path)]
        if held_out:
            training += encoded
            continue
        first, last = split(encoded, fraction)
        training += first
        kept += last
    for path in held_out:
        kept += [encoder.encode(document) for document in read_documents(path)]
    result = Data(Blocks(training, length), Blocks(kept, length, short=True))
    if result.train.available < length:
        raise ValueError(
            f"{', '.join(train)}: {result.train.available} tokens to train on, fewer than a block; "
            f"use a smaller [data] sequence_length, or more text"
        )
    if not result.train.counted:
        raise ValueError(f"{', '.join(train)}: no token's loss counts; nothing can be learned")
    if not result.held_out.counted:
        raise ValueError(
            f"{', '.join(held_out or train)}: the held-out part has {result.held_out.available} "
            "tokens, and no loss to measure; hold out more ([data] held_out, held_out_fraction)"
        )
    return result


def split(documents: list[Encoded], fraction: float) -> tuple[list[Encoded], list[Encoded]]:
    """Training and held-out part of a file's documents: whole ones, at least one each. A single
    document is cut."""
    if len(documents) == 1:
        ids, labels = documents[0]
        cut = len(ids) - round(len(ids) * fraction)
        return [(ids[:cut], labels[:cut])], [(ids[cut:], labels[cut:])]
    cut = len(documents) - 1
    kept, target = len(documents[cut][0]), fraction * sum(len(ids) for ids, _ in documents)
    while cut > 1 and kept + len(documents[cut - 1][0]) / 2 <= target:
        cut -= 1
        kept += len(documents[cut][0])
    return documents[:cut], documents[cut:]
