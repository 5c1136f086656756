"""The weight methods by name: what each stores, and which of them run today."""

from __future__ import annotations

from dataclasses import dataclass

# Weight formats and activation formats, numbered as the compiled core numbers them.
BF16_WEIGHTS, INT8_ROW, INT4_ROW, INT4_GROUP, INT4_ZERO, FP8_BLOCK, FP8_ROW, MXFP8, MXFP4, NVFP4 = (
    range(10)
)
BF16_ACTIVATIONS, INT8_ROW_ACTIVATIONS = range(2)


@dataclass(frozen=True)
class Method:
    """One way of storing expert weights.

    Attributes:
        name: what users pass as ``method=`` or ``--kt-method``.
        format: weight format of the compiled core.
        activations: what x and h are rounded to before a product.
        group_size: columns per scale, 0 where there is one scale per row or none.
    """

    name: str
    format: int
    activations: int
    group_size: int = 0


_SUPPORTED = {
    method.name: method
    for method in (
        Method("BF16", BF16_WEIGHTS, BF16_ACTIVATIONS),
        Method("AMXINT8", INT8_ROW, INT8_ROW_ACTIVATIONS),
        Method("AMXINT4", INT4_ROW, INT8_ROW_ACTIVATIONS),
        Method("MOE_INT8", INT8_ROW, INT8_ROW_ACTIVATIONS),
        Method("MOE_INT4", INT4_ROW, INT8_ROW_ACTIVATIONS),
        Method("INT4_G32", INT4_GROUP, BF16_ACTIVATIONS, group_size=32),
        Method("INT4_G128", INT4_GROUP, BF16_ACTIVATIONS, group_size=128),
    )
}

#: Every inference method of the interface, whether it runs today or not.
INFERENCE_METHODS: tuple[str, ...] = (
    "BF16", "AMXINT8", "AMXINT4", "RAWINT4", "FP8", "FP8_PERCHANNEL", "GPTQ_INT4", "AWQ_INT4",
    "MXFP4", "NVFP4", "MXFP8", "LLAMAFILE", "MOE_INT8", "MOE_INT4", "INT4_G32", "INT4_G128",
)  # fmt: skip

_SFT_BASES = (
    "AMXBF16_SFT", "AMXINT8_SFT", "AMXINT4_SFT", "AMXINT4_1_SFT", "AMXINT4_KGroup_SFT",
    "AMXINT4_1KGroup_SFT",
)  # fmt: skip

#: Every fine-tuning method of the interface.
SFT_METHODS: tuple[str, ...] = (
    *_SFT_BASES,
    *(base + "_SkipLoRA" for base in _SFT_BASES),
    "FP8_SFT", "AMXFP8_SFT", "INT8_SFT", "RAWINT4_SFT", "MXFP4_SFT",
)  # fmt: skip

SUPPORTED_METHODS: tuple[str, ...] = tuple(_SUPPORTED)


def get_method(name: str) -> Method:
    """The supported inference method ``name``.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: no such method, a fine-tuning method, or one that does not run yet.
    """
    if not isinstance(name, str):
        raise TypeError(f"method must be a string, got {type(name).__name__}")
    if name in _SUPPORTED:
        return _SUPPORTED[name]
    supported = ", ".join(SUPPORTED_METHODS)
    if name in INFERENCE_METHODS:
        raise ValueError(f"method {name!r} is not supported yet; supported: {supported}")
    if name in SFT_METHODS:
        raise ValueError(
            f"method {name!r} is for mode='sft'; mode='inference' supports: {supported}"
        )
    raise ValueError(f"unknown method {name!r}; supported: {supported}")
