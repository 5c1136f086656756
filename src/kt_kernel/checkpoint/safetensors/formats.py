"""Recognises the quantised format of an expert from its tensors' names, dtypes and shapes."""

from __future__ import annotations

from ..quantization import Quantization
from .awq import Awq
from .bf16 import Dense
from .codes import NIBBLES, SCALE_NAMES, scale_of
from .fp8 import Fp8Block, Fp8Row
from .gptq import Gptq
from .int8 import Int8Group, Int8Row
from .layout import Parts
from .matrix import MatrixFormat, bits_of
from .mx import BLOCK, MxFp4, MxFp8
from .nvfp4 import NvFp4
from .pack_quantized import PackQuantized
from .parts import FLOATS, UE8M0
from .w4afp8 import W4AFp8

FORMATS: tuple[type[MatrixFormat], ...] = (
    Fp8Block,
    Fp8Row,
    PackQuantized,
    Gptq,
    Awq,
    Int8Row,
    Int8Group,
    W4AFp8,
    MxFp4,
    NvFp4,
    MxFp8,
)

_INT4_EXTRAS = {"weight_shape", "weight_zero_point", "weight_g_idx"}


def is_dense(parts: Parts) -> bool:
    """Whether a matrix has only the tensors of an unquantised one."""
    return parts.keys() <= {"weight", "bias"}


def identify(
    parts: Parts, quantization: Quantization, columns: int | None = None
) -> type[MatrixFormat]:
    """The format of a matrix. Raises ValueError naming a tensor if the format is unknown, or if
    config.json contradicts the tensors.

    columns: of the matrix. Without them, int8 weights count as 8-bit codes, although a byte may
    hold two codes; the number of rows is the same.
    """
    if is_dense(parts):
        return Dense
    names = parts.keys() - {"bias"}
    if len(names) == 2 and "weight" in names and names & set(SCALE_NAMES):
        return _with_scale(parts, columns)
    if names == {"weight", "weight_scale", "weight_scale_2"}:
        return NvFp4
    if names == {"weight_packed", "weight_scale", "weight_global_scale"}:
        return NvFp4
    if names - _INT4_EXTRAS == {"weight_packed", "weight_scale"}:
        return MxFp4 if parts["weight_scale"].dtype in UE8M0 else PackQuantized
    if names - {"g_idx"} == {"qweight", "qzeros", "scales"}:
        return _gptq_or_awq(parts, quantization)
    some = parts[min(names)]
    raise ValueError(
        f"{some}: experts with the tensors {', '.join(sorted(names))} are in no known format;"
        f" known: {', '.join(known.title for known in FORMATS)}"
    )


def _with_scale(parts: Parts, columns: int | None) -> type[MatrixFormat]:
    weight, scale = parts["weight"], scale_of(parts)
    if weight.dtype in NIBBLES and scale.dtype in UE8M0:
        return MxFp4
    if weight.dtype == "I8" and scale.dtype in FLOATS:
        rows = weight.shape[0] if weight.shape else 0
        grouped = len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 1
        if len(scale.shape) == 2 and not grouped and scale.shape not in ((rows, 1), (1, 1)):
            raise ValueError(
                f"{scale} has shape {list(scale.shape)}; accepted beside I8 weights [N, K]: [N], "
                "[N, 1], [N, K / group size], or one number"
            )
        if (
            columns is not None
            and len(weight.shape) == 2
            and bits_of(weight, weight.shape[1], columns, (4, 8)) == 4
        ):
            return W4AFp8
        return Int8Group if grouped else Int8Row
    if not weight.dtype.startswith("F8_E4M3"):
        raise ValueError(
            f"{weight} has dtype {weight.dtype} and {scale.name!r} {scale.dtype}; expected F8_E4M3"
            f" with scales, I8 with float scales, or {', '.join(NIBBLES)} with ue8m0 scales"
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
    """GPTQ packs along K, so its qweight is as wide as the scales. AWQ packs along N. Other shapes
    are of neither: what config.json calls them, or else AWQ, explains the error."""
    words, rows = (parts[name].shape[-1:] for name in ("qweight", "scales"))
    shown = Gptq if words == rows else Awq if words and rows == (8 * words[0],) else None
    named: type[MatrixFormat] | None = None
    for key in ("quant_method", "packing_format"):
        value = quantization.settings.get(key)
        for kind, word in ((Gptq, "gptq"), (Awq, "awq")):
            if isinstance(value, str) and word in value:
                named = kind
                if shown not in (None, kind):
                    info = parts["qweight"]
                    raise ValueError(
                        f"{info} has shape {list(info.shape)} beside scales"
                        f" {list(parts['scales'].shape)}, as {shown.title} packs it, but"
                        f" {quantization.file} has {key} {value!r}"
                    )
    return shown or named or (Gptq if "g_idx" in parts else Awq)
