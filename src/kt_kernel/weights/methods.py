"""The weight methods by name, and the formats that they store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from . import formats
from .formats import LayerForm, WeightForm, WeightFormat

_ROW_INTEGERS = (formats.INT8_ROW, formats.INT4_ROW)  # quantised while loading or beforehand


@dataclass(frozen=True)
class Method:
    """One way to store expert weights.

    Attributes:
        name: the value of ``method=`` or ``--kt-method``.
        own_formats: weight formats; more than one if the source decides. ``formats`` adds ggml's
            formats for mixed methods.
        group_size: columns per scale if the method fixes it, else 0.
        quantised: whether the method reads quantised weights and keeps them unchanged. Otherwise it
            reads BF16, FP16 or FP32 and quantises while loading (see ``takes_quantised``).
        mixed: whether gate, up and down may be of any formats, and may be dense.
    """

    name: str
    own_formats: tuple[WeightFormat, ...]
    group_size: int = 0
    quantised: bool = False
    mixed: bool = False

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """All formats that its weights may have."""
        return (*self.own_formats, *formats.ggml_formats()) if self.mixed else self.own_formats

    @property
    def format(self) -> WeightFormat:
        """The weight format; the first one if the source decides."""
        return self.own_formats[0]

    @property
    def int8_activations(self) -> bool:
        """Whether x and h are rounded to int8 with a scale per token before a product. Otherwise
        they are rounded to bfloat16."""
        return self.format in _ROW_INTEGERS

    @property
    def form(self) -> WeightForm | None:
        """Form of all matrices; None if the source decides."""
        if self.mixed or self.groups_of_source:
            return None
        return WeightForm(self.format, self.group_size)

    @property
    def layer_form(self) -> LayerForm | None:
        """Form of a layer; None if the source decides."""
        return None if self.form is None else LayerForm.same(self.form)

    @property
    def groups_of_source(self) -> bool:
        """Whether the source decides the group size and the type of scales."""
        return self.quantised and not self.mixed and self.format.grouped

    @property
    def takes_dense(self) -> bool:
        """Whether the method accepts tensors."""
        return self.mixed or not self.quantised

    @property
    def takes_quantised(self) -> bool:
        """Whether the method accepts QuantisedMatrix in one of ``formats``. Methods with row scales
        accept both dense and quantised weights, for weights that other tools converted."""
        return self.mixed or self.quantised or self.format in _ROW_INTEGERS

    @property
    def column_unit(self) -> int:
        """H and I must be multiples of this, as far as known without the weights."""
        if self.mixed:
            return 1
        return self.group_size or self.format.column_unit

    @property
    def units(self) -> tuple[int, int]:
        """H must be a multiple of the first number, I of the second."""
        return self.column_unit, self.column_unit


#: The method that keeps each matrix in the format in which a checkpoint stores it.
MIXED = "MIXED"

#: The same for GGUF files only.
GGUF_METHOD = "LLAMAFILE"

# The formats of quantised matrices in safetensors files.
_STORED = (
    formats.INT4_GROUP,
    formats.INT4_ZERO,
    formats.INT8_ROW,
    formats.FP8_BLOCK,
    formats.FP8_ROW,
    formats.MXFP8,
    formats.MXFP4,
    formats.NVFP4,
)

#: The inference methods by name, in the order in which messages list them.
METHODS = {
    method.name: method
    for method in (
        Method("BF16", (formats.BF16,)),
        Method("AMXINT8", (formats.INT8_ROW,)),
        Method("AMXINT4", (formats.INT4_ROW,)),
        Method("MOE_INT8", (formats.INT8_ROW,)),
        Method("MOE_INT4", (formats.INT4_ROW,)),
        Method("INT4_G32", (formats.INT4_GROUP,), group_size=32),
        Method("INT4_G128", (formats.INT4_GROUP,), group_size=128),
        Method("FP8", (formats.FP8_BLOCK,), quantised=True),
        Method("FP8_PERCHANNEL", (formats.FP8_ROW,), quantised=True),
        Method("RAWINT4", (formats.INT4_GROUP, formats.INT4_ZERO), quantised=True),
        Method("GPTQ_INT4", (formats.INT4_GROUP, formats.INT4_ZERO), quantised=True),
        Method("AWQ_INT4", (formats.INT4_ZERO, formats.INT4_GROUP), quantised=True),
        Method("MXFP4", (formats.MXFP4,), quantised=True),
        Method("NVFP4", (formats.NVFP4,), quantised=True),
        Method("MXFP8", (formats.MXFP8,), quantised=True),
        Method(GGUF_METHOD, (formats.INT4_GROUP, formats.MXFP4), quantised=True, mixed=True),
        Method(MIXED, _STORED, quantised=True, mixed=True),
    )
}

#: The method that ``auto`` selects for 16- and 32-bit weights.
QUANTISED_TO = "INT4_G32"

#: Names of the inference methods.
INFERENCE_METHODS = frozenset(METHODS)

_SFT_BASES = (
    "AMXBF16_SFT",
    "AMXINT8_SFT",
    "AMXINT4_SFT",
    "AMXINT4_1_SFT",
    "AMXINT4_KGroup_SFT",
    "AMXINT4_1KGroup_SFT",
)
_SFT_NAMES = (
    *_SFT_BASES,
    *(base + "_SkipLoRA" for base in _SFT_BASES),
    "FP8_SFT",
    "AMXFP8_SFT",
    "INT8_SFT",
    "RAWINT4_SFT",
    "MXFP4_SFT",
    "LLAMAFILE_SFT",
)

#: Names of the fine-tuning methods.
SFT_METHODS = frozenset(_SFT_NAMES)


def get_method(name: str) -> Method:
    """The inference method ``name``.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: no such method, or a fine-tuning method.
    """
    _check_method(name, METHODS, "inference", _SFT_NAMES, "sft")
    return METHODS[name]


def check_sft_method(name: str) -> None:
    """As `get_method`, for fine-tuning methods."""
    _check_method(name, _SFT_NAMES, "sft", METHODS, "inference")


def _check_method(
    name: str, names: Collection[str], mode: str, others: Collection[str], other_mode: str
) -> None:
    if not isinstance(name, str):
        raise TypeError(f"method must be a string, got {type(name).__name__}")
    if name in names:
        return
    supported = ", ".join(names)
    if name in others:
        raise ValueError(
            f"method {name!r} is for mode={other_mode!r}; mode={mode!r} supports: {supported}"
        )
    raise ValueError(f"unknown method {name!r}; supported: {supported}")
