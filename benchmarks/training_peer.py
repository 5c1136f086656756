"""kt-kernel's fine-tuning classes as a layer of routine "sft".

As in peer.py, only its extension is loaded, and none of its Python runs. Its LoRA weights and their
gradients are bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from peer import Refused, load_extension
from shapes import Shape
from torch import nn
from training_layers import SCALING, base_weights, lora_weights, optimizer

from kt_kernel.runtime.pools import plan_pools

CLASSES = {
    "AMXBF16_SFT": "AMXBF16_SFT_MOE",
    "AMXINT8_SFT": "AMXInt8_SFT_MOE",
    "AMXINT4_SFT": "AMXInt4_SFT_MOE",
}
VARIANT = "amx"  # the only one that has them


class Peer:
    """kt-kernel's layer of one method."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        method: str,
        threads: int | None,
        folder: str,
        max_tokens: int,
        variant: str = VARIANT,
    ) -> None:
        ext = load_extension(folder, variant)
        if method not in CLASSES or not hasattr(ext.moe, CLASSES[method]):
            raise Refused(f"kt-kernel's {variant} variant has no class for {method}")
        plan = plan_pools(threads, None, None)
        pools = ext.WorkerPoolConfig()
        pools.subpool_count = len(plan.threads)
        pools.subpool_numa_map = list(plan.nodes)
        pools.subpool_thread_count = list(plan.threads)
        self._cpu = ext.CPUInfer(pools)
        self._shape = shape
        self._lora = [nn.Parameter(t.bfloat16()) for t in lora_weights(shape, rank)]
        self._gradients = [torch.zeros_like(t) for t in self._lora]
        self._optimizer = optimizer(self._lora)
        self._order = torch.arange(shape.experts)

        config = ext.moe.MOESFTConfig()
        config.expert_num, config.num_experts_per_tok = shape.experts, shape.top_k
        config.hidden_size, config.intermediate_size = shape.hidden, shape.inter
        config.lora_rank, config.lora_alpha, config.lora_dropout = rank, SCALING * rank, 0.0
        config.max_cache_depth, config.layer_idx = 1, 0
        config.max_len = -(-max_tokens // 32) * 32
        config.share_backward_bb = config.share_cache_pool = False
        config.full_weight_grad = config.authoritative_optimizer_grads = False
        config.physical_to_logical_map = self._order.data_ptr()
        config.pool = self._cpu.backend_
        weights = [w.expand(shape.experts, -1, -1).contiguous() for w in base_weights(shape)]
        config.gate_proj, config.up_proj, config.down_proj = (w.data_ptr() for w in weights)
        names = (f"{m}_lora_{side}" for m in ("gate", "up", "down") for side in "ab")
        for name, tensor in zip(names, self._lora, strict=True):
            setattr(config, name, tensor.data_ptr())
        self._moe = getattr(ext.moe, CLASSES[method])(config)
        self._run(self._moe.load_weights_task())  # copies the weights
        self._update_lora()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._leaves = x, weights
        self._inputs = [t.detach() for t in (x, ids, weights)]
        count = torch.tensor([len(x)], dtype=torch.int32)
        out = torch.empty_like(self._inputs[0])
        x, ids, weights = self._inputs
        self._run(
            self._moe.forward_sft_task(
                count.data_ptr(),
                self._shape.top_k,
                ids.data_ptr(),
                weights.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                True,
            )
        )
        return out

    def backward(self, y: torch.Tensor, grad: torch.Tensor) -> None:
        x, weights = self._leaves
        x.grad, weights.grad = torch.empty_like(x), torch.empty_like(weights)
        lora = (gradient.data_ptr() for gradient in self._gradients)
        base = (0, 0, 0)  # no gradients of the base weights
        self._run(
            self._moe.backward_task(
                grad.data_ptr(), x.grad.data_ptr(), *lora, weights.grad.data_ptr(), *base
            )
        )
        for parameter, gradient in zip(self._lora, self._gradients, strict=True):
            parameter.grad = gradient

    def update(self) -> None:
        self._optimizer.step()
        self._update_lora()

    def lora_gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def _update_lora(self) -> None:
        self._moe.update_lora_weights(*(tensor.data_ptr() for tensor in self._lora))

    def _run(self, task: Any) -> None:
        self._cpu.submit(task)
        self._cpu.sync()
