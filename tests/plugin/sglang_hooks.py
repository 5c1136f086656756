"""Runs inside the SGLang environment, without an engine: what a run on the CPU does not show.

Prints OK at the end; an assertion names what is wrong.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.plugins import load_plugins

from kt_kernel.options import KTOptions, OptionError
from kt_kernel.plugin_entrypoints import sglang, sglang_layer


def error_of(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except OptionError as error:
        return str(error)
    return ""


def check_failed_hooks_are_noticed() -> None:
    sglang_layer.verify_hooks()
    for module in (sglang_layer.kt_ep_wrapper, sglang_layer.fused_moe):
        create = module.create_kt_config_from_server_args
        for name, original in (
            ("KTEPWrapperMethod", sglang_layer.KTEPWrapperMethod.__base__),
            ("create_kt_config_from_server_args", create.__wrapped__),
        ):
            ours = getattr(module, name)
            setattr(module, name, original)
            assert f"{module.__name__}.{name} is not in effect" in error_of(
                sglang_layer.verify_hooks
            )
            setattr(module, name, ours)
    server_args = SimpleNamespace(_kt_options={"method": "BF16"})
    try:  # outside _initialize_model
        sglang_layer.kt_ep_wrapper.create_kt_config_from_server_args(server_args, 0)
        raise AssertionError("a layer without a model was accepted")
    except RuntimeError as error:
        assert "built outside SGLang's _initialize_model" in str(error)


def check_compiled_graphs_are_refused() -> None:
    hf_config = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"], num_experts=8)

    def refusal(decode: str, prefill: str, hot: int) -> str:
        graphs = SimpleNamespace(
            decode=SimpleNamespace(backend=decode), prefill=SimpleNamespace(backend=prefill)
        )
        arguments = SimpleNamespace(device="cuda", cuda_graph_config=graphs)
        options = KTOptions.from_mapping({"num_gpu_experts": hot})
        return error_of(sglang.refuse_unsupported, arguments, hf_config, options)

    for accepted in ("full", "breakable", "disabled"):
        assert refusal(accepted, accepted, 3) == ""
        for phase, (decode, prefill) in {
            "decode": ("tc_piecewise", accepted), "prefill": (accepted, "tc_piecewise")
        }.items():  # fmt: skip
            refused = refusal(decode, prefill, 3)
            assert refused.startswith(f"--cuda-graph-backend-{phase} tc_piecewise: "), refused
    assert refusal("full", "tc_piecewise", 8) == ""  # nothing is cold


def check_scaling_is_applied_once() -> None:
    """On CUDA: by our layer where it has cold experts, by SGLang's kernel where it has none; never
    by the model, whichever way it takes through its layer."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.models import deepseek_v2, glm4_moe, glm4_moe_lite, qwen3_moe

    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.current_stream, torch.cuda.stream = (lambda: stream), (lambda s: nullcontext())
    sglang_layer.is_cpu = lambda: False
    routes = StandardTopKOutput(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), None)
    x = torch.ones(2, 4)
    for module, name in (
        (qwen3_moe, "Qwen3MoeSparseMoeBlock"),
        (deepseek_v2, "DeepseekV2MoE"),
        (glm4_moe, "Glm4MoeSparseMoeBlock"),
        (glm4_moe_lite, "Glm4MoeLiteSparseMoeBlock"),
    ):
        for cold in (1, 0):
            method = object.__new__(sglang_layer.KTEPWrapperMethod)
            method.scaling = 1.0
            method.moe_runner_config = SimpleNamespace(routed_scaling_factor=2.5)
            method.gpu_method = SimpleNamespace(  # a kernel that multiplies
                apply=lambda layer, dispatch_output: SimpleNamespace(hidden_states=2.5 * x)
            )
            method.hybrid = SimpleNamespace(
                num_hot=0,
                num_cold=cold,
                submit=lambda x, ids, weights, cold_slot: (ids, weights),
                collect=lambda x, hot, scale: x * scale,
            )
            block = getattr(module, name)
            method.settle_scaling(object.__new__(block))
            dispatched = SimpleNamespace(hidden_states=x, topk_output=routes)
            total = method.apply(None, dispatched).hidden_states
            assert torch.equal(total, 2.5 * x), (block, cold, total)
            seen = getattr(module, "KTEPWrapperMethod", None)
            assert seen is None or not isinstance(method, seen), block
            if module not in (glm4_moe, glm4_moe_lite):
                continue

            def experts(hidden_states: Any, topk_output: Any, total: Any = total) -> torch.Tensor:
                return total.clone()

            experts.quant_method = method
            layer = object.__new__(block)
            torch.nn.Module.__init__(layer)
            layer.experts, layer.alt_stream, layer.routed_scaling_factor = experts, stream, 2.5
            layer.gate = layer.topk = lambda *given: routes
            layer.tp_size, layer._forward_shared_experts = 1, lambda x: 7.0 * x
            module._is_cuda, module.is_allocation_symmetric = True, lambda: False
            module.get_parallel = lambda: SimpleNamespace(tp_group=None)
            for forward in (layer.forward_normal, layer.forward_normal_dual_stream):
                assert torch.equal(forward(x), 9.5 * x), (forward, cold)


if __name__ == "__main__":
    load_plugins()
    check_failed_hooks_are_noticed()
    check_compiled_graphs_are_refused()
    check_scaling_is_applied_once()
    print("OK")
