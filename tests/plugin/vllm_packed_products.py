"""Runs in vLLM's environment with a GPU: packed hot experts by the plugin's method.

    vllm_packed_products.py RESULT.json

RESULT: {"errors": {case: the largest relative error of a row against float64}, "microseconds":
{"packed" and "bfloat16": {model: {tokens: of one call}}}}. The bfloat16 experts take as much memory
as the packed ones, so there are fewer of them, and fewer hot routes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from kt_kernel.device.streaming.streamer import Group
from kt_kernel.plugin_entrypoints.vllm.hot import PackedHotMethod
from kt_kernel.plugin_entrypoints.vllm.routes import products
from kt_kernel.serving.activations import SILU
from kt_kernel.serving.hot_packed import GroupedHot, PackedHot, RowHot
from kt_kernel.serving.hot_weights import HotShape
from kt_kernel.testing import quantise, values_of
from kt_kernel.weights.expert_tensors import matrix_shapes
from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO, INT8_ROW, WeightForm, WeightFormat

K = 4  # routes of a token
GPU, BF16 = torch.device("cuda"), torch.bfloat16
SMALL, QWEN3_30B, DEEPSEEK_V3 = (
    HotShape(8, 512, 256),
    HotShape(4, 2048, 768),
    HotShape(2, 7168, 2048),
)
FORMATS = [(INT4_GROUP, 32), (INT4_GROUP, 128), (INT4_ZERO, 32), (INT4_ZERO, 128), (INT8_ROW, 0)]
CASES = [(form, SMALL, tokens) for form in FORMATS for tokens in (1, 5, 64, 300)]
CASES += [(form, QWEN3_30B, tokens) for form in (FORMATS[0], FORMATS[-1]) for tokens in (1, 2, 64)]
CASES += [(FORMATS[0], DEEPSEEK_V3, 1)]
TIMED = {"qwen3-30b-a3b": (128, 113, 32, 2048, 768), "deepseek-v3": (256, 230, 64, 7168, 2048)}


def method(hot: PackedHot) -> Any:
    """The plugin's method with these experts, without a layer of vLLM."""
    made: Any = object.__new__(PackedHotMethod)
    made._hot = hot
    made.process_weights_after_loading(None)
    return made


def packed_sum(
    made: Any, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    layer = SimpleNamespace(activation=MoEActivation.SILU)
    ids = slots.masked_fill(slots < 0, made.cold.prepare(len(x)))
    return made.apply(layer, x, weights, ids)


def routes(tokens: int, experts: int, hot: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, -1 for cold experts, and weights."""
    slots = torch.rand(tokens, experts, device=GPU).topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, device=GPU)
    cold = slots >= hot
    return slots.masked_fill(cold, -1), weights.masked_fill(cold, 0)


def error(format: WeightFormat, group: int, shape: HotShape, tokens: int) -> float:
    torch.manual_seed(tokens)
    form = WeightForm(format, group, scale_type=1 if group else 0)
    hot: PackedHot = RowHot("layer 0", shape, GPU)
    if group:
        hot = GroupedHot("layer 0", shape, group, format == INT4_ZERO, BF16, GPU)
    exact = []
    for slot in range(shape.slots):
        values = {}
        for name, size in matrix_shapes(shape.hidden, shape.inter).items():
            matrix = quantise(torch.randn(size) * size[1] ** -0.5, form)
            hot.put(slot, name, matrix)
            values[name] = values_of(matrix).to(GPU)
        exact.append(values)
    x = torch.randn(tokens, shape.hidden, device=GPU, dtype=BF16)
    slots, weights = routes(tokens, shape.slots + 3, shape.slots, K)  # three cold experts
    wanted = torch.zeros(tokens, shape.hidden, device=GPU, dtype=torch.float64)
    for slot, values in enumerate(exact):
        rows = x.double()
        h = torch.nn.functional.silu(rows @ values["gate"].T) * (rows @ values["up"].T)
        share = (weights.double() * (slots == slot)).sum(1, keepdim=True)
        wanted += share * (h @ values["down"].T)
    found = packed_sum(method(hot), x, slots, weights).double()
    norm = wanted.norm(dim=1)
    assert not found[norm == 0].any(), "a row without a hot route is not zero"
    return float(((found - wanted).norm(dim=1) / norm.clamp_min(1e-9)).max())


def microseconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 20)
    return sorted(times)[2]


def timed(
    experts: int, packed: int, dense: int, hidden: int, inter: int
) -> dict[str, dict[int, float]]:
    """Of a layer with so many experts, of which ``packed`` are hot in 4 bits, or ``dense`` in
    bfloat16."""
    hot = GroupedHot("layer 0", HotShape(packed, hidden, inter), 32, False, BF16, GPU)
    hot.w13.random_(0, 256)
    hot.w2.random_(0, 256)
    hot.s13.fill_(2**-9)
    hot.s2.fill_(2**-9)
    made = method(hot)
    w13 = torch.randn(dense, 2 * inter, hidden, device=GPU, dtype=BF16) * 0.02
    w2 = torch.randn(dense, hidden, inter, device=GPU, dtype=BF16) * 0.02
    group = Group(range(dense), w13, w2)
    found: dict[str, dict[int, float]] = {"packed": {}, "bfloat16": {}}
    for tokens in (1, 4, 16, 256):
        x = torch.randn(tokens, hidden, device=GPU, dtype=BF16)
        slots, weights = routes(tokens, experts, packed, 8)
        found["packed"][tokens] = microseconds(lambda: packed_sum(made, x, slots, weights))  # noqa: B023
        few, shares = routes(tokens, experts, dense, 8)
        found["bfloat16"][tokens] = microseconds(
            lambda: products(x, few, shares, group, SILU)  # noqa: B023
        )
    return found


def main() -> None:
    torch.set_grad_enabled(False)
    errors = {
        f"{form.name} {group}, {shape.hidden} x {shape.inter}, {tokens} tokens": error(
            form, group, shape, tokens
        )
        for (form, group), shape, tokens in CASES
    }
    result: dict[str, Any] = {"errors": errors, "microseconds": {}}
    for model in (None, *TIMED):
        if model is not None:
            result["microseconds"][model] = timed(*TIMED[model])
        with open(sys.argv[1], "w") as file:
            json.dump(result, file, indent=1)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
