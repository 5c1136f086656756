"""The interface of readers of single matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch

from ...weights.expert_tensors import Matrix
from ...weights.formats import WeightForm, WeightFormat
from ..header import TensorInfo
from ..quantization import Quantization
from .layout import Parts
from .parts import Read


class MatrixFormat(ABC):
    """A format of single matrices in checkpoints, opened for one matrix of all experts of a layer.

    title: for messages. tensors: their names, dtypes and shapes, for the table of formats. method:
    the method that keeps these weights; an opened format may have another. formats: the weight
    formats in which they are kept. stacked: whether stacks are read, too (stacks.py). dense:
    whether the weights have 16 or 32 bits. ordered: whether columns may be in the order of their
    activations (act-order), as far as config.json and the headers tell.
    """

    title: ClassVar[str]
    tensors: ClassVar[str]
    method: str
    formats: ClassVar[tuple[WeightFormat, ...]]
    stacked: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    ordered: bool = False

    def __init__(self, form: WeightForm) -> None:
        self.form = form

    @property
    def described(self) -> str:
        """The title; with the form if another method than the format's usual one keeps it."""
        usual = self.method == type(self).method
        return self.title if usual else f"{self.title} ({self.form})"

    @classmethod
    def rows(cls, parts: Parts) -> int:
        """The number of rows according to the shapes. Raises ValueError for invalid shapes."""
        return two_dimensions(parts["weight"])[0]

    @classmethod
    @abstractmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Self:
        """Opens the format for the matrices [rows, columns] of a layer of which the first one has
        these parts. Raises ValueError if the shapes contradict the size, or config.json the
        tensors."""

    @abstractmethod
    def check(self, parts: Parts, rows: int, columns: int) -> None:
        """Checks dtypes and shapes. Raises ValueError naming file and tensor."""

    @abstractmethod
    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> Matrix:
        """Reads a checked matrix. Raises ValueError naming file and tensor for an invalid value."""


def two_dimensions(info: TensorInfo) -> tuple[int, int]:
    """The shape of a matrix. Raises ValueError for another number of dimensions."""
    if len(info.shape) != 2:
        raise ValueError(f"{info} has shape {list(info.shape)}, expected 2 dimensions")
    return info.shape[0], info.shape[1]


def bits_of(info: TensorInfo, words: int, columns: int, accepted: tuple[int, ...]) -> int:
    """Bits of a code, if `words` elements of an integer tensor hold `columns` codes. Raises
    ValueError naming file and tensor for other numbers of bits."""
    size = 8 if info.dtype in ("U8", "I8") else 32
    for bits in accepted:
        if words * size == columns * bits:
            return bits
    expected = " or ".join(f"{columns * bits // size} ({bits} bits)" for bits in accepted)
    raise ValueError(
        f"{info} has shape {list(info.shape)}: {words} elements for {columns} codes; expected"
        f" {expected}"
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a matrix as uint8, row by row."""
    return tensor.contiguous().view(torch.uint8)
