"""Reads one layer, dense or quantised, after checking it against sizes and method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..weights.dequantise import dequantise
from ..weights.expert_tensors import BIASES, MATRICES, ExpertTensors, Matrix, matrix_shapes
from ..weights.formats import BF16, FP8_BLOCK, MXFP4, LayerForm, WeightForm
from ..weights.methods import MIXED, Method
from ..weights.quantised import QuantisedMatrix
from .header import TensorInfo
from .quantization import Quantization
from .safetensors import bf16, gpt_oss
from .safetensors.arrangement import infer_arrangement
from .safetensors.formats import identify, is_dense
from .safetensors.gptq import Gptq
from .safetensors.layout import Layout, Parts, PerExpert, StackedExperts, has_blocks
from .safetensors.matrix import MatrixFormat
from .safetensors.mx import MxFp4
from .safetensors.parts import FLOATS, Read, check_tensor
from .safetensors.stacks import part_reader, single_experts


@dataclass(frozen=True)
class LayerReader:
    """Reads the experts of one layer.

    fields: the fields of ExpertTensors that the layer has. form: the form of the weights, or None
    if all are dense and the method quantises them; dense weights are BF16 together with quantised
    ones, and for methods that keep weights. read: returns the fields of one expert.
    """

    fields: tuple[str, ...]
    form: LayerForm | None
    read: Callable[[int], dict[str, Matrix]]

    def read_all(self, num_experts: int, wanted: Sequence[int]) -> ExpertTensors:
        parts = {e: self.read(e) for e in wanted}
        lists: dict[str, list[Any]] = {
            field: [parts[e][field] if e in parts else None for e in range(num_experts)]
            for field in self.fields
        }
        lists.setdefault("gate", [None] * num_experts)
        return ExpertTensors(**lists)


def infer_sizes(layout: Layout) -> tuple[int, int, int]:
    """(num_experts, hidden_size, moe_intermediate_size) according to the shapes."""
    if isinstance(layout, StackedExperts):
        if has_blocks(layout):
            return gpt_oss.size_of_blocks(layout)
        return infer_arrangement(layout)[1]
    first, no_settings = layout.experts[0], Quantization()
    # The number of rows does not depend on the bits of a code.
    inter = identify(first["up"], no_settings).rows(first["up"])
    hidden = identify(first["down"], no_settings).rows(first["down"])
    return len(layout.experts), hidden, inter


def open_matrices(
    first: dict[str, Parts], shapes: dict[str, tuple[int, int]], quantization: Quantization
) -> dict[str, MatrixFormat]:
    """The formats of the matrices of a layer whose first expert is `first`.

    Raises ValueError naming file and tensor for an unknown format, or if config.json contradicts
    the tensors.
    """
    return {
        matrix: _open(first[matrix], shape, quantization)
        for matrix, shape in shapes.items()
        if matrix in first
    }


def _open(parts: Parts, shape: tuple[int, int], quantization: Quantization) -> MatrixFormat:
    return identify(parts, quantization, shape[1]).open(parts, *shape, quantization)


@dataclass(frozen=True)
class Wanted:
    """What the reader is to return.

    method: None for the weights as they are stored. beside: whether other layers of the checkpoint
    have weights that the method keeps. Then the method keeps dense weights, too, as BF16.
    """

    method: Method | None = None
    beside: Callable[[], bool] = lambda: False

    @property
    def keeps(self) -> bool:
        """Whether the method keeps weights as they are stored."""
        return self.method is not None and self.method.quantised

    def check(self, opened: dict[str, MatrixFormat], some: dict[str, TensorInfo]) -> None:
        """Raises ValueError if a method that keeps weights does not keep those of a matrix. some: a
        tensor of each matrix."""
        if self.method is None or not self.keeps or self.method.name == MIXED:
            return
        for matrix, kind in opened.items():
            if not kind.dense and kind.method != self.method.name:
                raise ValueError(
                    f"{some[matrix]}: the experts are {kind.described}, which method"
                    f" {kind.method} reads; method {self.method.name} was requested"
                )

    def check_dense(self, info: TensorInfo) -> None:
        """Raises ValueError if the method does not take a layer of dense weights."""
        method = self.method
        if method is None or not self.keeps or method.name == MIXED or self.beside():
            return
        raise ValueError(
            f"{info}: the experts are not quantised ({info.dtype}), but method {method.name} needs"
            " quantised weights; use a checkpoint in that format, or a method that quantises while"
            " loading, such as AMXINT8 or INT4_G32"
        )

    def converts(self, form: WeightForm) -> bool:
        """Whether quantised weights of that form are returned as float32, because the method
        quantises them anew."""
        method = self.method
        if method is None or method.quantised:
            return False
        return not (method.takes_quantised and form.format in method.formats)


def open_layer(
    layout: Layout,
    sizes: tuple[int, int, int],
    read: Read,
    quantization: Quantization,
    wanted: Wanted,
) -> LayerReader:
    """Checks all of `layout` against sizes and method; reads nothing.

    sizes: num_experts, hidden_size, moe_intermediate_size.

    Raises ValueError naming file and tensor for a wrong number of experts, a wrong shape or dtype,
    a method that does not accept the weights, or a config.json that contradicts them.
    """
    try:
        if isinstance(layout, StackedExperts) and has_blocks(layout):
            return _open_blocks(layout, sizes, read, wanted)
        if isinstance(layout, StackedExperts) and layout.scales:
            single = single_experts(layout, sizes)
            return _open_quantised(single, sizes, part_reader(read), quantization, wanted)
        if isinstance(layout, StackedExperts) or all(map(is_dense, layout.experts[0].values())):
            fields, read_dense = bf16.open_dense(layout, *sizes, read)
            wanted.check_dense(_some(layout))
            kept = LayerForm.same(WeightForm(BF16)) if wanted.keeps else None
            return LayerReader(fields, kept, read_dense)
        return _open_quantised(layout, sizes, read, quantization, wanted)
    except ValueError as error:
        other = other_model(lambda: infer_sizes(layout), sizes)
        raise ValueError(f"{error}{other}") from None


def _some(layout: Layout) -> TensorInfo:
    """A tensor with weights."""
    if isinstance(layout, PerExpert):
        return layout.experts[0]["up"]["weight"]
    return next(iter(layout.tensors.values()))


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
    wanted: Wanted,
) -> LayerReader:
    num_experts, hidden, inter = sizes
    shapes = matrix_shapes(hidden, inter)
    bf16.check_count(layout, num_experts)
    if any(identify(parts, quantization) is Gptq for parts in layout.experts[0].values()):
        layout = _without_zero_biases(layout, read)
    first = layout.experts[0]
    opened = open_matrices(first, shapes, quantization)
    wanted.check(opened, {matrix: next(iter(parts.values())) for matrix, parts in first.items()})
    convert = {matrix: wanted.converts(kind.form) for matrix, kind in opened.items()}
    _check_order(first, opened, convert)
    for expert in layout.experts:
        for matrix, parts in expert.items():
            if quantization.by_module:
                _check_same(opened[matrix], parts, shapes[matrix], quantization)
            opened[matrix].check(parts, *shapes[matrix])
            if "bias" in parts:
                check_tensor(parts["bias"], FLOATS, shapes[matrix][:1])

    def read_expert(number: int) -> dict[str, Matrix]:
        expert = layout.experts[number]
        result: dict[str, Matrix] = {}
        for matrix, kind in opened.items():
            found = kind.read(expert[matrix], *shapes[matrix], read)
            if convert[matrix] and isinstance(found, QuantisedMatrix):
                found = dequantise(found)
            result[matrix] = found
        return result | bf16.read_biases(expert, read)

    fields = bf16.fields_of(layout)
    forms = {matrix: kind.form for matrix, kind in opened.items()}
    forms.setdefault("gate", forms["up"])  # stands for a gate that the experts do not have
    form: LayerForm | None = LayerForm(**forms)
    if wanted.method is not None and not wanted.keeps:  # it has one form, kept or made from dense
        dense = all(convert[matrix] or kind.dense for matrix, kind in opened.items())
        form = None if dense else wanted.method.layer_form
    return LayerReader(fields, form, read_expert)


def _without_zero_biases(layout: PerExpert, read: Read) -> PerExpert:
    """The layout without its biases if all of them are zeros: AutoGPTQ used to add such biases to
    every matrix, and engines skip them."""
    for expert in layout.experts:
        for parts in expert.values():
            if "bias" in parts and bool(read(parts["bias"], None).any()):
                return layout
    experts = [
        {matrix: {n: i for n, i in parts.items() if n != "bias"} for matrix, parts in e.items()}
        for e in layout.experts
    ]
    return PerExpert(layout.where, experts)


def _check_same(
    opened: MatrixFormat, parts: Parts, shape: tuple[int, int], quantization: Quantization
) -> None:
    """Raises ValueError if an expert's matrix is stored in another way than the first expert's, by
    settings of its own module."""
    other = _open(parts, shape, quantization)
    if type(other) is not type(opened) or vars(other) != vars(opened):
        raise ValueError(
            f"{next(iter(parts.values()))}: by its module's settings in {quantization.file}, it"
            f" is stored in another way than the first expert's ({other.form}, {opened.form});"
            " accepted: the same for all experts of a layer"
        )


def _check_order(
    first: dict[str, Parts], opened: dict[str, MatrixFormat], convert: dict[str, bool]
) -> None:
    """Raises ValueError if the rows of scales per block would have to be reordered: those of gate
    and up follow the order of down's columns."""
    for name in ("g_idx", "weight_g_idx"):
        if name not in first["down"]:
            continue
        for matrix in opened.keys() - {"down"}:
            if opened[matrix].form.format == FP8_BLOCK and not convert[matrix]:
                raise ValueError(
                    f"{first['down'][name]}: an order of columns of down is not supported where"
                    f" {matrix} is {opened[matrix].title}"
                )


def _open_blocks(
    layout: StackedExperts, sizes: tuple[int, int, int], read: Read, wanted: Wanted
) -> LayerReader:
    form = WeightForm(MXFP4)
    gpt_oss.check_blocks(layout, *sizes)
    wanted.check({"gate": MxFp4(form)}, {"gate": layout.tensors["gate_up"]})
    arrangement, convert = layout.candidates[0], wanted.converts(form)

    def read_expert(expert: int) -> dict[str, Matrix]:
        fields = gpt_oss.read_blocks(layout, arrangement, expert, read)
        if not convert:
            return fields
        return {
            name: dequantise(part) if isinstance(part, QuantisedMatrix) else part
            for name, part in fields.items()
        }

    kept = None if convert else LayerForm.same(form)
    return LayerReader(MATRICES + BIASES, kept, read_expert)
