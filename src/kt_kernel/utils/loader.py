"""Loader classes under the names that code written for other packages imports.

Thin views of `kt_kernel.checkpoint`; new code uses that directly.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.kt_kernel.packed import KtPackedCheckpoint
from ..weights.expert_tensors import BIASES, MATRICES
from ..weights.packed import PackedMatrix
from ..weights.quantised import QuantisedMatrix

_BASE_KEY = re.compile(r"((?:.*\.)?layers\.([0-9]{1,9}))(?:\..*)?|blk\.([0-9]{1,9})")


class SafeTensorLoader:
    """Tensors of a safetensors file, folder (recursive) or index, by name.

    Raises FileNotFoundError if there is none.
    """

    only_dense = False

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        self._checkpoint: Checkpoint | None = open_checkpoint(file_path)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise RuntimeError("close_all_handles() was called; make a new loader")
        return self._checkpoint

    def has_tensor(self, key: str) -> bool:
        return key in self._opened().tensors

    def load_tensor(self, key: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """The tensor as stored. KeyError if there is none of that name."""
        return self._opened().read_tensor(key).to(device)

    def load_experts(
        self, base_key: str, device: str | torch.device = "cpu"
    ) -> dict[str, list[Any] | None]:
        """All experts of the layer named by `base_key`, for instance "model.layers.3".

        Returns lists over the experts: gate and up [I, H], down [H, I], and gate_bias, up_bias and
        down_bias where the model has them; gate_scale, up_scale and down_scale are None. Of
        quantised experts, these are codes and scale of
        `kt_kernel.weights.quantised.QuantisedMatrix`; use `kt_kernel.checkpoint` for zero points
        and scales of whole matrices. Of weights that kt-kernel packed, whose base_key is "blk.3",
        the tensors as stored: lists over the NUMA parts of lists over the experts. Raises
        ValueError if the layer has no experts.
        """
        match = _BASE_KEY.fullmatch(base_key)
        if not match:
            raise ValueError(f"base_key {base_key!r}: expected one like 'model.layers.3'")
        checkpoint = self._opened()
        layer_idx = int(match[2] or match[3])
        where = checkpoint.where(layer_idx)
        if not where.startswith(f"{match[1] or match[0]}."):
            raise ValueError(f"base_key {base_key!r}: no experts there; found them at {where!r}")
        if isinstance(checkpoint, KtPackedCheckpoint):
            return self._packed_parts(base_key, checkpoint, layer_idx, device)
        experts = checkpoint.read_experts(layer_idx, *checkpoint.sizes(layer_idx))
        result: dict[str, list[Any] | None] = {
            name: [tensor.to(device) for tensor in getattr(experts, name)]
            for name in BIASES
            if getattr(experts, name) is not None
        }
        for name in MATRICES:
            matrices = getattr(experts, name)
            if isinstance(matrices[0], PackedMatrix):
                raise ValueError(
                    f"base_key {base_key!r}: the experts are packed for our kernels;"
                    " kt_kernel.checkpoint reads them"
                )
            quantised = isinstance(matrices[0], QuantisedMatrix)
            if quantised:
                self._need_quantised(base_key)
            if quantised and any(matrix.order is not None for matrix in matrices):
                raise ValueError(
                    f"base_key {base_key!r}: the columns of {name} are in an order of"
                    " their own (act-order); use kt_kernel.checkpoint"
                )
            codes = [matrix.codes for matrix in matrices] if quantised else matrices
            separate = quantised and matrices[0].scale is not None  # not inside ggml's blocks
            scales = [matrix.scale for matrix in matrices] if separate else None
            result[name] = [tensor.to(device) for tensor in codes]
            result[f"{name}_scale"] = scales and [tensor.to(device) for tensor in scales]
        return result

    def _need_quantised(self, base_key: str) -> None:
        if self.only_dense:
            raise ValueError(
                f"base_key {base_key!r}: the experts are quantised; use SafeTensorLoader"
            )

    def _packed_parts(
        self,
        base_key: str,
        checkpoint: KtPackedCheckpoint,
        layer_idx: int,
        device: str | torch.device,
    ) -> dict[str, list[Any] | None]:
        self._need_quantised(base_key)
        return {
            name + suffix: [
                [tensor.to(device) for tensor in part]
                for part in checkpoint.raw_parts(layer_idx, name, kind)
            ]
            for name in MATRICES
            for suffix, kind in (("", "weight"), ("_scale", "scale"))
        }

    def close_all_handles(self) -> None:
        """Lets go of the checkpoint; the loader cannot be used afterwards, its tensors can."""
        self._checkpoint = None


class BF16SafeTensorLoader(SafeTensorLoader):
    """The same for unquantised experts only; ValueError for others."""

    only_dense = True
