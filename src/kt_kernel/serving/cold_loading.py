"""The weights of a layer's cold experts: packs what an engine delivers, and checks files."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..checkpoint import open_checkpoint
from ..moe.inference import InferenceMoEWrapper
from ..runtime.forks import per_process
from ..runtime.text import lacking
from ..weights.expert_tensors import BIASES
from .options import KTOptions

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ColdLoading:
    """The matrices that arrived so far.

    place: of the layer, for messages. names: the matrices of an expert. shapes: those of all
    matrices, by name.
    """

    _lock: threading.Lock

    def __init__(
        self,
        place: str,
        wrapper: InferenceMoEWrapper,
        names: Sequence[str],
        shapes: dict[str, tuple[int, int]],
    ) -> None:
        self._place, self._wrapper, self._names, self._shapes = place, wrapper, names, shapes
        self._arrived: dict[int, dict[str, torch.Tensor]] = {}
        self._packed: set[int] = set()
        per_process(self, "_lock", threading.Lock)  # engines may load shards from several threads

    def add(self, expert_id: int, which: str, tensor: torch.Tensor) -> None:
        """Takes one matrix (copied; any device). When the last one of an expert arrives, the expert
        is packed and the copies are freed.

        Raises ValueError for a second delivery, or a wrong shape or dtype.
        """
        place = f"{self._place}, expert {expert_id}, {which}"
        if tuple(tensor.shape) != self._shapes[which]:
            raise ValueError(
                f"{place}: shape {tuple(tensor.shape)}, expected {self._shapes[which]}"
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{place}: dtype {tensor.dtype}; accepted: "
                + ", ".join(str(dtype) for dtype in WEIGHT_DTYPES)
            )
        # Explicit device="cpu": engines build and load models under a device context.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copy.copy_(tensor.detach())
        with self._lock:
            matrices = self._arrived.setdefault(expert_id, {})
            if which in matrices or expert_id in self._packed:
                raise ValueError(f"{place}: arrived twice")
            matrices[which] = copy
            if len(matrices) == len(self._names):
                # First: if packing fails, or a child is forked meanwhile, all of them must arrive
                # again.
                del self._arrived[expert_id]
                self._wrapper.load_expert(
                    expert_id, matrices.get("gate"), matrices["up"], matrices["down"]
                )
                self._packed.add(expert_id)

    def check_complete(self, experts: Sequence[int]) -> None:
        """Raises ValueError that names the matrices of these experts which did not arrive."""
        missing = {
            expert: [name for name in self._names if name not in self._arrived.get(expert, {})]
            for expert in experts
            if expert not in self._packed
        }
        if missing:
            raise ValueError(
                f"{self._place}: weights of cold experts did not arrive: {lacking(missing)}"
            )


def check_biases(
    options: KTOptions, layer_idx: int, sizes: tuple[int, int, int], has_bias: bool
) -> None:
    """Raises ValueError if the files of --kt-weight-path have biases and the model does not, or the
    reverse. sizes: E, H and I."""
    path = options.weight_path
    assert path is not None
    with open_checkpoint(path).each_expert(layer_idx, *sizes, (), options.method) as stream:
        stored = any(name in stream.fields for name in BIASES)
    if stored != has_bias:
        raise ValueError(
            f"{path}: the experts of layer {layer_idx} have "
            f"{'biases' if stored else 'no biases'} there, and the model's have "
            f"{'biases' if has_bias else 'none'}; it is the checkpoint of another model"
        )
