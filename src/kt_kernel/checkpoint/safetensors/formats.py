"""Recognises the quantised format of an expert from its tensors' names, dtypes and shapes."""

from __future__ import annotations

from ..quantization import Quantization
from .awq import Awq
from .codes import NIBBLES, SCALE_NAMES, scale_of
from .fp8 import Fp8Block, Fp8Row
from .gptq import Gptq
from .int4 import PackedInt4
from .layout import Parts
from .matrix import MatrixFormat
from .mx import BLOCK, MxFp4, MxFp8
from .nvfp4 import NvFp4
from .parts import FLOATS, UE8M0

FORMATS: tuple[type[MatrixFormat], ...] = (
    Fp8Block,
    Fp8Row,
    PackedInt4,
    Gptq,
    Awq,
    MxFp4,
    NvFp4,
    MxFp8,
)

_INT4_EXTRAS = {"weight_shape", "weight_zero_point", "weight_g_idx"}


def is_dense(parts: Parts) -> bool:
    """Whether a matrix has only the tensors of an unquantised one."""
    return parts.keys() <= {"weight", "bias"}


def identify(parts: Parts, quantization: Quantization) -> type[MatrixFormat]:
    """The format of a matrix. Raises ValueError naming a tensor if the format is unknown."""
    names = parts.keys() - {"bias"}
    if len(names) == 2 and "weight" in names and names & set(SCALE_NAMES):
        return _with_scale(parts)
    if names == {"weight", "weight_scale", "weight_scale_2"}:
        return NvFp4
    if names == {"weight_packed", "weight_scale", "weight_global_scale"}:
        return NvFp4
    if names - _INT4_EXTRAS == {"weight_packed", "weight_scale"}:
        return MxFp4 if parts["weight_scale"].dtype in UE8M0 else PackedInt4
    if names - {"g_idx"} == {"qweight", "qzeros", "scales"}:
        return _gptq_or_awq(parts, quantization)
    some = parts[min(names)]
    raise ValueError(
        f"{some}: experts with the tensors {', '.join(sorted(names))} are in no known format;"
        f" known: {', '.join(known.title for known in FORMATS)}"
    )


def _with_scale(parts: Parts) -> type[MatrixFormat]:
    weight, scale = parts["weight"], scale_of(parts)
    if weight.dtype in NIBBLES and scale.dtype in UE8M0:
        return MxFp4
    if not weight.dtype.startswith("F8_E4M3"):
        raise ValueError(
            f"{weight} has dtype {weight.dtype} and {scale.name!r} {scale.dtype}; expected F8_E4M3"
            f" with scales, or {', '.join(NIBBLES)} with ue8m0 scales"
        )
    if scale.dtype not in FLOATS + UE8M0:
        raise ValueError(
            f"{scale} has dtype {scale.dtype}; expected {' or '.join(FLOATS + UE8M0)} with e4m3"
        )
    if scale.dtype in UE8M0 and len(weight.shape) == 2 and len(scale.shape) == 2:
        per_block = scale.shape[1] == -(-weight.shape[1] // BLOCK)
        return MxFp8 if per_block and scale.shape[0] == weight.shape[0] else Fp8Block
    rows = weight.shape[0] if weight.shape else 0
    return Fp8Row if rows > 1 and scale.shape in ((rows,), (rows, 1)) else Fp8Block


def _gptq_or_awq(parts: Parts, quantization: Quantization) -> type[MatrixFormat]:
    """GPTQ packs along K, so its qweight is as wide as the scales. AWQ packs along N."""
    if quantization.name in ("gptq", "awq"):
        return Gptq if quantization.name == "gptq" else Awq
    same = parts["qweight"].shape[-1:] == parts["scales"].shape[-1:]
    return Gptq if same or "g_idx" in parts else Awq
