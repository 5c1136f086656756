"""NVFP4 experts: e2m1 codes, e4m3 scales per 16 columns, and one float32 scale per matrix.

ModelOpt stores weight, weight_scale and weight_scale_2, which multiplies. compressed-tensors stores
weight_packed, weight_scale and weight_global_scale, which divides. In both, the low nibble comes
first. Scales of activations are ignored.
"""

from __future__ import annotations

from ...weights.formats import NVFP4
from ...weights.quantised import QuantisedMatrix
from .codes import E4M3, E2m1Codes
from .layout import Parts
from .parts import Read, check_tensor, e4m3_scales, single

_BLOCK = 16


class NvFp4(E2m1Codes):
    """weight or weight_packed [N, K/2] bytes; weight_scale e4m3 [N, K/16]; a float32 scale."""

    title = "NVFP4"
    tensors = (
        "`weight` or `weight_packed` e2m1, two in a byte, [N, K/2]; `weight_scale` e4m3 [N, "
        "K/16]; `weight_scale_2`, which multiplies, or `weight_global_scale`, which divides"
    )
    method = "NVFP4"
    formats = (NVFP4,)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        check_tensor(parts["weight_scale"], E4M3, (rows, columns // _BLOCK))
        whole = parts.get("weight_scale_2") or parts["weight_global_scale"]
        check_tensor(whole, ("F32",), (), (1,), (1, 1))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        scale = e4m3_scales(parts["weight_scale"], read(parts["weight_scale"], None))
        if "weight_scale_2" in parts:
            info = parts["weight_scale_2"]
            whole = single(info, read(info, None))
        else:
            info = parts["weight_global_scale"]
            divisor = single(info, read(info, None))
            if divisor == 0:
                raise ValueError(f"{info} is 0; accepted: a finite number above 0")
            whole = 1 / divisor
        codes = self.read_codes(parts, read)
        return QuantisedMatrix(NVFP4, codes, scale.contiguous(), global_scale=whole)
