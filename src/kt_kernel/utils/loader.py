"""Loader classes under the names that code written for other packages imports.

Thin views of `kt_kernel.checkpoint`; new code uses that directly.
"""

from __future__ import annotations

import os
import re

import torch

from ..checkpoint import Checkpoint, open_checkpoint

_BASE_KEY = re.compile(r"((?:.*\.)?layers\.([0-9]{1,9}))(?:\..*)?|blk\.([0-9]{1,9})")


class SafeTensorLoader:
    """Tensors of a safetensors file, folder (recursive) or index, by name.

    Raises FileNotFoundError if there is none.
    """

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
    ) -> dict[str, list[torch.Tensor] | None]:
        """All experts of the layer named by `base_key`, for instance "model.layers.3".

        Returns lists over the experts: gate and up [I, H], down [H, I], and gate_bias, up_bias and
        down_bias where the model has them; gate_scale, up_scale and down_scale are None. Raises
        ValueError if the layer has no experts, or quantised ones.
        """
        match = _BASE_KEY.fullmatch(base_key)
        if not match:
            raise ValueError(f"base_key {base_key!r}: expected one like 'model.layers.3'")
        checkpoint = self._opened()
        layer_idx = int(match[2] or match[3])
        where = checkpoint.where(layer_idx)
        if not where.startswith(f"{match[1]}."):
            raise ValueError(f"base_key {base_key!r}: no experts there; found them at {where!r}")
        experts = checkpoint.read_experts(layer_idx, *checkpoint.sizes(layer_idx))
        result: dict[str, list[torch.Tensor] | None] = {
            name: [tensor.to(device) for tensor in getattr(experts, name)]
            for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            if getattr(experts, name) is not None
        }
        return result | {"gate_scale": None, "up_scale": None, "down_scale": None}

    def close_all_handles(self) -> None:
        """Lets go of the checkpoint; the loader cannot be used afterwards, its tensors can."""
        self._checkpoint = None


class BF16SafeTensorLoader(SafeTensorLoader):
    """The same for unquantised experts, which are the only ones read so far."""
