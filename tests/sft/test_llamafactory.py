"""The calls of LLaMA-Factory's KTransformers path: keywords, order, rebinding of attributes.

The layer below is written from that interface: a module with the LoRA parameters, an autograd
function that calls the wrapper and adds the gradients itself, and a flag that is set after each
optimizer step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kt_kernel.experts import KTMoEWrapper
from kt_kernel.sft.lora import LORA_NAMES

from .layers import INTER, Batch, E, H, K, R, base_tensors, error, expected, lora_tensors


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, ids, scores, layer, precomputed):
        ctx.layer = layer
        if precomputed is not None:
            return precomputed
        tokens = hidden.shape[0] * hidden.shape[1]
        out = layer.wrapper.forward_sft(
            hidden_states=hidden.view(tokens, H).to(torch.bfloat16).cpu().contiguous(),
            expert_ids=ids.view(tokens, K).to(torch.int64).cpu().contiguous(),
            weights=scores.view(tokens, K).to(torch.float32).cpu().contiguous(),
            save_for_backward=layer.training,
        )
        return out.view(hidden.shape).to(device=hidden.device, dtype=hidden.dtype)

    @staticmethod
    def backward(ctx, grad):
        layer = ctx.layer
        flat = grad.reshape(-1, H).to(torch.bfloat16).cpu().contiguous()
        grad_input, grad_lora, grad_scores = layer.wrapper.backward(flat)
        for name, parameter in layer.lora_params.items():
            added = grad_lora[f"grad_{name}"].to(parameter.device, dtype=parameter.dtype)
            if parameter.requires_grad:
                parameter.grad = added if parameter.grad is None else parameter.grad + added
        return grad_input.view(grad.shape).to(grad.dtype), None, grad_scores, None, None


class _Layer(nn.Module):
    def __init__(self, method: str, rank: int, alpha: float, lora: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.wrapper = KTMoEWrapper(
            layer_idx=5,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=INTER,
            gpu_experts_mask=None,
            num_gpu_experts=0,
            cpuinfer_threads=1,
            threadpool_count=1,
            weight_path="",
            chunked_prefill_size=4096,
            method=method,
            mode="sft",
            lora_rank=rank,
            lora_alpha=alpha,
            max_cache_depth=2,
            group_size=128,
            zero_point=True,
        )
        self.wrapper.share_backward_bb = False  # attributes of its own that are set on the wrapper
        self.wrapper.share_cache_pool = False
        gate, up, down = base_tensors()
        self.wrapper.load_weights_from_tensors(
            gate_proj=gate,
            up_proj=up,
            down_proj=down,
            physical_to_logical_map_cpu=torch.arange(E, dtype=torch.int64, device="cpu"),
        )
        self.wrapper.gate_proj = self.wrapper.up_proj = self.wrapper.down_proj = None
        self.lora_params = nn.ParameterDict({n: nn.Parameter(t) for n, t in lora.items()})
        self.wrapper.init_lora_weights(**{n: p.data for n, p in self.lora_params.items()})
        self.dirty = True

    def update_lora_pointers(self) -> None:
        for name in LORA_NAMES:
            setattr(self.wrapper, name, self.lora_params[name].data)
        self.wrapper.update_lora_weights()

    def forward(self, hidden, ids, scores, overlap: bool = False):
        if self.dirty:
            self.update_lora_pointers()
            self.dirty = False
        precomputed = None
        if overlap:
            flat = hidden.view(-1, H).to(torch.bfloat16).cpu().contiguous()
            self.wrapper.submit_forward_sft(flat, ids, scores.detach(), save_for_backward=True)
            out = self.wrapper.sync_forward_sft()
            precomputed = out.view(hidden.shape).to(hidden.dtype)
        return _Function.apply(hidden, ids, scores, self, precomputed)


def leaves(batch: Batch):
    hidden = batch.x.view(2, -1, H).clone().requires_grad_()
    return hidden, batch.ids, batch.scores.clone().requires_grad_()


@pytest.mark.parametrize("method", ["AMXBF16_SFT", "AMXINT8_SFT", "AMXINT4_SFT"])
@pytest.mark.parametrize("overlap", [False, True])
def test_training(method, overlap):
    batch, lora = Batch(8), lora_tensors(dtype=torch.bfloat16)
    layer = _Layer(method, R, 8.0, {n: t.clone() for n, t in lora.items()})
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    wanted = expected(layer.wrapper, batch, lora)
    outputs = []
    for step in range(3):
        hidden, ids, scores = leaves(batch)
        y = layer(hidden, ids, scores, overlap)
        outputs.append(y.detach().clone())
        y.backward(batch.grad.view(y.shape))
        if step == 0:
            most = 0.01 if method == "AMXBF16_SFT" else 0.03
            assert error(y.detach().view(-1, H), wanted.y) < most
            assert error(hidden.grad.view(-1, H), wanted.x) < most
            assert error(scores.grad, wanted.scores) < most
            for name, gradient in zip(LORA_NAMES, wanted.lora, strict=True):
                assert error(layer.lora_params[name].grad, gradient) < most, name
        optimizer.step()
        optimizer.zero_grad()
        layer.dirty = True
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_a_forgotten_update_is_noticed():
    """Though the wrapper has only the parameters' ``.data``, and the optimizer is fused."""
    batch, layer = Batch(4), _Layer("AMXBF16_SFT", R, 8.0, lora_tensors())
    layer(*leaves(batch)).backward(batch.grad.view(2, -1, H))
    torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True).step()
    with pytest.raises(RuntimeError, match="call update_lora_weights after optimizer.step"):
        layer(*leaves(batch))


def test_the_integration_of_forks_is_refused_by_name():
    """Its imports fail with what to do instead."""
    with pytest.raises(ImportError, match=r"for the forks transformers-kt .*\.wrap_experts"):
        from kt_kernel.sft import wrap_moe_layers_with_kt_wrapper  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from kt_kernel.sft import nothing  # noqa: F401


def test_frozen_experts():
    """SkipLoRA has LoRA weights of rank 1 that are never trained."""
    batch, lora = Batch(4), lora_tensors(rank=1)
    for name in lora:
        if name.endswith("_b"):
            lora[name].zero_()
    layer = _Layer("AMXINT8_SFT_SkipLoRA", 1, 1.0, lora)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    hidden, ids, scores = leaves(batch)
    layer(hidden, ids, scores).backward(batch.grad.view(2, -1, H))
    wanted = expected(layer.wrapper, batch, lora)
    assert error(hidden.grad.view(-1, H), wanted.x) < 0.03
    assert all(p.grad is None for p in layer.parameters())


def test_evaluation_keeps_nothing():
    batch, layer = Batch(4), _Layer("AMXBF16_SFT", R, 8.0, lora_tensors()).eval()
    for _ in range(5):
        layer(*leaves(batch))
    assert layer.wrapper.pending == 0
