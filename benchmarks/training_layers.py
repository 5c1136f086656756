"""MoE layers with LoRA on their experts that routine "sft" trains: ours, and PEFT's on torch.

All have the same inputs. The base weights of every expert are those of one, since values cost no
time; the LoRA weights differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from methods import METHODS, expert_sources
from shapes import Shape
from torch import nn

SCALING = 2.0  # alpha / R
MATRICES = ("gate", "up", "down")

# The inference method with the same base weights, for each method that is measured.
SFT_METHODS = {
    "AMXBF16_SFT": "BF16",
    "AMXINT8_SFT": "AMXINT8",
    "AMXINT4_SFT": "AMXINT4",
    "AMXINT4_KGroup_SFT": "INT4_G128",
    "FP8_SFT": "FP8",
}
# PEFT's layers: the dtype of the base weights, whether experts are written out as nn.Linear, and
# whether PEFT may keep the LoRA weights of a bf16 layer in float32, its default.
TORCH_LAYERS = {
    "float32": (torch.float32, True, True),
    "bfloat16": (torch.bfloat16, True, True),
    "bfloat16, LoRA too": (torch.bfloat16, True, False),
    "float32, fused": (torch.float32, False, True),
    "bfloat16, fused": (torch.bfloat16, False, True),
}


class Trained(Protocol):
    """A layer in training."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The experts' weighted sum [T, H]; backward follows."""

    def backward(self, y: torch.Tensor, grad: torch.Tensor) -> None:
        """Gradients of what `forward` returned, in ``grad`` of the leaves."""

    def update(self) -> None:
        """An optimizer step, and what the layer needs after it."""

    def lora_gradients(self) -> list[torch.Tensor]:
        """Of gate's A and B, up's and down's: [E, R, in], [E, out, R]. Empty where PEFT has other
        matrices."""


@dataclass
class Batch:
    """bf16 x and the gradient of y [T, H], ids and router weights [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, tokens: int) -> Batch:
        random = torch.Generator().manual_seed(tokens)
        x, grad = (torch.randn(tokens, shape.hidden, generator=random).bfloat16() for _ in "xg")
        keys = torch.rand(tokens, shape.experts, generator=random)
        weights = torch.rand(tokens, shape.top_k, generator=random)
        return cls(x, keys.argsort(-1)[:, : shape.top_k].contiguous(), weights, grad)


def base_weights(shape: Shape) -> list[torch.Tensor]:
    """gate, up and down of every expert, bf16."""
    return [source.data for source in expert_sources(METHODS["BF16"], shape)]


def lora_weights(shape: Shape, rank: int) -> list[torch.Tensor]:
    """A and B of gate, up and down: float32 [E, R, in], [E, out, R], exact in bf16."""
    random = torch.Generator().manual_seed(rank)
    made = []
    for out, wide in ((shape.inter, shape.hidden),) * 2 + ((shape.hidden, shape.inter),):
        a = torch.randn(shape.experts, rank, wide, generator=random) * wide**-0.5
        b = torch.randn(shape.experts, out, rank, generator=random) * 0.2 * rank**-0.5
        made += [a.bfloat16().float(), b.bfloat16().float()]
    return made


def reference(
    shape: Shape, rank: int, batch: Batch, scaling: float = SCALING
) -> list[torch.Tensor]:
    """y, the gradients of x and of the router weights, and those of LoRA, in float32 by autograd
    on the unquantised weights. scaling 0: without LoRA."""
    base = [weight.float() for weight in base_weights(shape)]
    lora = [tensor.requires_grad_() for tensor in lora_weights(shape, rank)]
    x, weights = (t.float().requires_grad_() for t in (batch.x, batch.weights))

    def linear(x: torch.Tensor, matrix: int, expert: int) -> torch.Tensor:
        a, b = lora[2 * matrix][expert], lora[2 * matrix + 1][expert]
        return x @ base[matrix].T + scaling * (x @ a.T @ b.T)

    y = torch.zeros_like(x)
    for expert in range(shape.experts):
        rows, choices = (batch.ids == expert).nonzero(as_tuple=True)
        h = nn.functional.silu(linear(x[rows], 0, expert)) * linear(x[rows], 1, expert)
        y = y.index_add(0, rows, linear(h, 2, expert) * weights[rows, choices, None])
    leaves = [x, weights, *lora]
    return [y.detach(), *torch.autograd.grad(y, leaves, batch.grad.float())]


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-6, fused=True)


class Ours:
    """`LoraExperts`, as `wrap_experts` puts it into a model."""

    def __init__(self, shape: Shape, rank: int, method: str, threads: int | None) -> None:
        from kt_kernel import KTMoEWrapper
        from kt_kernel.sft.peft_layer import module_class

        wrapper = KTMoEWrapper(
            layer_idx=0,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inter,
            cpuinfer_threads=threads,
            method=method,
            mode="sft",
            lora_rank=rank,
            lora_alpha=SCALING * rank,
        )
        weights = self._of_all_experts(shape, method)
        wrapper.load_weights_from_tensors(*weights, torch.arange(shape.experts))
        self._module = module_class()(wrapper).train()
        self._parameters = list(self._module.lora_parameters().values())
        with torch.no_grad():
            for parameter, values in zip(self._parameters, lora_weights(shape, rank), strict=True):
                parameter.copy_(values)
        self._optimizer = optimizer(self._parameters)

    @staticmethod
    def _of_all_experts(shape: Shape, method: str) -> list[Any]:
        """As `load_weights_from_tensors` takes them."""
        weights = base_weights(shape)
        if METHODS[SFT_METHODS[method]].dense:
            return [weight.expand(shape.experts, -1, -1) for weight in weights]
        from kt_kernel.testing.quantised import quantise
        from kt_kernel.weights.formats import FP8_BLOCK, WeightForm

        return [[quantise(one, WeightForm(FP8_BLOCK))] * shape.experts for one in weights]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._module(x, ids, weights)

    def backward(self, y: torch.Tensor, grad: torch.Tensor) -> None:
        y.backward(grad)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._module.update_lora_weights()

    def lora_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters]


class _Expert(nn.Module):
    def __init__(self, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        for name, weight in zip(MATRICES, weights, strict=True):
            linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=dtype, device="meta")
            linear.weight = nn.Parameter(weight.to(dtype, copy=True))
            self.add_module(f"{name}_proj", linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _WrittenOut(nn.ModuleList):
    """An `nn.Linear` for each matrix of each expert; tokens are sorted by expert once."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        rows = order // ids.shape[1]
        counts = ids.flatten().bincount(minlength=len(self)).tolist()
        parts = [
            expert(part)
            for expert, part in zip(self, x[rows].split(counts), strict=True)
            if len(part)
        ]
        scaled = torch.cat(parts) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, rows, scaled)


