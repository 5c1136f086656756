"""GGUF files for tests, written by the gguf package, and the package's values of their tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES

E, H, I = 3, 512, 256  # noqa: E741
MATRICES = ("gate", "up", "down")
ARCH = "qwen3moe"
# Types with kernels. For those that the package cannot quantise, the positions of float16 numbers.
BY_PACKAGE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
NUMBERS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
SUPPORTED = (*BY_PACKAGE, *NUMBERS, "MXFP4")


@functools.lru_cache(maxsize=64)
def rows_of(kind: str, shape: tuple[int, ...], seed: tuple[int, ...]) -> np.ndarray:
    """Random rows of a type: in its own dtype for F32 and F16, otherwise as the bytes of its
    blocks."""
    rng = np.random.default_rng(seed)
    number = GGMLQuantizationType[kind]
    values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
    if kind in BY_PACKAGE:
        return quants.quantize(values, number)
    columns, size = GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // columns, size), dtype=np.uint8)
    if kind == "MXFP4":  # the package's quantiser takes a second per matrix
        blocks[..., 0] = rng.integers(114, 126, blocks.shape[:-1])
    for offset in NUMBERS.get(kind, ()):
        scale = rng.standard_normal((*blocks.shape[:-1], 1)).astype(np.float16) / np.float16(2048)
        blocks[..., offset : offset + 2] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def values_of(kind: str, rows: np.ndarray) -> np.ndarray:
    """The values of rows as float32, according to the package."""
    return quants.dequantize(rows, GGMLQuantizationType[kind])


@dataclass
class Model:
    """The experts of some layers, in one or more files. kinds: types of gate, up and down."""

    kinds: tuple[str, str, str] = ("Q4_K", "Q4_K", "Q6_K")
    experts: int = E
    hidden: int = H
    inter: int = I
    layers: tuple[int, ...] = (0,)
    biases: bool = False
    naming: str = "stacked"  # or "fused", "each"
    arch: str = ARCH
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        e, h, i = self.experts, self.hidden, self.inter
        shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
        self.kind = dict(zip(MATRICES, self.kinds, strict=True))
        self.rows = {
            (layer, m): rows_of(self.kind[m], shapes[m], (self.seed, layer, n)).copy()
            for layer in self.layers
            for n, m in enumerate(MATRICES)
        }
        self.bias = {
            (layer, m): rng.standard_normal(shapes[m][:2]).astype(np.float32)
            for layer in self.layers
            for m in MATRICES
        }
        self.metadata = {
            "expert_count": e,
            "embedding_length": h,
            "expert_feed_forward_length": i,
        } | self.metadata

    def values(self, layer: int, matrix: str) -> np.ndarray:
        """float32 [E, N, K]."""
        return values_of(self.kind[matrix], self.rows[layer, matrix])

    def tensors(self) -> dict[str, tuple[str, np.ndarray]]:
        """Type and rows by name."""
        found: dict[str, tuple[str, np.ndarray]] = {"output_norm.weight": ("F32", np.ones(8, "f"))}
        parts = [("weight", self.rows)] + [("bias", self.bias)] * self.biases
        for layer in self.layers:
            where = f"blk.{layer}.ffn_"
            for part, source in parts:
                each = {
                    m: (self.kind[m] if part == "weight" else "F32", source[layer, m])
                    for m in MATRICES
                }
                if self.naming == "fused":
                    kind, gate = each.pop("gate")
                    both = np.concatenate([gate, each.pop("up")[1]], axis=1)
                    found[f"{where}gate_up_exps.{part}"] = kind, both
                for matrix, (kind, rows) in each.items():
                    if self.naming == "each":
                        for expert in range(self.experts):
                            found[f"{where}{matrix}.{expert}.{part}"] = kind, rows[expert]
                    else:
                        found[f"{where}{matrix}_exps.{part}"] = kind, rows
        return found

    def save(self, path: Path, drop: tuple[str, ...] = (), **options: Any) -> Path:
        """options: those of GGUFWriter. drop: names to leave out."""
        tensors = {name: t for name, t in self.tensors().items() if name not in drop}
        return write(
            path,
            tensors,
            {f"{self.arch}.{k}": v for k, v in self.metadata.items()},
            self.arch,
            **options,
        )


def write(
    path: Path,
    tensors: dict[str, tuple[str, np.ndarray]],
    metadata: dict[str, Any],
    arch: str = ARCH,
    alignment: int | None = None,
    **options: Any,
) -> Path:
    """Writes a file. options: those of GGUFWriter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, arch, **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (kind, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
