"""Recognises the format of a layer's experts from names, dtypes and shapes in the headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..weights.expert_tensors import matrix_shapes
from ..weights.methods import METHODS, MIXED
from .header import TensorInfo
from .quantization import Quantization
from .reader import infer_sizes, open_matrices
from .safetensors.bf16 import DTYPES, Dense
from .safetensors.formats import FORMATS, is_dense
from .safetensors.layout import Layout, StackedExperts, has_blocks
from .safetensors.mx import MxFp4
from .safetensors.stacks import single_experts


@dataclass(frozen=True)
class Stored:
    """A format in which experts are stored.

    Attributes:
        title: for messages.
        method: the method that keeps the weights unchanged.
        convertible: whether quantising methods read it, too.
        dense: whether all weights have 16 or 32 bits.
        methods: the methods that keep the single matrices; none: `method` keeps all of them.
        ordered: whether columns may be in the order of their activations (act-order).
    """

    title: str
    method: str
    convertible: bool = False
    dense: bool = False
    methods: tuple[str, ...] = ()
    ordered: bool = False

    @property
    def each(self) -> tuple[str, ...]:
        """The methods that keep the single matrices."""
        return self.methods or (self.method,)


def dense_weights(method: str = Dense.method) -> Stored:
    """16- or 32-bit weights."""
    return Stored(Dense.title, method, convertible=True, dense=True)


def common_method(methods: Iterable[str]) -> str:
    """The method that keeps all weights, if these methods keep single matrices. `Dense.method`
    stands for dense weights, which a method that keeps quantised weights keeps beside them."""
    found = set(methods)
    if len(found) == 1:
        return found.pop()
    kept = found - {Dense.method}
    if len(kept) == 1:
        (name,) = kept
        return name if METHODS[name].quantised else MIXED
    return MIXED


def stored_in(layout: Layout, quantization: Quantization) -> Stored:
    """The format of a layer's experts in safetensors files.

    Looks at the first expert only. A layer whose experts differ is refused when it is read.

    Raises:
        ValueError: names file and tensor, what was found, and what is accepted.
    """
    if isinstance(layout, StackedExperts):
        if has_blocks(layout):
            return Stored(MxFp4.title, MxFp4.method, convertible=True)
        if not layout.scales:
            return _dense(next(iter(layout.tensors.values())))
        layout = single_experts(layout)
    first = layout.experts[0]
    for parts in first.values():
        if is_dense(parts):
            _dense(parts["weight"])
    if all(map(is_dense, first.values())):
        return dense_weights()
    _, hidden, inter = infer_sizes(layout)
    opened = open_matrices(first, matrix_shapes(hidden, inter), quantization)
    methods = tuple(sorted({kind.method for kind in opened.values()}))
    titles: dict[str, list[str]] = {}
    for matrix, kind in opened.items():
        titles.setdefault(kind.described, []).append(matrix)
    title = next(iter(titles))
    if len(titles) > 1:
        title = ", ".join(f"{' and '.join(which)} {title}" for title, which in titles.items())
    ordered = any(kind.ordered for kind in opened.values())
    return Stored(title, common_method(methods), True, methods=methods, ordered=ordered)


def _dense(info: TensorInfo) -> Stored:
    if info.dtype not in DTYPES:
        methods = ", ".join(dict.fromkeys(kind.method for kind in FORMATS))
        raise ValueError(
            f"{info} has dtype {info.dtype} and no scales; accepted: "
            f"{', '.join(DTYPES)} and the quantised formats of {methods}"
        )
    return dense_weights()
