"""The constructor's arguments as attributes of a wrapper."""

from __future__ import annotations

import os
from typing import Any

import torch

from .placement import Placement
from .settings import LayerSettings


class WrapperArguments:
    """Read-only attributes named like the constructor's arguments.

    Each has the given value or, if the argument was None or omitted, the selected one.
    """

    _settings: LayerSettings
    _placement: Placement  # the current one

    @property
    def layer_idx(self) -> int:
        """Number of the layer."""
        return self._settings.layer_idx

    @property
    def num_experts(self) -> int:
        """E, all experts of the layer."""
        return self._settings.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        """k, the experts per token."""
        return self._settings.num_experts_per_tok

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._settings.hidden_size

    @property
    def moe_intermediate_size(self) -> int:
        """I."""
        return self._settings.moe_intermediate_size

    @property
    def gpu_experts_mask(self) -> torch.Tensor:
        """A copy of the current mask: bool [E] on the CPU, True = on the GPU. See
        ``InferenceMoEWrapper.set_gpu_experts_mask``."""
        return self._placement.mask

    @property
    def num_gpu_experts(self) -> int:
        """How many experts the mask puts on the GPU."""
        return self._placement.num_hot

    @property
    def cpuinfer_threads(self) -> int:
        """Threads in all pools."""
        return sum(self._settings.pools.threads)

    @property
    def threadpool_count(self) -> int:
        """Number of thread pools."""
        return len(self._settings.pools.threads)

    @property
    def numa_nodes(self) -> list[int]:
        """NUMA node of each pool."""
        return list(self._settings.pools.nodes)

    @property
    def weight_path(self) -> str | os.PathLike[str] | None:
        """As given; None if it was not given or is empty."""
        return self._settings.weight_path

    @property
    def chunked_prefill_size(self) -> int:
        """The largest batch expected; -1: unknown."""
        return self._settings.chunked_prefill_size

    @property
    def cpu_save(self) -> bool:
        """Whether the packed layer is written to disk."""
        return self._settings.cpu_save

    @property
    def max_deferred_experts_per_token(self) -> int:
        """d, the experts per token that may be deferred to the next layer; 0: none."""
        return self._settings.max_deferred

    @property
    def method(self) -> str:
        """Name of the weight format."""
        return self._settings.method.name

    @property
    def mode(self) -> str:
        """The wrapper's mode."""
        return "inference"

    @property
    def swiglu_limit(self) -> float:
        """Clamp of gate and up; 0: none."""
        return self._settings.activation.swiglu_limit

    @property
    def swiglu_alpha(self) -> float:
        """Factor of gate inside the sigmoid; 0: plain SiLU."""
        return self._settings.activation.swiglu_alpha

    @property
    def activation(self) -> str:
        """Name of the activation function."""
        return self._settings.activation.function

    @property
    def situ_beta(self) -> float:
        """Soft limit of gate in SituGLU; 0 with other activations."""
        return self._settings.activation.situ_beta

    @property
    def situ_linear_beta(self) -> float:
        """Soft limit of up in SituGLU; 0: none."""
        return self._settings.activation.situ_linear_beta

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return self._settings.activation.gated

    @property
    def apply_router_weight_on_input(self) -> bool:
        """Whether router weights multiply the input of experts instead of their output."""
        return self._settings.activation.router_weight_on_input

    @property
    def lora_rank(self) -> Any:
        """As given; inference does not use it."""
        return self._settings.sft["lora_rank"]

    @property
    def lora_alpha(self) -> Any:
        """As given; inference does not use it."""
        return self._settings.sft["lora_alpha"]

    @property
    def lora_dropout(self) -> Any:
        """As given; inference does not use it."""
        return self._settings.sft["lora_dropout"]

    @property
    def max_cache_depth(self) -> Any:
        """As given; inference does not use it."""
        return self._settings.sft["max_cache_depth"]

    @property
    def group_size(self) -> Any:
        """As given; inference does not use it: the method or the weights have the group size."""
        return self._settings.sft["group_size"]

    @property
    def zero_point(self) -> Any:
        """As given; inference does not use it."""
        return self._settings.sft["zero_point"]

    @property
    def full_weight_grad(self) -> Any:
        """As given; inference does not use it."""
        return self._settings.sft["full_weight_grad"]
