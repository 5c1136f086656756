"""Recognises the format of a layer's experts from names, dtypes and shapes in the headers."""

from __future__ import annotations

from dataclasses import dataclass

from ..weights.methods import Method, get_method
from .header import TensorInfo
from .quantization import Quantization
from .safetensors.bf16 import DTYPES
from .safetensors.formats import FORMATS, identify, is_dense
from .safetensors.fp8 import CONVERTED
from .safetensors.layout import Layout, Parts, StackedExperts, has_blocks
from .safetensors.mx import MxFp4
from .safetensors.stacks import single_experts


@dataclass(frozen=True)
class Stored:
    """A format in which experts are stored.

    Attributes:
        title: for messages.
        method: the method that keeps the weights unchanged.
        convertible: whether quantising methods read it, too.
        dense: whether the weights have 16 or 32 bits.
    """

    title: str
    method: str
    convertible: bool = False
    dense: bool = False

    def taken_by(self, method: Method) -> bool:
        """Whether a method reads this format."""
        return method.name == self.method or (self.convertible and not method.quantised)


def dense_weights(method: str = "BF16") -> Stored:
    """16- or 32-bit weights."""
    return Stored("16- or 32-bit weights", method, convertible=True, dense=True)


def stored_in(layout: Layout, quantization: Quantization) -> Stored:
    """The format of a layer's experts in safetensors files.

    Looks at the gate of the first expert only. A layer whose experts differ is refused when it is
    read.

    Raises:
        ValueError: names file and tensor, what was found, and what is accepted.
    """
    if isinstance(layout, StackedExperts):
        if has_blocks(layout):
            return _as_kept(MxFp4.title, MxFp4.method)
        if not layout.scales:
            return _dense(next(iter(layout.tensors.values())))
        gate = single_experts(layout).experts[0]["gate"]
    else:
        gate = layout.experts[0]["gate"]
    return _of_matrix(gate, quantization)


def _of_matrix(parts: Parts, quantization: Quantization) -> Stored:
    if is_dense(parts):
        return _dense(parts["weight"])
    kind = identify(parts, quantization)
    return _as_kept(kind.title, kind.method)


def _dense(info: TensorInfo) -> Stored:
    if info.dtype not in DTYPES:
        methods = ", ".join(dict.fromkeys(kind.method for kind in FORMATS))
        raise ValueError(
            f"{info} has dtype {info.dtype} and no scales; accepted: "
            f"{', '.join(DTYPES)} and the quantised formats of {methods}"
        )
    return dense_weights()


def _as_kept(title: str, method: str) -> Stored:
    convertible = set(get_method(method).formats) <= set(CONVERTED)
    return Stored(title, method, convertible)
