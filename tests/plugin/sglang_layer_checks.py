"""Parts of sglang_hooks.py: the layer and its padding, without an engine."""

import copy
import dataclasses
import inspect
import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import PackedTopKOutput, StandardTopKOutput
from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.runtime_context import get_server_args

from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.moe.placement import Placement
from kt_kernel.plugin_entrypoints.sglang import hot as kt_hot
from kt_kernel.plugin_entrypoints.sglang import layer as kt_layer
from kt_kernel.plugin_entrypoints.sglang import padding as kt_padding
from kt_kernel.plugin_entrypoints.sglang import transformers_models as kt_transformers
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import moe_reference, row_error


def check_scaling_is_applied_once() -> None:
    """On CUDA, the scaling is applied by kt-moe's layer if it has cold experts, by SGLang's kernel
    if it has none, and never by the model, on either code path through its layer."""
    from sglang.srt.models import deepseek_v2, glm4_moe, glm4_moe_lite, qwen3_moe

    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.current_stream, torch.cuda.stream = (lambda: stream), (lambda s: nullcontext())
    kt_layer.is_cpu = lambda: False
    routes = StandardTopKOutput(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), None)
    x = torch.ones(2, 4)
    for module, name in (
        (qwen3_moe, "Qwen3MoeSparseMoeBlock"),
        (deepseek_v2, "DeepseekV2MoE"),
        (glm4_moe, "Glm4MoeSparseMoeBlock"),
        (glm4_moe_lite, "Glm4MoeLiteSparseMoeBlock"),
    ):
        for cold in (1, 0):
            method = object.__new__(kt_layer.KTEPWrapperMethod)
            method.config = SimpleNamespace(model=SimpleNamespace(draft=False))
            method.scaling = 1.0
            method.moe_runner_config = SimpleNamespace(routed_scaling_factor=2.5)
            method.gpu_method = SimpleNamespace(  # a kernel that multiplies
                apply=lambda layer, dispatch_output: SimpleNamespace(hidden_states=2.5 * x)
            )
            method.hybrid = SimpleNamespace(
                placement=Placement.first(1, 1 - cold),
                recorded=False,
                submit=lambda x, ids, weights, **given: (ids, weights),
                collect=lambda x, hot, scale: x * scale,
            )
            block = getattr(module, name)
            method.settle_scaling(object.__new__(block))
            dispatched = StandardDispatchOutput(x, None, routes)
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


def check_hot_routes_are_int32() -> None:
    """SGLang's GPU kernels that skip routes accept nothing else; Phi-MoE's routing is int64."""
    given: list[Any] = []

    def apply(layer: Any, dispatch_output: Any) -> Any:
        given.append(dispatch_output)
        return SimpleNamespace(hidden_states=dispatch_output.hidden_states)

    method = object.__new__(kt_layer.KTEPWrapperMethod)
    method.gpu_method = SimpleNamespace(apply=apply)
    x, slots, weights = torch.ones(2, 4), torch.tensor([[0, -1], [1, 0]]), torch.rand(2, 2)
    for dtype in (torch.int64, torch.int32):
        routes = StandardTopKOutput(weights, slots.to(dtype), None)
        output = StandardDispatchOutput(x, None, routes)
        assert method._hot_on_device(None, output, routes) is x
        passed = given.pop().topk_output
        assert passed.topk_ids.dtype == torch.int32 and torch.equal(passed.topk_ids.long(), slots)
        assert passed.topk_weights is weights


def check_packed_routes() -> None:
    """Inkling's router on a GPU packs a number and a weight in bfloat16 into 32 bits, which
    SGLang's kernels for hot experts do not take either."""
    ids, weights = torch.tensor([[0, 255], [7, 1]]), torch.rand(2, 2).bfloat16()
    packed = ids.int() << 16 | weights.view(torch.int16).int()
    output = StandardDispatchOutput(torch.ones(2, 4), None, PackedTopKOutput(packed, None))
    method, given = object.__new__(kt_layer.KTEPWrapperMethod), []
    method.config = SimpleNamespace(model=SimpleNamespace(draft=True))
    method.gpu_method = SimpleNamespace(
        apply=lambda layer, dispatch_output: given.append(dispatch_output.topk_output[:2])
    )
    for cold in (0, 1):
        method.hybrid = SimpleNamespace(
            placement=Placement.first(1, 1 - cold),
            recorded=False,
            submit=lambda x, ids, weights, **more: given.append((weights, ids)) or (ids, weights),
            collect=lambda x, hot, scale: x,
        )
        method.scaling = 1.0
        method.apply(None, output)
    assert len(given) == 2
    for found in given:
        assert torch.equal(found[0], weights.float()) and torch.equal(found[1].long(), ids)


