"""Layers for the tests of fine-tuning: made from seeds, with what the oracle needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kt_kernel import KTMoEWrapper
from kt_kernel.sft import BaseSFTMoEWrapper
from kt_kernel.sft.lora import LORA_NAMES, lora_shapes

from .oracle import MATRICES, Gradients, Weights, gradients

E, K, H, INTER, R = 6, 3, 64, 32, 4


def unpacked(wrapper: BaseSFTMoEWrapper, biases: dict[str, torch.Tensor] | None = None) -> Weights:
    """The dequantised weights that the packed layer stands for, by slot."""
    w = wrapper
    shapes = {
        "gate": (w.moe_intermediate_size, w.hidden_size),
        "up": (w.moe_intermediate_size, w.hidden_size),
        "down": (w.hidden_size, w.moe_intermediate_size),
    }
    mask = w.gpu_experts_mask.tolist()
    stacks = {}
    for number, name in enumerate(MATRICES):
        stack = np.zeros((w.num_experts, *shapes[name]), dtype=np.float32)
        for slot in range(w.num_experts):
            if not mask[slot]:
                w._core.unpack(slot, number, stack[slot])
        stacks[name] = torch.from_numpy(stack).double()
    return Weights(**stacks, on_gpu=mask, limit=w.swiglu_limit, alpha=w.swiglu_alpha, biases=biases)


def lora_tensors(
    experts: int = E,
    rank: int = R,
    hidden: int = H,
    inter: int = INTER,
    *,
    seed: int = 7,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """LoRA tensors of which neither half is zero, exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2).bfloat16().to(dtype)
        for name, shape in lora_shapes(experts, rank, hidden, inter).items()
    }


def base_tensors(
    experts: int = E, hidden: int = H, inter: int = INTER, *, seed: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate and up [E, INTER, H], down [E, H, INTER], bf16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((experts, inter, hidden),) * 2 + ((experts, hidden, inter),)
    return tuple((torch.randn(s, generator=generator) * 0.15).bfloat16() for s in shapes)


def make_wrapper(method: str = "AMXBF16_SFT", **arguments: Any) -> BaseSFTMoEWrapper:
    given = dict(
        layer_idx=5,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INTER,
        cpuinfer_threads=2,
        threadpool_count=1,
        method=method,
        mode="sft",
        lora_rank=R,
        lora_alpha=8.0,
    )
    return KTMoEWrapper(**(given | arguments))


def ready(method: str = "AMXBF16_SFT", **arguments: Any) -> BaseSFTMoEWrapper:
    """A loaded layer with LoRA."""
    wrapper = make_wrapper(method, **arguments)
    wrapper.load_weights_from_tensors(*base_tensors(), torch.arange(E))
    wrapper.init_lora_weights(**lora_tensors())
    return wrapper


@dataclass
class Batch:
    """x bf16 [T, H], ids, scores, and a gradient of the output."""

    tokens: int
    seed: int = 11
    experts: int = E
    k: int = K
    hidden: int = H
    x: torch.Tensor = field(init=False)
    ids: torch.Tensor = field(init=False)
    scores: torch.Tensor = field(init=False)
    grad: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.x = torch.randn(self.tokens, self.hidden, generator=g).bfloat16()
        self.ids = torch.randint(-1, self.experts, (self.tokens, self.k), generator=g)
        self.scores = torch.rand(self.tokens, self.k, generator=g)
        self.grad = torch.randn(self.tokens, self.hidden, generator=g).bfloat16()

    @property
    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.ids, self.scores


def expected(
    wrapper: BaseSFTMoEWrapper,
    batch: Batch,
    lora: dict[str, torch.Tensor],
    mapping: list[int] | None = None,
    base: Weights | None = None,
    **options: Any,
) -> Gradients:
    """The oracle's answer; LoRA gradients in logical order. base: the weights by slot, instead of
    those that the packed layer stands for."""
    mapping = mapping or list(range(wrapper.num_experts))
    by_slot = [lora[name].double()[mapping] for name in LORA_NAMES]
    found = gradients(
        batch.x,
        batch.ids,
        batch.scores,
        base or unpacked(wrapper),
        by_slot,
        wrapper.lora_scaling,
        batch.grad,
        **options,
    )
    index = torch.tensor(mapping)
    found.lora = [torch.zeros_like(g).index_add_(0, index, g) for g in found.lora]
    found.base = [torch.zeros_like(g).index_add_(0, index, g) for g in found.base]
    return found


def error(given: torch.Tensor, reference: torch.Tensor) -> float:
    """‖given - reference‖ / ‖reference‖ of whole tensors; 0 where both are zero."""
    reference = reference.double()
    difference, size = float((given.double() - reference).norm()), float(reference.norm())
    return difference / size if size else float(difference != 0)
