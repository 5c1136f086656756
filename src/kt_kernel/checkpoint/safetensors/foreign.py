"""Formats that are not read, by the names of their tensors, for messages.

Their authors' own loaders have these names: bitsandbytes, ExLlamaV2 and V3, HQQ, AQLM, QuIP#,
ModelOpt, compressed-tensors, PEFT, and MLX (mlx_lm).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..header import TensorInfo

# What follows the projection.
_PARTS = {
    r"weight\.(absmax|quant_map|nested_\w+|quant_state\..+)|SCB|weight_format": "bitsandbytes",
    r"q_(weight|perm|invperm|scale|scale_max|groups|group_map)": "EXL2 (ExLlamaV2)",
    r"trellis|su|sv|suh|svh|mcg|mul1": "EXL3 (ExLlamaV3)",
    r"W_q": "HQQ",
    r"codes|codebooks": "AQLM",
    r"Qidxs\w*|SU|SV": "QuIP#",
    r"pre_quant_scale": "ModelOpt's AWQ, which scales activations",
    r"bitmask|compressed|row_offsets|scale_packed": "compressed-tensors' sparse weights",
    r"(base_layer|lora_\w+)(\..+)?": "PEFT's adapters, to be merged first",
}
_MLX = re.compile(r"\.switch_mlp\.|\.experts\.\w+_proj\.(scales|biases)$")


def foreign_part(part: str) -> str | None:
    """The format of a tensor of an expert, by the name after its projection; None if unknown."""
    return next((known for names, known in _PARTS.items() if re.fullmatch(names, part)), None)


def refuse_mlx(tensors: Iterable[TensorInfo]) -> None:
    """Raises ValueError naming file and tensor for experts that MLX converted."""
    for info in tensors:
        if _MLX.search(info.name):
            raise not_read(info, "MLX")


def not_read(info: TensorInfo, known: str) -> ValueError:
    return ValueError(
        f"{info} is of a format that is not read ({known}); accepted: the model that it was made"
        " from, or one in a format of docs/formats.md"
    )
