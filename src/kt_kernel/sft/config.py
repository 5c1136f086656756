"""`KTConfig`: what a training framework says about the experts on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..moe.settings import SFT_DEFAULTS
from ..runtime.machine import usable_cores
from ..runtime.variant import native
from .settings import check_sft_settings

Path = str | os.PathLike[str]


@dataclass
class KTConfig:
    """Settings of the experts of a model. Each has the name and the meaning of an argument of
    ``KTMoEWrapper``, except these:

    Attributes:
        model_path: Hugging Face checkpoint of the model, folder or file.
        weight_path: quantised or packed weights.
        sft_method: the method, one of ``SFT_METHODS``.
    """

    model_path: Path | None = None
    weight_path: Path | None = None
    sft_method: str = "AMXBF16_SFT"
    cpuinfer_threads: int | None = None
    threadpool_count: int | None = None
    numa_nodes: Sequence[int] | None = None
    chunked_prefill_size: int = -1
    num_gpu_experts: int | None = None
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    max_cache_depth: int = 1
    group_size: int = 128
    zero_point: bool = True
    full_weight_grad: bool = False

    def wrapper_arguments(self) -> dict[str, Any]:
        """What ``KTMoEWrapper`` takes of these, apart from the weights' place.

        Where several processes train on this machine and no threads, pools or nodes were given,
        each gets its part of them, see `part_of_rank`.
        """
        given = dict(vars(self))
        del given["model_path"], given["weight_path"]
        places = "cpuinfer_threads", "threadpool_count", "numa_nodes"
        if all(given[name] is None for name in places):
            given |= part_of_rank(os.environ)
        return given | {"method": given.pop("sft_method"), "mode": "sft"}


def part_of_rank(environment: Mapping[str, str]) -> dict[str, Any]:
    """Threads and NUMA nodes of one of several processes, by the variables LOCAL_RANK and
    LOCAL_WORLD_SIZE that torchrun and Accelerate set; empty for a single process.

    Cores are divided evenly. Nodes are, too, where there are as many as processes; else each
    process is on one node.
    """
    try:
        rank, ranks = (int(environment.get(n, "")) for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except ValueError:
        return {}
    if ranks < 2 or not 0 <= rank < ranks:
        return {}
    nodes = [node for node, _, _ in native().topology()]
    first, last = (edge * len(nodes) // ranks for edge in (rank, rank + 1))
    own = nodes[first:last] or [nodes[first]]
    threads = max(usable_cores() // ranks, len(own))
    return {"cpuinfer_threads": threads, "numa_nodes": own}


def get_sft_weight_path(cfg: Any) -> Path:
    """Where the base weights are read from: ``model_path`` for BF16 methods, else ``weight_path``.

    cfg: a `KTConfig`, or any object with its attributes ``sft_method``, ``model_path`` and
    ``weight_path``.

    Raises:
        RuntimeError: that one is not set.
        TypeError, ValueError: ``sft_method`` is not a fine-tuning method, or ``cfg`` has none.
    """
    if not hasattr(cfg, "sft_method"):
        raise TypeError(
            f"cfg must be a KTConfig or have its attribute sft_method, got {type(cfg).__name__}"
        )
    method = check_sft_settings(
        method=cfg.sft_method, hidden_size=32, moe_intermediate_size=32, **SFT_DEFAULTS
    ).method
    name = "model_path" if method.reads_model else "weight_path"
    path = getattr(cfg, name, None)
    if not path:
        raise RuntimeError(
            f"method {cfg.sft_method} reads the base weights from {name}, which is not set; set "
            f"{name}, or pass tensors to load_weights_from_tensors"
        )
    return path
