"""Group scales of INT4 searched for the least squared error, against every fp16 scale there is."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kt_kernel import _C

from .core import INT4_GROUP, INT4_ROW

Floats = npt.NDArray[np.float32]
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# Of test_bytes_on_every_machine: per dtype, groups of 32 and of 128.
DIGESTS = [
    "18fac2aac8001892",
    "ce1c210c2d1e7a59",
    "997b067d5a42ec88",
    "530c730956f8ed61",
    "997b067d5a42ec88",
    "530c730956f8ed61",
]
groups = pytest.mark.parametrize("group", [32, 64, 128])


def pack(weights: torch.Tensor, format: int, group: int, search: bool = False) -> Any:
    source = (weights.data_ptr(), 0, 0, 1.0)
    return _C.pack(format, group, 0, *weights.shape, source, DTYPES[weights.dtype], search)


def unpack(weights: torch.Tensor, group: int, search: bool) -> tuple[Floats, Floats]:
    """(codes [N, K], scales [N, K / group]) of packed weights, as kt/format.h lays them out."""
    rows, columns = weights.shape
    packed = pack(weights, INT4_GROUP, group, search)
    blocks = packed.reshape(len(packed), columns // group, -1)
    scales = blocks[..., :64].copy().view(np.float16).astype(np.float32)  # tile, group, row
    steps = blocks[..., 64:].reshape(len(packed), columns // group, group // 8, 32, 4)
    codes = np.concatenate([steps & 15, steps >> 4], -1).astype(np.float32) - 8
    codes = codes.transpose(0, 3, 1, 2, 4).reshape(-1, columns)
    return codes[:rows], scales.transpose(0, 2, 1).reshape(-1, columns // group)[:rows]


def loss(weights: Any, codes: Floats, scales: Floats) -> Any:
    """Squared error of each group, float64 [N, K / group]."""
    count = scales.shape[1]
    w = np.asarray(weights, np.float64).reshape(*scales.shape, -1)
    values = codes.reshape(len(w), count, -1) * scales[..., None].astype(np.float64)
    return ((w - values) ** 2).sum(-1)


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def kinds_of_weights() -> dict[str, torch.Tensor]:
    w = normal(40, 384)
    heavy = w * normal(40, 384, 1).abs() ** 3
    outlier = w.clone()
    outlier[:, ::64] *= 60
    same = torch.where(w > 0, 0.25, -0.25)
    mixed = w.clone()
    mixed[3] = 0
    mixed[5, 32:] = 0
    mixed[7] = 1.0
    mixed[9] = -1.0
    return {
        "normal": w,
        "heavy": heavy,
        "outlier": outlier,
        "same": same,
        "mixed": mixed,
        "small": w * 1e-4,
        "smaller": w * 3e-7,
        "vanishing": w * 1e-9,
        "large": w * 3e4,
        "largest": torch.where(w > 0, 65504.0, -3.0),
        "beyond fp16": w.clamp(-4, 4) * 1.1e5,
    }


@groups
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_nearest_and_loss_is_not_above_that_of_absmax(dtype, group):
    for weights in kinds_of_weights().values():
        if weights.to(dtype).isfinite().all():
            check_codes_and_loss(weights.to(dtype), group)


def check_codes_and_loss(weights: torch.Tensor, group: int) -> None:
    codes, scales = unpack(weights, group, True)
    w = weights.float().numpy()
    divisor = np.where(scales == 0, np.inf, scales)[..., None].astype(np.float32)
    ratio = w.reshape(*scales.shape, -1) / divisor
    np.testing.assert_array_equal(codes, np.clip(np.rint(ratio), -8, 7).reshape(codes.shape))
    assert np.isfinite(scales).all()
    plain = loss(w, *unpack(weights, group, False))
    # Two candidates may differ by less than the search's float32 can tell.
    energy = (w.astype(np.float64).reshape(*scales.shape, -1) ** 2).sum(-1)
    assert (loss(w, codes, scales) <= plain * (1 + 1e-5) + 1e-6 * energy).all()


@groups
def test_near_the_best_of_all_scales(group):
    """Within 1% of the least loss of any positive or negative fp16 scale, on average; no group is
    more than 12% above it."""
    weights = normal(2, 4 * group, 5)
    weights[1] *= normal(1, 4 * group, 6)[0] ** 2
    found = loss(weights, *unpack(weights, group, True)).reshape(-1)
    parts = weights.double().numpy().reshape(-1, group)
    every = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    every = every[(every > 1e-2) & (every < 4)]
    every = np.concatenate([every, -every])
    best = []
    for w in parts:
        codes = np.clip(np.rint(w / every[:, None]), -8, 7)
        best.append(((w - codes * every[:, None]) ** 2).sum(1).min())
    ratio = found / np.array(best)
    assert ratio.min() >= 1 - 1e-6
    assert ratio.mean() < 1.01, ratio.mean()
    assert ratio.max() < 1.12, ratio.max()


def test_error_of_int4_formats_on_normal_weights():
    """Relative to one scale per row: the goals for groups of 32."""
    weights = normal(64, 2048)
    w = weights.numpy()
    step = np.abs(w).max(1, keepdims=True) / 7
    by_row = np.sqrt(((w - np.rint(w / step) * step) ** 2).sum())
    packed = pack(weights, INT4_ROW, 0)  # the same rule
    np.testing.assert_allclose(packed[:, :128].copy().view(np.float32).reshape(-1, 1), step)

    def error(group: int, search: bool) -> float:
        return float(np.sqrt(loss(w, *unpack(weights, group, search)).sum()) / by_row)

    assert error(32, False) <= 0.67
    assert error(32, True) <= 0.60
    assert error(128, True) <= 0.85 * error(128, False)


def test_bytes_on_every_machine():
    """Sums in a fixed order: one digest of weights made without floating-point functions."""
    random = np.random.RandomState(3)  # its streams are frozen
    sums = random.randint(-64, 64, (4, 96, 512)).sum(0)
    weights = torch.from_numpy(sums.astype(np.float32) / 4096 * (1 + np.arange(96)[:, None] % 7))
    digests = [
        hashlib.sha256(pack(weights.to(dtype), INT4_GROUP, group, True).tobytes()).hexdigest()[:16]
        for dtype in DTYPES
        for group in (32, 128)
    ]
    assert digests == DIGESTS