def _fused(shape: Shape, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> nn.Module:
    """The experts of transformers, with the implementation that it takes for them by itself."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=8,
        num_hidden_layers=1,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inter,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    with torch.device("meta"):
        experts = Qwen3MoeForCausalLM(config).model.layers[0].mlp.experts
    gate, up, down = (weight.to(dtype).expand(shape.experts, -1, -1) for weight in weights)
    experts.gate_up_proj = nn.Parameter(torch.cat((gate, up), 1))
    experts.down_proj = nn.Parameter(down.clone())
    return experts


class Torch:
    """PEFT's LoRA on transformers' experts. That of fused ones is as PEFT initialises it, zero."""

    def __init__(self, shape: Shape, rank: int, name: str) -> None:
        from peft import LoraConfig, get_peft_model

        self._dtype, self._written_out, cast = TORCH_LAYERS[name]
        self._shape = shape
        weights = base_weights(shape)
        holder = nn.Module()
        if self._written_out:
            targets: dict[str, Any] = {"target_modules": [f"{name}_proj" for name in MATRICES]}
            experts = (_Expert(weights, self._dtype) for _ in range(shape.experts))
            holder.experts = _WrittenOut(experts)
        else:
            targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
            holder.experts = _fused(shape, weights, self._dtype)
        config = LoraConfig(r=rank, lora_alpha=SCALING * rank, **targets)
        adapted = get_peft_model(holder, config, autocast_adapter_dtype=cast)
        self._experts = adapted.base_model.model.experts
        if self._written_out:
            self._fill(lora_weights(shape, rank))
        parameters = [p for p in adapted.parameters() if p.requires_grad]
        assert parameters, "PEFT trains nothing"
        self._optimizer = optimizer(parameters)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._experts(x.to(self._dtype), ids, weights)

    def backward(self, y: torch.Tensor, grad: torch.Tensor) -> None:
        y.backward(grad.to(y.dtype))

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def lora_gradients(self) -> list[torch.Tensor]:
        if not self._written_out:
            return []
        return [
            torch.stack([p.grad if p.grad is not None else p * 0 for p in stack])
            for stack in self._stacks()
        ]

    def _stacks(self) -> list[list[nn.Parameter]]:
        sides = [(f"{name}_proj", side) for name in MATRICES for side in ("lora_A", "lora_B")]
        return [
            [getattr(getattr(expert, name), side)["default"].weight for expert in self._experts]
            for name, side in sides
        ]

    @torch.no_grad()
    def _fill(self, values: Sequence[torch.Tensor]) -> None:
        for stack, of_all in zip(self._stacks(), values, strict=True):
            for parameter, one in zip(stack, of_all, strict=True):
                parameter.copy_(one)
