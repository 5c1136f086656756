"""The interface of readers of quantised formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch

from ...weights.formats import WeightForm
from ...weights.quantised import QuantisedMatrix
from ..header import TensorInfo
from ..quantization import Quantization
from .layout import Parts
from .parts import Read

# (rows, columns) of gate, up and down.
Shapes = dict[str, tuple[int, int]]


class MatrixFormat(ABC):
    """A quantised format of single matrices in checkpoints, opened for one layer.

    title: for messages. tensors: their names, dtypes and shapes, for the table of formats. method:
    the method that keeps these weights. quant_methods: the format's names in quantization_config.
    stacked: whether stacks of it are read, too (stacks.py).
    """

    title: ClassVar[str]
    tensors: ClassVar[str]
    method: ClassVar[str]
    quant_methods: ClassVar[tuple[str, ...]]
    stacked: ClassVar[bool] = False

    def __init__(self, form: WeightForm) -> None:
        self.form = form

    @classmethod
    @abstractmethod
    def size(cls, parts: Parts) -> tuple[int, int]:
        """(rows, columns) according to the shapes. Raises ValueError for invalid shapes."""

    @classmethod
    def open(cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization) -> Self:
        """Opens the format for a layer whose first expert has these parts. Raises ValueError if
        config.json contradicts it."""
        some = next(iter(first["gate"].values()))
        quantization.expect(some, cls.title, *cls.quant_methods)
        return cls(cls.layer_form(first, shapes, quantization))

    @classmethod
    @abstractmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        """The form of the layer's weights. Raises ValueError if config.json contradicts it."""

    @abstractmethod
    def check(self, parts: Parts, rows: int, columns: int) -> None:
        """Checks dtypes and shapes. Raises ValueError naming file and tensor."""

    @abstractmethod
    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        """Reads a checked matrix. Raises ValueError naming file and tensor for an invalid value."""


def two_dimensions(info: TensorInfo) -> tuple[int, int]:
    """The shape of a matrix. Raises ValueError for another number of dimensions."""
    if len(info.shape) != 2:
        raise ValueError(f"{info} has shape {list(info.shape)}, expected 2 dimensions")
    return info.shape[0], info.shape[1]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a matrix as uint8, row by row."""
    return tensor.contiguous().view(torch.uint8)
