"""What a fine-tuning method stores: the inference method underneath it."""

from __future__ import annotations

from dataclasses import dataclass

from ..weights.formats import INT4_GROUP, INT4_ZERO
from ..weights.methods import METHODS, Method, check_sft_method

_SKIP = "_SkipLoRA"

#: Methods whose weights are exactly those of an inference method.
_SAME_WEIGHTS = {
    "AMXBF16_SFT": "BF16",
    "AMXINT8_SFT": "AMXINT8",
    "INT8_SFT": "AMXINT8",
    "AMXINT4_SFT": "AMXINT4",
    "FP8_SFT": "FP8",
    "AMXFP8_SFT": "FP8",
    "RAWINT4_SFT": "RAWINT4",
    "MXFP4_SFT": "MXFP4",
    "LLAMAFILE_SFT": "LLAMAFILE",
}
_SYMMETRIC_GROUPS = {32: "INT4_G32", 128: "INT4_G128"}


@dataclass(frozen=True)
class SftMethod:
    """A fine-tuning method.

    Attributes:
        name: what users pass as ``method=``.
        base: how the base weights are packed. Its name is that of an inference method where one
            stores the same weights, else ``name``.
        skip_lora_grads: whether backward leaves the LoRA terms out.
        per_row: of asymmetric weights, whether scale and zero point are those of a whole row; they
            are then stored once for each group of the row.
    """

    name: str
    base: Method
    skip_lora_grads: bool = False
    per_row: bool = False

    @property
    def reads_as(self) -> str:
        """The inference method whose weights are asked of a checkpoint."""
        return self.base.name if self.base.name in METHODS else "BF16"

    @property
    def packs_zero_points(self) -> bool:
        """Whether 16- and 32-bit weights are quantised with zero points, see `quantise`."""
        return self.base.format == INT4_ZERO and not self.base.quantised

    @property
    def reads_model(self) -> bool:
        """Whether the weights are those of the Hugging Face checkpoint, unquantised."""
        return self.base.name == "BF16"


def get_sft_method(
    name: str, group_size: int, zero_point: bool, hidden_size: int, intermediate_size: int
) -> SftMethod:
    """The fine-tuning method ``name`` for a layer.

    Args:
        group_size: columns per scale; only the KGroup methods read it.
        zero_point: whether groups have zero points; only AMXINT4_1KGroup_SFT reads it.
        hidden_size, intermediate_size: H and I.

    Raises:
        TypeError, ValueError: not a fine-tuning method.
    """
    check_sft_method(name)
    stem = name.removesuffix(_SKIP)
    skip = stem != name
    if stem in _SAME_WEIGHTS:
        return SftMethod(name, METHODS[_SAME_WEIGHTS[stem]], skip)
    if stem == "AMXINT4_1_SFT":
        sizes = (hidden_size, intermediate_size)
        group = next((g for g in (128, 64) if not any(size % g for size in sizes)), 32)
        return SftMethod(name, Method(name, (INT4_ZERO,), group_size=group), skip, per_row=True)
    if stem == "AMXINT4_1KGroup_SFT" and zero_point:
        return SftMethod(name, Method(name, (INT4_ZERO,), group_size=group_size), skip)
    if group_size in _SYMMETRIC_GROUPS:
        return SftMethod(name, METHODS[_SYMMETRIC_GROUPS[group_size]], skip)
    return SftMethod(name, Method(name, (INT4_GROUP,), group_size=group_size), skip)
