"""The weight methods by name: what each stores, and which of them run today."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# Weight formats and activation formats, numbered as the compiled core numbers them.
BF16_WEIGHTS, INT8_ROW, INT4_ROW, INT4_GROUP, INT4_ZERO, FP8_BLOCK, FP8_ROW, MXFP8, MXFP4, NVFP4 = (
    range(10)
)
# Formats that keep ggml's quantisation, under its names.
Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = range(10, 21)
BF16_ACTIVATIONS, INT8_ROW_ACTIVATIONS = range(2)


FORMAT_NAMES = (
    "BF16", "int8 with row scales", "int4 with row scales", "int4 with group scales",
    "int4 with group scales and zero points", "FP8 with scales per 128x128 block",
    "FP8 with row scales", "MXFP8", "MXFP4", "NVFP4", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K",
    "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
GROUPED = (INT4_GROUP, INT4_ZERO)  # a scale per group; the group size is the layer's
BYTE_CODES = (FP8_BLOCK, FP8_ROW, MXFP8)  # a code is a byte; of other quantised formats half of one
#: Columns of a block, and its bytes in a file, of ggml's formats.
GGML_BLOCKS = {
    Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q8_0: (32, 34), Q2_K: (256, 84),
    Q3_K: (256, 110), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210), IQ4_NL: (32, 18),
    IQ4_XS: (256, 136),
}  # fmt: skip
# What H and I must be multiples of, where a format says so.
_COLUMN_UNITS = {INT4_GROUP: 32, INT4_ZERO: 32, MXFP8: 32, MXFP4: 32, NVFP4: 16} | {
    format: columns for format, (columns, _) in GGML_BLOCKS.items()
}


@dataclass(frozen=True)
class WeightForm:
    """What the compiled core has to know of a matrix.

    Attributes:
        format: weight format.
        group_size: columns per scale of INT4_GROUP and INT4_ZERO, else 0.
        scale_type: of the same two, 0 float16, 1 bfloat16, 2 float32; else 0.
    """

    format: int
    group_size: int = 0
    scale_type: int = 0

    @property
    def core(self) -> tuple[int, int, int]:
        """As the compiled core takes it."""
        return self.format, self.group_size, self.scale_type

    @property
    def column_unit(self) -> int:
        """What K must be a multiple of."""
        return self.group_size or _COLUMN_UNITS.get(self.format, 1)

    def __str__(self) -> str:
        if self.format not in GROUPED:
            return FORMAT_NAMES[self.format]
        scales = ("float16", "bfloat16", "float32")[self.scale_type]
        return f"{FORMAT_NAMES[self.format]} ({scales}, group size {self.group_size})"


@dataclass(frozen=True)
class LayerForm:
    """The forms of a layer's matrices: each is that of all its experts."""

    gate: WeightForm
    up: WeightForm
    down: WeightForm

    @classmethod
    def same(cls, form: WeightForm) -> LayerForm:
        """All three alike."""
        return cls(form, form, form)

    def __iter__(self) -> Iterator[WeightForm]:
        """Those of gate, up and down."""
        return iter((self.gate, self.up, self.down))

    @property
    def units(self) -> tuple[int, int]:
        """What H and I must be multiples of."""
        return math.lcm(self.gate.column_unit, self.up.column_unit), self.down.column_unit

    def __str__(self) -> str:
        if self.gate == self.up == self.down:
            return str(self.gate)
        return f"gate {self.gate}, up {self.up}, down {self.down}"


@dataclass(frozen=True)
class Method:
    """One way of storing expert weights.

    Attributes:
        name: what users pass as ``method=`` or ``--kt-method``.
        formats: weight formats of the compiled core; more than one where the source tells which.
        activations: what x and h are rounded to before a product.
        group_size: columns per scale where the method's name says it, else 0.
        quantised: whether weights come quantised and are taken over bit for bit; otherwise they
            come as BF16, FP16 or FP32 and are quantised while loading (see ``takes_quantised``).
        mixed: whether gate, up and down may differ in form, and any of them be dense.
    """

    name: str
    formats: tuple[int, ...]
    activations: int = BF16_ACTIVATIONS
    group_size: int = 0
    quantised: bool = False
    mixed: bool = False

    @property
    def format(self) -> int:
        """The weight format, the first one where the source tells."""
        return self.formats[0]

    @property
    def form(self) -> WeightForm | None:
        """Form of all matrices; None where the source tells it."""
        if self.mixed or self.groups_of_source:
            return None
        return WeightForm(self.format, self.group_size)

    @property
    def layer_form(self) -> LayerForm | None:
        """The same of a layer."""
        return None if self.form is None else LayerForm.same(self.form)

    @property
    def groups_of_source(self) -> bool:
        """Whether the weights have groups whose size and type of scales are the source's."""
        return self.quantised and not self.mixed and self.format in GROUPED

    @property
    def takes_dense(self) -> bool:
        """Whether weights may come as tensors."""
        return self.mixed or not self.quantised

    @property
    def takes_quantised(self) -> bool:
        """Whether weights may come as QuantisedMatrix, in one of ``formats``: always where they
        must, and with row scales also beside dense ones, for other tools' converted weights."""
        return self.mixed or self.quantised or self.format in (INT8_ROW, INT4_ROW)

    @property
    def column_unit(self) -> int:
        """What H and I must be multiples of, as far as it is known without the weights."""
        if self.mixed:
            return 1
        return self.group_size or _COLUMN_UNITS.get(self.format, 1)

    @property
    def units(self) -> tuple[int, int]:
        """The same, of H and of I."""
        return self.column_unit, self.column_unit


#: The inference methods by name, in the order in which messages list them.
METHODS = {
    method.name: method
    for method in (
        Method("BF16", (BF16_WEIGHTS,)),
        Method("AMXINT8", (INT8_ROW,), INT8_ROW_ACTIVATIONS),
        Method("AMXINT4", (INT4_ROW,), INT8_ROW_ACTIVATIONS),
        Method("MOE_INT8", (INT8_ROW,), INT8_ROW_ACTIVATIONS),
        Method("MOE_INT4", (INT4_ROW,), INT8_ROW_ACTIVATIONS),
        Method("INT4_G32", (INT4_GROUP,), group_size=32),
        Method("INT4_G128", (INT4_GROUP,), group_size=128),
        Method("FP8", (FP8_BLOCK,), quantised=True),
        Method("FP8_PERCHANNEL", (FP8_ROW,), quantised=True),
        Method("RAWINT4", (INT4_GROUP, INT4_ZERO), quantised=True),
        Method("GPTQ_INT4", (INT4_GROUP, INT4_ZERO), quantised=True),
        Method("AWQ_INT4", (INT4_ZERO,), quantised=True),
        Method("MXFP4", (MXFP4,), quantised=True),
        Method("NVFP4", (NVFP4,), quantised=True),
        Method("MXFP8", (MXFP8,), quantised=True),
        Method("LLAMAFILE", (INT4_GROUP, MXFP4, *GGML_BLOCKS), quantised=True, mixed=True),
    )
}

#: What 16- and 32-bit weights are quantised to where the choice is left to us.
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
    """Raises what `get_method` raises for anything but a fine-tuning method."""
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
