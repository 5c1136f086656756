"""Experts in GGUF files, with types mixed as in llama.cpp and in other ways. The values come from
the gguf package."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expert_weights import HIDDEN, INTERMEDIATE, SPREAD, Source, Weights
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf_models import MATRICES, NUMBERS, Model, values_of
from tiny_model import EXPERTS, LAYERS


def _with_spread(kind: str, rows: np.ndarray) -> np.ndarray:
    """The rows with other scales if they are random; otherwise their scales are right already."""
    if kind != "MXFP4" and kind not in NUMBERS:
        return rows
    factor = SPREAD / values_of(kind, rows).std()
    blocks = rows.reshape(*rows.shape[:-1], -1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    if kind == "MXFP4":
        blocks[..., 0] += np.rint(np.log2(factor)).astype(np.int8).view(np.uint8)
    for offset in NUMBERS.get(kind, ()):
        numbers = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
        blocks[..., offset : offset + 2] = (numbers * np.float16(factor)).view(np.uint8)
    return blocks.reshape(rows.shape)


def _write(
    kinds: tuple[str, str, str], naming: str, options: dict[str, Any], path: Path
) -> Weights:
    model = Model(kinds, EXPERTS, HIDDEN, INTERMEDIATE, tuple(range(LAYERS)), naming=naming)
    for (layer, matrix), rows in model.rows.items():
        model.rows[layer, matrix] = _with_spread(model.kind[matrix], rows)
    path.mkdir()
    model.save(path / "model.gguf", **options)
    stacks = [
        [torch.from_numpy(model.values(layer, m)).double() for m in MATRICES]
        for layer in range(LAYERS)
    ]
    return [list(zip(*layer, strict=True)) for layer in stacks]


def _gguf(*kinds: str, naming: str = "stacked", **options: Any) -> Source:
    """kinds: of gate, up and down. options: those of gguf's writer."""
    return Source("LLAMAFILE", partial(_write, kinds, naming, options))


SOURCES: dict[str, Source] = {
    "Q4_K_M": _gguf("Q4_K", "Q4_K", "Q6_K", split_max_tensors=5),
    "Q8_0": _gguf("Q8_0", "Q8_0", "Q8_0", naming="fused"),
    "Q5_0, Q4_0, IQ4_NL": _gguf("Q5_0", "Q4_0", "IQ4_NL"),
    "Q2_K, Q3_K": _gguf("Q2_K", "Q2_K", "Q3_K"),
    "MXFP4 of GGUF": _gguf("MXFP4", "MXFP4", "MXFP4"),
    "Q5_K, IQ4_XS, Q5_1": _gguf("Q5_K", "IQ4_XS", "Q5_1", naming="each"),
    "Q4_1, F16, BF16": _gguf("Q4_1", "F16", "BF16"),
}
