"""Hot experts that vLLM's loader does not deliver, without an engine; see vllm_hooks.py.

vLLM's own check of what was loaded leaves out every module with a quantisation method, and so all
expert layers.
"""

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# First, because vLLM's modules import each other in a circle.
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

# isort: split
from kt_kernel.plugin_entrypoints.vllm import layer as hybrid
from kt_kernel.serving.hot_delivery import HotDelivery
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.options import KTOptions

EXPERTS, HIDDEN, INTER = 3, 64, 32
SHARDS = {"w1": ("gate", "w13"), "w3": ("up", "w13"), "w2": ("down", "w2")}
SHAPES = {"w13": (2 * INTER, HIDDEN), "w2": (HIDDEN, INTER)}


def make(hot: int, **given: Any) -> tuple[Any, list[str]]:
    """A layer as a worker builds it, and the names of what vLLM has to fill: weights and biases."""
    layer = object.__new__(hybrid.HybridExperts)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.kt_computes, layer.kt_on_input = "layers.4", {}, False
    layer.kt_layer = HybridLayer(
        KTOptions(method="BF16", num_gpu_experts=hot, cpuinfer=1, **given),
        layer_idx=4,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
    )
    layer.kt_layer.finish_loading = iter(()).__next__
    layer.kt_delivery = HotDelivery("layer 4", "vLLM", layer.kt_layer.activation.matrices)
    names = []
    for stem, shape in SHAPES.items():
        for name, size in ((f"{stem}_weight", shape), (f"{stem}_bias", shape[:1])):
            parameter = torch.nn.Parameter(torch.zeros(hot, *size), requires_grad=False)
            parameter.weight_loader = layer.weight_loader
            layer.register_parameter(name, parameter)
            names.append(name)
    layer.register_parameter("w13_weight_scale", torch.nn.Parameter(torch.ones(hot)))  # vLLM's own
    layer.moe_config, layer.quant_method = None, SimpleNamespace(process_weights_after_loading=None)
    layer._hook_end_of_loading(torch.float32, None)
    return layer, names


def error_of(layer: Any) -> str:
    try:
        layer.quant_method.process_weights_after_loading(layer)
    except ValueError as error:
        return str(error)
    except StopIteration:  # of finish_loading
        return ""
    raise AssertionError("finish_loading was not called")


def check_hot_experts_are_delivered() -> None:
    """Each part of each hot expert, in both ways in which vLLM's loaders pass them."""
    taken: list[Any] = []

    def load(layer: Any, param: Any, weight: Any, name: str, shard: str, *given: Any) -> bool:
        taken.append(name)
        return name != "unknown"

    with (
        patch.object(RoutedExperts, "weight_loader", load),
        patch.object(hybrid, "_check", lambda *given: None),
        patch.object(hybrid, "_computes", lambda *given: {}),
    ):
        for hot in (2, EXPERTS):
            layer, names = make(hot)
            parts = [(e, n, s) for e in range(hot) for n in names for s in SHARDS]
            for expert, name, shard in parts:
                which, stem = SHARDS[shard]
                if not name.startswith(f"{stem}_"):
                    continue
                said = error_of(layer)
                begin = rf"layer 4: vLLM did not load weights of hot experts: {expert}\b"
                assert re.match(begin, said) and f"{which} of {name}" in said, said
                param, matrix = layer.get_parameter(name), torch.zeros(2, 2)
                given = param, matrix, "unknown", shard, expert
                assert layer.weight_loader(*given, return_success=True) is False
                assert error_of(layer) == said
                assert layer.weight_loader(param, matrix, "weight", shard, expert) is None
            assert error_of(layer) == ""
        # Stacks of all experts, as Llama-4's loader passes them; biases one by one.
        layer, names = make(EXPERTS)
        for shard, (_, stem) in SHARDS.items():
            assert " of w" in error_of(layer)
            param = layer.get_parameter(f"{stem}_weight")
            layer.weight_loader(param, torch.zeros(EXPERTS, 2, 2), "weight", shard, 0)
            for expert in range(EXPERTS):
                bias = layer.get_parameter(f"{stem}_bias")
                layer.weight_loader(bias, torch.zeros(2), "bias", shard, expert)
        assert error_of(layer) == ""
    assert taken
