"""The check that packed weights become the codes and scales that an engine's kernels read."""

from __future__ import annotations

import torch

from kt_kernel import _C
from kt_kernel.device.slots import repack
from kt_kernel.device.streaming.unpack import PackedMatrix
from kt_kernel.testing import quantise
from kt_kernel.weights.formats import FP8_BLOCK, INT4_GROUP, INT8_ROW, WeightForm
from kt_kernel.weights.quantised import CoreSource

_SCALES = ((32, 0), (32, 1), (64, 2), (128, 1))  # group size, number of the scales' type
FORMS = [WeightForm(INT4_GROUP, *each) for each in _SCALES]
FORMS += [WeightForm(INT8_ROW), WeightForm(FP8_BLOCK)]
_BEGIN, _GAP = 128, 64  # bytes before a matrix's first tile, and between its tiles


def check_repacked(
    form: WeightForm, rows: int, columns: int, device: str, scales: torch.dtype | None = None
) -> None:
    """A matrix becomes the codes and scales from which it was packed, twice, and nothing else is
    written. scales: their type, if it is another one."""
    g = torch.Generator().manual_seed(rows)
    matrix = quantise(torch.randn(rows, columns, generator=g), form)
    assert matrix.scale is not None
    tiles = torch.from_numpy(_C.pack(*form.core, rows, columns, CoreSource(matrix).address))
    stride = tiles.shape[1] + _GAP
    memory = torch.full((_BEGIN + len(tiles) * stride,), 0xFF, dtype=torch.uint8)
    memory[_BEGIN:].view(len(tiles), stride)[:, : tiles.shape[1]] = tiles
    codes, scale = matrix.codes.view(torch.uint8), matrix.scale.to(scales or matrix.scale.dtype)
    scale = scale if scale.dim() == 2 else scale[:, None]
    held = [torch.full((rows + 2, t.shape[1] + 16), 7, dtype=t.dtype) for t in (codes, scale)]
    want = [t.clone() for t in held]
    for whole, part in zip(want, (codes, scale), strict=True):
        whole[1 : len(part) + 1, : part.shape[1]] = part
    on_device = [t.to(device) for t in held]
    places = [
        t[1 : len(part) + 1, : part.shape[1]]
        for t, part in zip(on_device, (codes, scale), strict=True)
    ]
    packed = PackedMatrix(form, rows, columns, _BEGIN, stride)
    again = repack(packed, memory.to(device), places[0], places[1])
    for found, whole in zip(on_device, want, strict=True):
        assert torch.equal(found.cpu(), whole)
    if again is not None:
        for found, whole in zip(on_device, held, strict=True):
            found.copy_(whole)
        again().run(torch.cuda.current_stream().cuda_stream)
        for found, whole in zip(on_device, want, strict=True):
            assert torch.equal(found.cpu(), whole)
