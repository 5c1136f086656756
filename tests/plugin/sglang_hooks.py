"""Runs inside the SGLang environment, without an engine: what a run on the CPU does not show.

Prints OK at the end; an assertion names what is wrong.
"""

import functools
import inspect
import logging
import os
import pickle
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.utils import resolve_shared_experts_config
from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_exec, get_server_args, publish
from sglang.srt.server_args import ServerArgs

import kt_kernel
from kt_kernel.layer import HybridModel
from kt_kernel.options import KTOptions, OptionError
from kt_kernel.plugin_entrypoints import sglang, sglang_layer, sglang_padding

DEMO_MODEL = str(Path(kt_kernel.__file__).parent / "demo_model")
DEMO_EXPERTS = 16
BASE = ("--model-path", DEMO_MODEL, "--device", "cpu")


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
                submit=lambda x, ids, weights, **given: (ids, weights),
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


def check_shared_experts_stay_apart() -> None:
    """With cold experts SGLang does not fuse shared experts into the routed ones, and our log says
    so once: in the worker's copy of the arguments, however options and arguments were given, and in
    a process that reads the arguments before any check. Else it is left as given."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("sglang.kt").addHandler(handler)
    logging.getLogger("sglang.kt").setLevel(logging.INFO)

    def arguments(flags: tuple[str, ...]) -> ServerArgs:
        parser = ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return ServerArgs.from_cli_args(parser.parse_args([*BASE, *flags]))

    def outcome(server_args: ServerArgs) -> tuple[bool, int]:
        """Whether the worker's model may fuse, and how many lines were logged about it."""
        lines.clear()
        server_args.resolve_once()
        server_args.check_server_args()
        publish(pickle.loads(pickle.dumps(server_args)), role="scheduler")
        assert sglang.checked_options_of(get_server_args()) == sglang.options_of(server_args)
        return may_fuse(), sum("--disable-shared-experts-fusion is set" in line for line in lines)

    def may_fuse() -> bool:
        config = resolve_shared_experts_config(Fusing, None, None)
        assert config.fusion_disabled == get_exec().moe.disable_shared_experts_fusion
        return config.num_fused_shared_experts == 1

    off = "--disable-shared-experts-fusion"
    for hot, flags, expected in (
        (None, (), (True, 0)),
        (None, (off,), (False, 0)),
        (3, (), (False, 1)),
        (3, (off,), (False, 0)),
        (DEMO_EXPERTS, (), (True, 0)),
        (DEMO_EXPERTS, (off,), (False, 0)),
        (DEMO_EXPERTS, ("--enforce-shared-experts-fusion",), (True, 0)),
    ):
        given = () if hot is None else ("--kt-num-gpu-experts", str(hot))
        assert outcome(arguments((*given, *flags))) == expected, (hot, flags)
        fields = {} if hot is None else {"kt_num_gpu_experts": hot}
        fields |= {flag[2:].replace("-", "_"): True for flag in flags}
        assert outcome(ServerArgs(DEMO_MODEL, device="cpu", **fields)) == expected, fields
        if hot is not None:
            os.environ["KT_CONFIG"] = f'{{"num_gpu_experts": {hot}}}'
            assert outcome(arguments(flags)) == expected, (hot, flags)
            del os.environ["KT_CONFIG"]

    unchecked = arguments(("--kt-num-gpu-experts", "3"))
    unchecked.resolve_once()
    publish(unchecked, role="scheduler")
    assert may_fuse()
    sglang.checked_options_of(get_server_args())
    assert not may_fuse()

    enforced = arguments(("--kt-num-gpu-experts", "3", "--enforce-shared-experts-fusion"))
    enforced.resolve_once()
    line = error_of(sglang.checked_options_of, enforced)
    assert line.startswith("--enforce-shared-experts-fusion: a shared expert among"), line


class Fusing:
    """A model class that always fuses its shared expert if it may."""

    @staticmethod
    def shared_experts_fusion_disable_reason(hf_config: Any, quant_config: Any) -> None:
        return None

    @staticmethod
    def num_fusable_shared_experts(hf_config: Any) -> int:
        return 1


def check_hot_routes_are_int32() -> None:
    """SGLang's kernels for GPUs that skip routes take nothing else; Phi-MoE's routing is int64."""
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    given: list[Any] = []

    def apply(layer: Any, dispatch_output: Any) -> Any:
        given.append(dispatch_output)
        return SimpleNamespace(hidden_states=dispatch_output.hidden_states)

    method = object.__new__(sglang_layer.KTEPWrapperMethod)
    method.gpu_method = SimpleNamespace(apply=apply)
    x, slots, weights = torch.ones(2, 4), torch.tensor([[0, -1], [1, 0]]), torch.rand(2, 2)
    for dtype in (torch.int64, torch.int32):
        routes = StandardTopKOutput(weights, slots.to(dtype), None)
        output = StandardDispatchOutput(x, None, routes)
        assert method._hot_on_device(None, output, routes) is x
        passed = given.pop().topk_output
        assert passed.topk_ids.dtype == torch.int32 and torch.equal(passed.topk_ids.long(), slots)
        assert passed.topk_weights is weights