def check_what_a_layer_may_be() -> None:
    """With no cold expert, SGLang's method gets fused experts. With cold experts these are refused,
    as is everything else that the CPU would not compute."""
    made: dict[str, Any] = {}

    def create(
        hot: int, extra: Any = None, given: Any = None, **changed: Any
    ) -> kt_layer.KTEPWrapperMethod:
        layer = object.__new__(FusedMoE)
        torch.nn.Module.__init__(layer)
        layer.top_k, layer.num_fused_shared_experts = 3, 1
        layer.moe_tp_size, layer.moe_tp_rank, layer.moe_ep_size = 1, 0, 1
        layer.moe_runner_config = MoeRunnerConfig(layer_id=0, num_experts=9)
        for name, value in changed.items():
            owners = [each for each in (layer, layer.moe_runner_config) if hasattr(each, name)]
            assert owners, name
            for owner in owners:
                setattr(owner, name, value)
        method = object.__new__(kt_layer.KTEPWrapperMethod)
        method.gpu_method = SimpleNamespace(create_weights=lambda **given: made.update(given))
        method.config = kt_layer.LayerConfig(
            HybridModel(KTOptions(method="BF16", num_gpu_experts=hot, **given or {})), {}, 0, 16, 2
        )
        method.create_weights(layer, 9, 64, 32, torch.float32, weight_loader=None, **extra or {})
        return method

    def refusal(*args: Any, **changed: Any) -> str:
        try:
            create(*args, **changed)
        except ValueError as error:
            return str(error)
        return ""

    method = create(8)
    assert method.num_gpu_experts == -1
    assert method.hybrid.placement == Placement.first(8, 8)
    assert made["num_experts"] == 9, made
    assert "layer 0: fusing shared experts" in refusal(3)
    read, packed = {"hot_format": "bf16", "weight_path": "/model"}, {"hot_format": "packed"}
    for form in (read, packed):
        assert "layer 0: fusing shared experts" in refusal(8, given=form)
    apart = {"num_fused_shared_experts": 0, "activation": "gelu"}
    assert refusal(9, given=read, **apart).endswith("; accepted: --kt-num-gpu-experts 0")
    assert refusal(9, given=packed, **apart).endswith(
        "; accepted: --kt-hot-format engine or --kt-num-gpu-experts 0"
    )
    assert "layer 0: expert parallelism is not supported" in refusal(8, moe_ep_size=2)
    for name, value, what in (
        ("activation", "silu_rounded", "activation 'silu_rounded'"),
        ("gemm1_beta", 1.0, "a SwiGLU alpha of None with a beta of 1.0"),
        ("silu_mul_keep_fp32", True, "a float32 activation"),
        ("no_combine_keep_router_weight", True, "one result per expert"),
    ):
        expected = f"layer 0: {what} is not supported with kt options"
        assert refusal(8, **{name: value}).startswith(expected), name
    assert refusal(8, swiglu_limit=10.0) == refusal(8, gemm1_alpha=1.702) == ""
    # On the CPU, hot experts would have SiLU instead, except those of gpt-oss.
    gpt_oss = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    assert refusal(3, num_fused_shared_experts=0, **gpt_oss) == ""
    for given in (
        {"swiglu_limit": 10.0},
        {"gemm1_clamp_limit": 7.0},
        {"gemm1_alpha": 1.702},
        gpt_oss | {"gate_up_interleaved": False},
    ):
        given |= {"num_fused_shared_experts": 0}
        error = refusal(3, **given)
        assert error.startswith("layer 0: activation='s"), error
        assert error.endswith("without these numbers; accepted: --kt-num-gpu-experts 0"), error
        assert refusal(0, **given) == ""
    relu2 = {"activation": "relu2", "is_gated": False, "num_fused_shared_experts": 0}
    assert refusal(3, **relu2).startswith("layer 0: activation='relu2', gated=False: SGLang's")
    assert refusal(0, **relu2) == refusal(9, **relu2) == ""
    on_input = {"apply_router_weight_on_input": True}
    for given, expected in (
        ({"activation": "gelu"} | on_input, ExpertActivation("gelu", True, True)),
        ({"activation": "relu2", "is_gated": False}, ExpertActivation("relu2", False)),
        # After SiLU, as SGLang's kernel has it.
        ({"gemm1_clamp_limit": 7.0}, ExpertActivation("swiglustep", swiglu_limit=7.0)),
        (
            {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 25.0},
            ExpertActivation("situ", situ_beta=3.0, situ_linear_beta=25.0),
        ),
        ({"activation": "situ"}, ExpertActivation("situ", situ_beta=4.0)),
    ):
        assert create(8, **given).hybrid.activation == expected, given
    new = refusal(8, {"sparsity": 0.5})
    assert new.startswith("layer 0: KTEPWrapperMethod has sparsity=0.5, which kt-moe"), new
    # SGLang can keep the weights that it delivers, and has none that kt-moe reads.
    own = SimpleNamespace(layer_idx=0, options=SimpleNamespace(reads_hot=True))
    plain, gelu = MoeRunnerConfig(), MoeRunnerConfig(activation="gelu")
    gpt_oss = MoeRunnerConfig(gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    in_halves = dataclasses.replace(gpt_oss, gate_up_interleaved=False)
    for runner, has_bias, packed, expected in (
        (plain, False, False, True),
        (plain, False, True, True),
        (plain, True, False, False),
        (gpt_oss, True, False, True),
        (gpt_oss, False, False, True),
        (gpt_oss, True, True, False),
        (in_halves, True, False, False),
        (gelu, False, False, False),
    ):
        own.activation = kt_layer.requested_activation("layer 0", runner)
        for own.options.reads_hot, accepted in ((True, ""), (False, "--kt-hot-format engine or ")):
            try:
                kt_hot.refuse_activation(own, runner, has_bias, packed)
                assert expected, (runner, has_bias, packed)
            except ValueError as error:
                assert not expected, (runner, error)
                assert str(error).endswith(f"; accepted: {accepted}--kt-num-gpu-experts 0"), error


def check_other_experts() -> None:
    """Experts without a gate, and router weights on the input, through the layer: two experts by
    SGLang's method, which gets one row per route with its weight applied, and two on the CPU."""
    experts, hot, hidden, inter = 4, 2, 64, 32
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(torch.bfloat16).float() / 8

    every = {
        "gate": random(experts, inter, hidden),
        "up": random(experts, inter, hidden),
        "down": random(experts, hidden, inter),
    }
    x = random(9, hidden) * 8
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    for given, computes in (
        ({"activation": "relu2", "is_gated": False}, {"activation": "relu2"}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
        ({}, {}),
    ):
        gated = given.get("is_gated", True)
        matrices = [every["gate"] if gated else None, every["up"], every["down"]]
        own = [each if each is None else each[:hot] for each in matrices]
        loaded: list[tuple[str, int]] = []
        kept: dict[str, Any] = {}

        def apply(
            layer: Any,
            dispatch_output: Any,
            own: Any = own,
            function: str = given.get("activation", "silu"),
            kept: Any = kept,
        ) -> Any:
            routes = dispatch_output.topk_output
            assert routes.topk_ids.shape[1] == 1 and (routes.topk_weights == 1).all()
            assert not kept["runner"].apply_router_weight_on_input
            rows = dispatch_output.hidden_states
            given = rows, routes.topk_ids, routes.topk_weights, *own
            y = moe_reference(*given, rounded=False, activation=function)
            return SimpleNamespace(hidden_states=y.to(rows.dtype))

        layer = object.__new__(FusedMoE)
        torch.nn.Module.__init__(layer)
        layer.top_k, layer.num_fused_shared_experts = 2, 0
        layer.moe_tp_size, layer.moe_tp_rank, layer.moe_ep_size = 1, 0, 1
        layer.is_shared_fused_moe = False
        layer.moe_runner_config = MoeRunnerConfig(layer_id=0, num_experts=experts, **given)
        layer._weight_loader_impl = lambda loaded=loaded, **each: loaded.append(
            (each["shard_id"], each["expert_id"])
        )
        method = object.__new__(kt_layer.KTEPWrapperMethod)
        method.scaling = 1.0
        method.gpu_method = SimpleNamespace(
            create_weights=lambda kept=kept, **each: kept.update(each),
            create_moe_runner=lambda layer, config, kept=kept: kept.update(runner=config),
            apply=apply,
        )
        options = KTOptions(method="BF16", num_gpu_experts=hot, cpuinfer=1)
        method.config = kt_layer.LayerConfig(HybridModel(options), {}, 0, 16, 2)
        # SGLang's own method has no ReLU² on the CPU, where these tests run.
        with mock.patch.object(kt_layer, "refuse_on_cpu"):
            method.create_weights(layer, experts, hidden, inter, torch.float32, weight_loader=None)
        method.create_moe_runner(layer, layer.moe_runner_config)
        if not given:
            check_unchanged_activation(method, layer)
        shards = {"w1": "gate", "w3": "up", "w2": "down"} if gated else {"w1": "up", "w2": "down"}
        for expert in range(experts):
            for shard, name in shards.items():
                kept["weight_loader"](x, every[name][expert], "weight", shard, expert)
        method.hybrid.finish_loading()
        assert loaded == [(shard, expert) for expert in range(hot) for shard in shards]
        routes = StandardTopKOutput(weights, ids.to(torch.int32), None)
        found = method.apply(layer, StandardDispatchOutput(x, None, routes)).hidden_states
        want = moe_reference(x, ids, weights, *matrices, rounded=False, **computes)
        assert row_error(found.double(), want).max() < 5e-3, given


def check_activations_of_hot_experts_on_the_cpu() -> None:
    """Hot experts are refused exactly where SGLang's method for the CPU does not compute them as
    the CPU computes the cold ones."""
    hidden, inter = 64, 32
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / 8

    gate, up, down = random(1, inter, hidden), random(1, inter, hidden), random(1, hidden, inter)
    x, ids, weights = 8 * random(9, hidden), torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)
    accepted = []
    for name, gated in itertools.product(
        ("silu", "gelu", "gelu_tanh", "relu2", "situ"), (True, False)
    ):
        if not gated and name == "situ":  # which has a gate in every engine
            continue
        runner = MoeRunnerConfig(activation=name, is_gated=gated)
        computes = kt_layer.requested_activation("layer 0", runner)
        given = {"activation": computes.function, "situ_beta": computes.situ_beta}
        matrices = [gate if gated else None, up, down]
        want = moe_reference(x, ids.long(), weights, *matrices, rounded=False, **given)
        layer = SimpleNamespace(
            num_experts=1, w13_weight=torch.cat([gate, up], 1) if gated else up, w2_weight=down
        )
        try:
            rows = moe_forward_native(layer, x, StandardTopKOutput(weights, ids, None), runner)
            computed = row_error(rows.double(), want).max() < 1e-3
        except (ValueError, RuntimeError):  # no such activation; matrices of other shapes
            computed = False
        own = SimpleNamespace(layer_idx=0, activation=computes)
        try:
            kt_hot.refuse_on_cpu(own, runner)
            assert computed, runner
            accepted.append(name)
        except ValueError as error:
            assert not computed, (runner, error)
            assert str(error) == (
                f"layer 0: {computes}: SGLang's kernels for the CPU compute hot experts with silu, "
                "gelu, situ and a gate only; accepted: --kt-num-gpu-experts 0"
            ), error
    assert accepted == list(kt_hot.CPU_ACTIVATIONS)


def check_unchanged_activation(method: Any, layer: Any) -> None:
    """A model that sets a limit once the layer is built, like GigaChat 3.5, is refused: the cold
    experts are made, and would not have it."""
    method.check_unchanged(layer)
    runner, layer.moe_runner_config = layer.moe_runner_config, copy.copy(layer.moe_runner_config)
    layer.moe_runner_config.gemm1_clamp_limit = 0.5
    try:
        method.check_unchanged(layer)
    except ValueError as error:
        assert str(error).startswith("layer 0: the model changes the experts' activation"), error
    else:
        raise AssertionError("not refused")
    layer.moe_runner_config = runner


def check_what_models_ask() -> None:
    """Around a layer's construction, arguments that the layer does not keep are checked, too."""
    asked: list[int] = []
    methods: list[Any] = []

    def construct(
        self: Any,
        layer_id: int,
        with_bias: bool = False,
        new: float = 1.0,
        use_weight_loader_fused: bool = False,
        quant_method: Any = None,
    ) -> None:
        asked.append(layer_id)
        methods.append(quant_method)

    def refusal(**given: Any) -> str:
        try:
            kt_layer._around_fused_moe(construct, layer, 4, **given)
        except ValueError as error:
            return str(error)
        return ""

    layer = SimpleNamespace(is_shared_fused_moe=False)
    assert refusal() == refusal(with_bias=True) == "" and len(asked) == 2
    assert refusal(use_weight_loader_fused=True).startswith("layer 4: a stacked checkpoint")
    assert refusal(new=0.5).startswith("layer 4: FusedMoE has new=0.5, which kt-moe does not")
    assert len(asked) == 2
    # torch would keep a module, and refuse the wrapper in its place.
    module = torch.nn.Module()
    assert refusal(quant_method=module) == "" and not isinstance(methods[-1], torch.nn.Module)
    draft = SimpleNamespace(model=SimpleNamespace(draft=True), layer_idx=4)
    assert kt_layer.KTEPWrapperMethod(methods[-1], draft).gpu_method is module
    # Layers of shared experts, as Inkling has them, stay SGLang's own.
    made: list[Any] = []

    def build(
        self: Any, layer_id: int, num_experts: int, use_weight_loader_fused: bool = False
    ) -> None:
        made.append(kt_layer._create_kt_config(get_server_args(), layer_id))

    kt_layer._building.append((HybridModel(KTOptions(num_gpu_experts=0)), {}))
    for shared in (False, True):
        layer.is_shared_fused_moe = shared
        kt_layer._around_fused_moe(build, layer, 4, 8, use_weight_loader_fused=shared)
    kt_layer._building.pop()
    assert made[0].layer_idx == 4 and made[1] is None and not kt_layer._building


def check_models_of_transformers() -> None:
    """Experts have the numbers of the model's layers. SGLang counts those with experts alone."""
    numbers: list[int] = []

    def build(experts: Any, *, layer_id: int, prefix: str) -> None:
        numbers.append(layer_id)

    for prefix in ("model.layers.3.mlp.experts", "model.language_model.layers.11.experts"):
        kt_transformers._around_experts(build, None, layer_id=0, prefix=prefix)
    assert numbers == [3, 11]
    for prefix in ("model.experts", "model.stages.0.layers.3.experts"):
        try:
            kt_transformers._around_experts(build, None, layer_id=0, prefix=prefix)
        except ValueError as error:
            assert str(error).startswith(f"{prefix}: the number of its layer is not known")
        else:
            raise AssertionError(prefix)


def check_draft_models() -> None:
    """A draft model has its own options and layers. It may have no experts, and has no masks."""
    options = KTOptions(method="RAWINT4", weight_path="/model", num_gpu_experts=2)
    # A multimodal model has its language model's configuration under one of several names.
    whole, config = SimpleNamespace(), SimpleNamespace(num_experts=8)
    built: list[HybridModel] = []

    def build(model_config: Any) -> torch.nn.Module:
        built.append(kt_layer._building[-1][0])
        return torch.nn.Module()

    replaced = {
        "checked_options_of": lambda arguments: options,
        "get_server_args": lambda: None,
        "verify_hooks": lambda: None,
    }
    kept = {name: getattr(kt_layer, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(kt_layer, name, function)
        for draft, quantisation, hot in ((False, None, 2), (True, None, 2), (True, "awq", 8)):
            served = SimpleNamespace(
                hf_config=whole,
                hf_text_config=config,
                is_draft_model=draft,
                quantization=quantisation,
            )
            try:
                kt_layer._around_initialize_model(build, served)
            except OptionError as error:
                assert not draft and "has no FusedMoE layer of SGLang; add --model" in str(error)
            model = built.pop()
            assert model.draft is draft and model.placement_of(0, 8) == Placement.first(8, hot)
            assert model.options.weight_path == (None if draft else "/model")
            method = object.__new__(kt_layer.KTEPWrapperMethod)
            method.config = SimpleNamespace(model=model)
            with kt_padding.masks.dummies():
                kt_padding.masks._given = True
                assert (method._padding(torch.empty(4, 16)) is None) is draft
    finally:
        for name, function in kept.items():
            setattr(kt_layer, name, function)
        kt_padding.masks = kt_padding.Masks()


def check_padding() -> None:
    """Masks are made while graphs are captured, then all padding, and filled with each batch."""
    masks = kt_padding.masks
    registry = CudaGraphBufferRegistry(device=torch.device("cpu"), max_bs=8, max_num_tokens=8)
    kept: dict[int, torch.Tensor] = {}

    def fill(tokens: int, rows: int) -> list[list[int]]:
        """The rows that the masks of 8, 4 and 2 then mark as padding."""
        registry.fill_from(
            SimpleNamespace(),
            raw_bs=tokens,
            padded_bs=rows,
            raw_num_tokens=tokens,
            padded_num_tokens=rows,
        )
        return padding()

    def padding() -> list[list[int]]:
        return [kept[rows].nonzero().flatten().tolist() for rows in (8, 4, 2)]

    def capture(runner: Any) -> str:
        for rows in (8, 4, 2):
            x = torch.empty(rows, 16)
            mask = masks.of(x)
            assert mask.dtype == torch.bool and mask.shape == (rows,) and mask.all()
            assert kept.setdefault(rows, mask) is mask
            kt_padding._in_graph = lambda x: True
            assert masks.of(x) is mask  # the graph's address is the same in all replays
            assert masks.of(torch.empty(7, 16)) is None
            kt_padding._in_graph = in_graph
        return "captured"

    in_graph = kt_padding._in_graph
    assert kt_padding._fills()
    assert masks.of(torch.empty(4, 16)) is None  # outside captures
    for runner in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):
        assert runner.capture.__wrapped__.__name__ == "capture"  # hooked
        assert kt_padding._around_capture(capture, runner) == "captured"
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
        assert fill(11, 16) == [[], [], []]  # a graph whose layers see other rows
    assert fill(5, 8) == [[5, 6, 7], [], []]
    kt_padding._around_capture(capture, None)  # again, while there is a batch's mask
    assert padding() == [[*range(8)], [*range(4)], [0, 1]]
    assert fill(5, 8) == [[5, 6, 7], [], []]
    assert kt_padding._around_capture(lambda runner, more: more, None, more=7) == 7
    assert padding() == [[], [], []] and fill(5, 8) == [[5, 6, 7], [], []]

    def failing(runner: Any) -> None:
        raise RuntimeError("no memory")

    try:
        kt_padding._around_capture(failing, None)
        raise AssertionError("the error was lost")
    except RuntimeError:
        assert masks.of(torch.empty(8, 16)) is None
    for runner in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):  # before each replay
        assert "buffer_registry.fill_from(" in inspect.getsource(runner.load_batch)


def check_no_mask_that_nobody_fills() -> None:
    def others(registry: Any, numbers: tuple[int, int]) -> None:
        """A function of a version with other names."""

    hooked = CudaGraphBufferRegistry.fill_from
    renamed = _wrap_fn(others, kt_padding._around_fill_from, HookType.AROUND)
    for function in (hooked.__wrapped__, renamed):
        masks = kt_padding.Masks()
        CudaGraphBufferRegistry.fill_from = function
        assert not kt_padding._fills()
        with masks.dummies():
            assert masks.of(torch.empty(4, 16)) is None and not masks.used
    CudaGraphBufferRegistry.fill_from = hooked
    kept, kt_padding.masks = kt_padding.masks, kt_padding.Masks()
    renamed(None, (3, 4))  # stock SGLang of such a version is served
    kt_padding.masks = kept
