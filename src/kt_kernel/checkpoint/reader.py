"""Reads one layer, dense or quantised, after checking it against sizes and method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..weights.expert_tensors import BIASES, MATRICES, ExpertTensors, Matrix, matrix_shapes
from ..weights.formats import MXFP4, LayerForm, WeightForm
from ..weights.methods import Method, get_method
from .header import TensorInfo
from .quantization import Quantization
from .safetensors import bf16, gpt_oss
from .safetensors.arrangement import infer_arrangement
from .safetensors.formats import identify, is_dense
from .safetensors.fp8 import CONVERTED, dequantise
from .safetensors.layout import Layout, PerExpert, StackedExperts, has_blocks
from .safetensors.matrix import MatrixFormat
from .safetensors.mx import MxFp4
from .safetensors.parts import FLOATS, Read, check_tensor
from .safetensors.stacks import part_reader, single_experts


@dataclass(frozen=True)
class LayerReader:
    """Reads the experts of one layer.

    fields: the fields of ExpertTensors that the layer has. form: the form of the weights, or None
    if all are dense; a dense matrix together with quantised ones counts as BF16. read: returns the
    fields of one expert. size: returns the bytes of one expert in the files; None if they are as
    many as in memory.
    """

    fields: tuple[str, ...]
    form: LayerForm | None
    read: Callable[[int], dict[str, Matrix]]
    size: Callable[[int], int] | None = None

    def read_all(self, num_experts: int, wanted: Sequence[int]) -> ExpertTensors:
        parts = {e: self.read(e) for e in wanted}
        lists: dict[str, list[Any]] = {
            field: [parts[e][field] if e in parts else None for e in range(num_experts)]
            for field in self.fields
        }
        return ExpertTensors(**lists)


def infer_sizes(layout: Layout, quantization: Quantization) -> tuple[int, int, int]:
    """(num_experts, hidden_size, moe_intermediate_size) according to the shapes."""
    if isinstance(layout, StackedExperts):
        if has_blocks(layout):
            return gpt_oss.size_of_blocks(layout)
        return infer_arrangement(layout)[1]
    parts = layout.experts[0]["down"]
    if is_dense(parts):
        return bf16.infer_sizes(layout)
    return len(layout.experts), *identify(parts, quantization).size(parts)


def open_layer(
    layout: Layout,
    sizes: tuple[int, int, int],
    read: Read,
    quantization: Quantization,
    method: str | None = None,
) -> LayerReader:
    """Checks all of `layout` against sizes and method; reads nothing.

    sizes: num_experts, hidden_size, moe_intermediate_size. method: the reader returns the weights
    in the form that this method accepts. None: as they are stored.

    Raises ValueError naming file and tensor for a wrong number of experts, a wrong shape or dtype,
    a method that does not accept the weights, or a config.json that contradicts them.
    """
    chosen = None if method is None else get_method(method)
    try:
        if isinstance(layout, StackedExperts) and has_blocks(layout):
            return _open_blocks(layout, sizes, read, quantization, chosen)
        if isinstance(layout, StackedExperts) and layout.scales:
            single = single_experts(layout, sizes)
            return _open_quantised(single, sizes, part_reader(read), quantization, chosen)
        if isinstance(layout, StackedExperts) or is_dense(layout.experts[0]["gate"]):
            fields, read_dense = bf16.open_dense(layout, *sizes, read)
            _check_dense(layout, chosen)
            return LayerReader(fields, None, read_dense)
        return _open_quantised(layout, sizes, read, quantization, chosen)
    except ValueError as error:
        other = other_model(lambda: infer_sizes(layout, quantization), sizes)
        raise ValueError(f"{error}{other}") from None


def other_model(infer: Callable[[], tuple[int, int, int]], expected: tuple[int, int, int]) -> str:
    """The end of a message: all sizes found and expected, if the layer as a whole differs."""
    try:
        found = infer()
    except ValueError:
        return ""
    if found == expected:
        return ""
    return f"; the checkpoint has {in_words(found)}; expected {in_words(expected)}"


def in_words(sizes: tuple[int, int, int]) -> str:
    """Describes num_experts, hidden_size and moe_intermediate_size."""
    return "{} experts of hidden size {} and intermediate size {}".format(*sizes)


def _open_quantised(
    layout: PerExpert,
    sizes: tuple[int, int, int],
    read: Read,
    quantization: Quantization,
    method: Method | None,
) -> LayerReader:
    num_experts, hidden, inter = sizes
    shapes = matrix_shapes(hidden, inter)
    first = layout.experts[0]
    kind = identify(first["gate"], quantization)
    some = next(iter(first["gate"].values()))
    bf16.check_count(layout, num_experts)
    opened = kind.open(first, shapes, quantization)
    _check_method(some, kind, opened.form, method)
    unit = opened.form.column_unit
    for matrix, (_, columns) in shapes.items():
        if columns % unit:
            raise ValueError(
                f"{next(iter(first[matrix].values()))}: {columns} columns; {kind.title} needs"
                f" multiples of {unit}"
            )
    for expert in layout.experts:
        for matrix, parts in expert.items():
            opened.check(parts, *shapes[matrix])
            if "bias" in parts:
                check_tensor(parts["bias"], FLOATS, shapes[matrix][:1])
    convert = method is not None and not method.quantised

    def read_expert(number: int) -> dict[str, Matrix]:
        expert = layout.experts[number]
        result: dict[str, Matrix] = {}
        for matrix, parts in expert.items():
            quantised = opened.read(parts, *shapes[matrix], read)
            result[matrix] = dequantise(quantised) if convert else quantised
        return result | bf16.read_biases(expert, read)

    fields = MATRICES + BIASES if "bias" in first["gate"] else MATRICES
    return LayerReader(fields, None if convert else LayerForm.same(opened.form), read_expert)


def _open_blocks(
    layout: StackedExperts,
    sizes: tuple[int, int, int],
    read: Read,
    quantization: Quantization,
    method: Method | None,
) -> LayerReader:
    form = WeightForm(MXFP4)
    gpt_oss.check_blocks(layout, *sizes, quantization)
    _check_method(layout.tensors["gate_up"], MxFp4, form, method)
    arrangement = layout.candidates[0]
    return LayerReader(
        MATRICES + BIASES,
        LayerForm.same(form),
        lambda expert: gpt_oss.read_blocks(layout, arrangement, expert, read),
    )


def _check_dense(layout: Layout, method: Method | None) -> None:
    if method is None or not method.quantised:
        return
    if isinstance(layout, PerExpert):
        info = layout.experts[0]["gate"]["weight"]
    else:
        info = next(iter(layout.tensors.values()))
    raise ValueError(
        f"{info}: the experts are not quantised ({info.dtype}), but method {method.name} needs"
        " quantised weights; use a checkpoint in that format, or a method that quantises while"
        " loading, such as AMXINT8 or INT4_G32"
    )


def _check_method(
    info: TensorInfo, kind: type[MatrixFormat], form: WeightForm, method: Method | None
) -> None:
    if method is None or method.name == kind.method:
        return
    if not method.quantised and form.format in CONVERTED:
        return
    raise ValueError(
        f"{info}: the experts are {kind.title}, which method {kind.method} reads;"
        f" method {method.name} was requested"
    )