def check_all_hot_may_fuse() -> None:
    """With no expert cold SGLang's method gets the fused experts, and its own loader, as they are;
    with some it is refused."""
    made: dict[str, Any] = {}
    layer = SimpleNamespace(
        num_fused_shared_experts=1, top_k=3, moe_tp_size=1, moe_tp_rank=0, moe_ep_size=1,
        moe_runner_config=SimpleNamespace(
            activation="silu", is_gated=True, apply_router_weight_on_input=False, no_combine=False,
            swiglu_limit=None, gemm1_clamp_limit=None, gemm1_alpha=None,
        ),
    )  # fmt: skip

    def create(hot: int) -> sglang_layer.KTEPWrapperMethod:
        method = object.__new__(sglang_layer.KTEPWrapperMethod)
        method.gpu_method = SimpleNamespace(create_weights=lambda **given: made.update(given))
        method.config = sglang_layer.LayerConfig(
            HybridModel(KTOptions.from_mapping({"num_gpu_experts": hot})), {}, 0, 16, 2
        )
        method.create_weights(layer, 9, 64, 32, torch.float32, weight_loader=create)
        return method

    method = create(8)
    assert (
        method.num_gpu_experts == -1 and method.hybrid.num_hot == 8 and not method.hybrid.num_cold
    )
    assert made["num_experts"] == 9 and made["weight_loader"] is create, made
    try:
        create(3)
        raise AssertionError("a fused shared expert was accepted")
    except ValueError as error:
        assert "layer 0: fusing shared experts" in str(error)


def check_padding() -> None:
    """Masks are made while graphs are captured, all padding then, and filled with each batch."""
    masks = sglang_padding.masks
    registry = CudaGraphBufferRegistry(device=torch.device("cpu"), max_bs=8, max_num_tokens=8)
    kept: dict[int, torch.Tensor] = {}

    def fill(tokens: int, rows: int) -> list[list[int]]:
        """Numbers of the rows that the masks of 8, 4 and 2 then call padding."""
        registry.fill_from(
            SimpleNamespace(), raw_bs=tokens, padded_bs=rows,
            raw_num_tokens=tokens, padded_num_tokens=rows,
        )  # fmt: skip
        return padding()

    def padding() -> list[list[int]]:
        return [kept[rows].nonzero().flatten().tolist() for rows in (8, 4, 2)]

    def capture(runner: Any) -> str:
        for rows in (8, 4, 2):
            x = torch.empty(rows, 16)
            mask = masks.of(x)
            assert mask.dtype == torch.bool and mask.shape == (rows,) and mask.all()
            assert kept.setdefault(rows, mask) is mask
            sglang_padding._in_graph = lambda x: True
            assert masks.of(x) is mask  # the graph's address is that of all replays
            assert masks.of(torch.empty(7, 16)) is None
            sglang_padding._in_graph = in_graph
        return "captured"

    in_graph = sglang_padding._in_graph
    assert sglang_padding._fills()
    assert masks.of(torch.empty(4, 16)) is None  # outside of captures
    for runner in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):
        assert runner.capture.__wrapped__.__name__ == "capture"  # hooked
        assert sglang_padding._around_capture(capture, runner) == "captured"
        assert masks.of(torch.empty(8, 16)) is None and padding() == [
            [*range(8)],
            [*range(4)],
            [0, 1],
        ]
        assert fill(5, 8) == [[5, 6, 7], [], []]
        assert fill(5, 8) == [[5, 6, 7], [], []]
        assert fill(6, 8) == [[6, 7], [], []]
        assert fill(3, 4) == [[], [3], []]
        assert fill(4, 4) == [[], [], []]
        assert fill(3, 3) == [[], [], []]
        assert fill(3, 4) == [[], [3], []]
        assert fill(11, 16) == [[], [], []]  # of a graph whose layers see other rows
    assert fill(5, 8) == [[5, 6, 7], [], []]
    sglang_padding._around_capture(capture, None)  # again, beside a batch's mask
    assert padding() == [[*range(8)], [*range(4)], [0, 1]]
    assert fill(5, 8) == [[5, 6, 7], [], []]
    assert sglang_padding._around_capture(lambda runner, more: more, None, more=7) == 7
    assert padding() == [[], [], []] and fill(5, 8) == [[5, 6, 7], [], []]

    def failing(runner: Any) -> None:
        raise RuntimeError("no memory")

    try:
        sglang_padding._around_capture(failing, None)
        raise AssertionError("the error was lost")
    except RuntimeError:
        assert masks.of(torch.empty(8, 16)) is None
    for runner in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):  # before each replay
        assert "buffer_registry.fill_from(" in inspect.getsource(runner.load_batch)


def check_no_mask_that_nobody_fills() -> None:
    def others(registry: Any, numbers: tuple[int, int]) -> None:
        """Of a version that says it another way."""

    hooked = CudaGraphBufferRegistry.fill_from
    renamed = functools.partial(sglang_padding._around_fill_from, others)
    functools.update_wrapper(renamed, others)
    for function in (hooked.__wrapped__, renamed):
        masks = sglang_padding.Masks()
        CudaGraphBufferRegistry.fill_from = function
        assert not sglang_padding._fills()
        with masks.dummies():
            assert masks.of(torch.empty(4, 16)) is None and not masks.used
    CudaGraphBufferRegistry.fill_from = hooked
    kept, sglang_padding.masks = sglang_padding.masks, sglang_padding.Masks()
    renamed(None, (3, 4))  # stock SGLang of such a version is served
    sglang_padding.masks = kept


if __name__ == "__main__":
    load_plugins()
    check_padding()
    check_no_mask_that_nobody_fills()
    check_hot_routes_are_int32()
    check_failed_hooks_are_noticed()
    check_compiled_graphs_are_refused()
    check_shared_experts_stay_apart()
    check_all_hot_may_fuse()
    check_scaling_is_applied_once()
    print("OK")
