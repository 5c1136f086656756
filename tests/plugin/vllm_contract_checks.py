"""What the plugin refuses and installs, on vLLM's own objects; see vllm_hooks.py."""

import dataclasses
import inspect
import itertools
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from context_checks import check_changes, check_context
from contract_checks import changed, check_flags, check_refusals, check_table

# First, because vLLM's modules import each other in a circle.
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

# isort: split
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config.model import _get_and_verify_max_len
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.transformers_utils.config import patch_rope_parameters
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

import kt_kernel
from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.plugin_entrypoints import failure
from kt_kernel.plugin_entrypoints.common import LOAD_FORMATS, RequestRefused
from kt_kernel.plugin_entrypoints.contract import Name
from kt_kernel.plugin_entrypoints.vllm import front, hooks, options, requests, slot
from kt_kernel.plugin_entrypoints.vllm import layer as hybrid
from kt_kernel.plugin_entrypoints.vllm.contract import (
    CONTRACT,
    EXPERT_CONFIG,
    EXPERT_RANKS,
    WORKER_OPERATIONS,
)
from kt_kernel.plugin_entrypoints.vllm.settings_contract import (
    REFUSED,
    REFUSED_DRAFT,
    REFUSED_SPECULATION,
    REFUSED_WITH_RANKS,
)
from kt_kernel.serving.flags import collect
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import moe_reference, row_error
from kt_kernel.tuning.batches import captured_tokens

MODEL = Path(kt_kernel.__file__).parent / "demo_model"


def engine_config(**arguments: Any) -> VllmConfig:
    given = {"model": str(MODEL), "max_model_len": 128} | arguments
    return EngineArgs(**given).create_engine_config()


def check_the_table() -> None:
    check_table(CONTRACT)


def error_of(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except (OptionError, ValueError) as error:
        return str(error)
    return ""


LINES = {
    "parallel_config.pipeline_parallel_size": (2, "--pipeline-parallel-size 2: kt-moe supports"),
    "parallel_config.enable_eplb": (True, "--enable-eplb: not supported with"),
    "parallel_config.ubatch_size": (2, "--ubatch-size 2: not supported with"),
    "lora_config": (object(), "--enable-lora: not supported with"),
    "speculative_config": (
        SimpleNamespace(method="medusa"),
        "--speculative-config medusa: this method of speculative decoding is not supported",
    ),
    "weight_transfer_config": (object(), "--weight-transfer-config: the weights"),
    "model_config.enable_sleep_mode": (True, "--enable-sleep-mode: the weights of cold"),
    "model_config.model_impl": ("terratorch", "--model-impl terratorch: only vLLM's and"),
    "offload_config.uva.cpu_offload_gb": (0.5, "--cpu-offload-gb 0.5: both settings decide"),
    "offload_config.prefetch.offload_group_size": (
        8,
        "--offload-group-size 8: both settings",
    ),
    "offload_config.offload_backend": (
        "prefetch",
        "--offload-backend prefetch: both settings",
    ),
    "load_config.load_format": ("sharded_state", "--load-format sharded_state: cold experts"),
    "device_config.device_type": ("xpu", "vLLM's device xpu: kt-moe supports CUDA"),
    "model_config.hf_text_config": (
        SimpleNamespace(architectures=["Dense"], hidden_size=8),
        "model class Dense: its configuration has no number of experts",
    ),
}


def check_configurations() -> None:
    """Checks refusals on the attributes of a real configuration."""
    made = engine_config()
    check_refusals(CONTRACT, made)
    refusals = (*REFUSED, *REFUSED_WITH_RANKS, *REFUSED_SPECULATION, *REFUSED_DRAFT)
    check_flags(CONTRACT, AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()), refusals)
    refuse = options.prepared
    some = KTOptions(weight_path=str(MODEL), num_gpu_experts=4)
    assert error_of(refuse, made, some) == ""
    memory = KTOptions(num_gpu_experts=4, gpu_prefill_memory=1 << 30)
    assert "--kt-gpu-prefill-memory 1GB: experts can" in error_of(refuse, made, memory)
    streamed = KTOptions(num_gpu_experts=4, gpu_prefill_token_threshold=512)
    assert "512: experts can only be streamed to a CUDA" in error_of(refuse, made, streamed)
    with changed(made, "device_config.device_type", "cuda"):
        assert error_of(refuse, made, streamed) == ""
    for path, (value, line) in LINES.items():
        with changed(made, path, value) as possible:
            assert possible, path
            found = error_of(refuse, made, some)
            assert found.startswith(line) and "\n" not in found, (path, found)
    with changed(made, "model_config.quantization", "awq"):
        theirs = KTOptions(weight_path=str(MODEL), num_gpu_experts=4, hot_format="engine")
        line = "--kt-hot-format engine: the model is quantised with awq; the engine's own"
        assert error_of(refuse, made, theirs).startswith(line)
        given = {"num_gpu_experts": 4, "enable_dynamic_expert_update": "on"}
        # Its hot experts get 16 bits.
        assert error_of(refuse, made, KTOptions(weight_path=str(MODEL), **given)) == ""
    with changed(made, "parallel_config.tensor_parallel_size", 2):
        line = "--kt-enable-dynamic-expert-update on: tensor parallelism is not supported (2 ranks)"
        assert error_of(refuse, made, KTOptions(**given)).startswith(line)
        tried = refuse(made, KTOptions(**given | {"enable_dynamic_expert_update": "auto"}))
        assert tried.enable_dynamic_expert_update == "off"
        with changed(made, "parallel_config.enable_expert_parallel", True):
            line = "--enable-expert-parallel: not supported with"
            assert error_of(refuse, made, some).startswith(line)
    for method in ("ngram", "mtp", "eagle", "eagle3"):
        speculative = SimpleNamespace(
            method=method, draft_load_config=None, draft_model_config=made.model_config
        )
        with changed(made, "speculative_config", speculative):
            assert error_of(refuse, made, some) == ""
    with changed(made, "model_config.quantization", "fp8"):
        found = error_of(refuse, made, KTOptions())
        line = f"served model {MODEL}, quantised with fp8: {MODEL} is not quantised, and"
        assert found.startswith(line), found
    for form in LOAD_FORMATS:
        with changed(made, "load_config.load_format", form):
            assert error_of(refuse, made, some) == ""
    parallel = made.parallel_config
    object.__setattr__(parallel, "enable_expert_parallel", True)
    object.__setattr__(parallel, "tensor_parallel_size", 2)
    object.__setattr__(parallel, "data_parallel_size", 2)
    (entry,) = (one for one in CONTRACT.refusals if "use_sequence_parallel_moe" in one.path)
    assert f"{entry.named}: " in error_of(entry.check, made, "vLLM")


def check_how_a_draft_model_is_loaded() -> None:
    """As the served one if it has experts: weights that do not come from files are refused."""
    ngram = {"method": "ngram", "prompt_lookup_max": 2}
    with tempfile.TemporaryDirectory() as folder:
        dense = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512}
        sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
        (Path(folder) / "config.json").write_text(json.dumps(dense | sizes))
        eagle = {"method": "eagle", "model": folder}
        for form in ("dummy", "sharded_state", *LOAD_FORMATS):
            line = f"--speculative-config draft_load_config.load_format {form}: cold experts need"
            for given, experts in ((ngram, False), (eagle, False), (eagle, True)):
                given = given | {"draft_load_config": {"load_format": form}}
                made = engine_config(speculative_config={"num_speculative_tokens": 2} | given)
                if experts:
                    made.speculative_config.draft_model_config = made.model_config
                found = error_of(options.prepared, made, KTOptions(num_gpu_experts=4))
                if experts and form not in LOAD_FORMATS:
                    assert found.startswith(line) and "; accepted: auto, hf, " in found, found
                else:
                    assert found == "", found


def check_an_empty_quantization_config() -> None:
    """An empty quantization_config counts as none."""
    with tempfile.TemporaryDirectory() as folder:
        for file in MODEL.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        settings = json.loads((MODEL / "config.json").read_text()) | {"quantization_config": {}}
        (Path(folder) / "config.json").unlink()
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        made = engine_config(model=folder, additional_config={"kt": {}})
        assert not made.model_config.quantization


def check_layers_are_refused() -> None:
    """Checks what a model may request of its experts, on vLLM's own dataclasses and signature."""
    ranks = FusedMoEParallelConfig.make_no_parallel()
    made = FusedMoEConfig(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=64,
        num_local_experts=8,
        num_logical_experts=8,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=ranks,
        in_dtype=torch.float32,
    )
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(RoutedExperts.__init__).parameters.items()
        if parameter.default is not parameter.empty
    } | {"expert_map_manager": SimpleNamespace(num_fused_shared_experts=0)}

    def error(config: Any = made, **arguments: Any) -> str:
        return error_of(hybrid._refuse, "model.layers.3.mlp.experts", config, defaults | arguments)

    def with_ranks(**changes: Any) -> str:
        parallel = dataclasses.replace(ranks, **changes)
        return error(dataclasses.replace(made, moe_parallel_config=parallel))

    def changed_to(**changes: Any) -> Any:
        config = dataclasses.replace(made)
        for name, value in changes.items():  # vLLM's own checks are not asked
            setattr(config, name, value)
        return config

    def with_config(name: str, value: Any) -> str:
        return error(changed_to(**{name: value}))

    assert error() == error(changed_to(skip_final_all_reduce=True)) == ""
    for found, what in (
        (error(expert_map_manager=SimpleNamespace(num_fused_shared_experts=1)), "fusing shared"),
        (with_config("is_lora_enabled", True), "LoRA on experts"),
        (with_config("num_logical_experts", 7), "redundant experts"),
        (with_config("hidden_dim_unpadded", 60), "padding by the model itself"),
        (with_config("intermediate_pad", 32), "padding of the intermediate size"),
        (with_ranks(sp_size=2), "sequence parallelism"),
        (with_ranks(dp_size=2), "data parallelism"),
        (with_ranks(use_ep=True), "expert parallelism"),
        (with_ranks(pcp_size=2), "prefill context parallelism"),
        (with_ranks(enable_eplb=True), "moving experts between ranks"),
    ):
        line = f"kt: model.layers.3.mlp.experts: {what}"
        assert found.startswith(line) and "not supported with kt options" in found, found
    for name, value, what in (
        ("swiglu_limit", 0.0, "a SwiGLU limit of 0.0"),
        ("swiglu_alpha", 1.702, "a SwiGLU alpha of 1.702 with a beta of None"),
    ):
        found = error_of(hybrid._computes, "layer 3", changed_to(**{name: value}), False)
        assert found.startswith(f"layer 3: {what} is not supported with kt options"), found
    situ = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    for changes, on_input, expected in (
        ({"activation": MoEActivation.GELU}, True, ExpertActivation("gelu", True, True)),
        ({"activation": MoEActivation.RELU2_NO_MUL}, False, ExpertActivation("relu2", False)),
        (
            {"activation": MoEActivation.SITU, **situ},
            False,
            ExpertActivation("situ", situ_beta=4.0, situ_linear_beta=25.0),
        ),
        (
            {"activation": MoEActivation.SWIGLUSTEP},
            False,
            ExpertActivation("swiglustep", swiglu_limit=7.0),
        ),
    ):
        computed = hybrid._computes("layer 3", changed_to(**changes), on_input)
        assert computed == {"activation": expected, "has_bias": False}, computed
    made.defer_moe_finalize()
    assert "leaving the sum over experts to the model" in error()
    # From an unknown version.
    assert "swiglu_gamma=0.5, which kt-moe does not know" in error(swiglu_gamma=0.5)
    for known, name in (
        (EXPERT_CONFIG, "is_lora_enabled"),
        (EXPERT_RANKS, "sp_size"),
    ):
        older = dataclasses.replace(
            known, refused=tuple(entry for entry in known.refused if entry.path != name)
        )
        older.check({name: older.defaults()[name]}, "here")
        assert "does not know" in error_of(older.check, {name: 7}, "here")


def check_other_experts() -> None:
    """Experts without a gate, matrix by matrix; and router weights on the input with matrices of
    all experts at once, as Llama-4's loader passes them."""
    experts, hidden, inter = 4, 64, 32
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(torch.bfloat16).float() / 8

    gate, up = random(experts, inter, hidden), random(experts, inter, hidden)
    down, x = random(experts, hidden, inter), 8 * random(9, hidden)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    for activation, shards, stacked in (
        (ExpertActivation("relu2", gated=False), {"w1": up, "w2": down}, False),
        (
            ExpertActivation(router_weight_on_input=True),
            {"w1": gate, "w3": up, "w2": down},
            True,
        ),
    ):
        layer = object.__new__(hybrid.HybridExperts)
        torch.nn.Module.__init__(layer)
        layer.kt_skip = layer.kt_padding = None
        layer.kt_layer = HybridLayer(
            KTOptions(method="BF16", num_gpu_experts=0, cpuinfer=1),
            layer_idx=0,
            num_experts=experts,
            num_experts_per_tok=2,
            hidden_size=hidden,
            moe_intermediate_size=inter,
            activation=activation,
        )
        for shard, every in shards.items():
            param = torch.empty(0, *every.shape[1:])
            if stacked:
                layer.weight_loader(param, every, "weight", shard, 0)
                continue
            for expert, matrix in enumerate(every):
                assert layer.weight_loader(param, matrix, "weight", shard, expert, True)
        layer.kt_layer.finish_loading()
        found = layer.forward_modular(x, weights, ids)
        want = moe_reference(
            x,
            ids,
            weights,
            gate if activation.gated else None,
            up,
            down,
            activation=activation.function,
            apply_router_weight_on_input=activation.router_weight_on_input,
        )
        assert row_error(found.double(), want).max() < 5e-3, activation


def check_hot_experts_without_a_gate() -> None:
    """kt-moe does not convert them, and says so before anything is loaded."""
    experts = object.__new__(hybrid.HybridExperts)
    torch.nn.Module.__init__(experts)
    for given, accepted in (
        ({"hot_format": "bf16", "weight_path": "/model"}, "--kt-num-gpu-experts 0"),
        ({"hot_format": "packed"}, "--kt-hot-format engine or --kt-num-gpu-experts 0"),
    ):
        experts.kt_layer = HybridLayer(
            KTOptions(method="INT4_G32", num_gpu_experts=2, **given),
            layer_idx=3,
            num_experts=4,
            num_experts_per_tok=2,
            hidden_size=64,
            moe_intermediate_size=32,
            activation=ExpertActivation("relu2", gated=False),
            has_cpu_part=False,
        )
        found = error_of(experts._get_quant_method, "layers.3", None, None)
        assert found.startswith("kt: layers.3: kt-moe converts") and "a gate; " in found, found
        assert found.endswith(f"accepted: {accepted}"), found


def check_hot_experts_with_a_limit() -> None:
    """vLLM's kernels for the CPU would leave the limit out. They have that of gpt-oss."""
    gpt_oss = ExpertActivation(swiglu_limit=7.0, swiglu_alpha=1.702)
    limited, plain = ExpertActivation(swiglu_limit=1.5), ExpertActivation()
    for activation, hot, device, refused in (
        (limited, 2, "cpu", True),
        (limited, 0, "cpu", False),
        (limited, 4, "cpu", False),  # as stock vLLM computes
        (limited, 2, "cuda", False),
        (gpt_oss, 2, "cpu", False),
        (dataclasses.replace(gpt_oss, swiglu_limit=5.0), 2, "cpu", True),
        (plain, 2, "cpu", False),
    ):
        experts = object.__new__(hybrid.HybridExperts)
        torch.nn.Module.__init__(experts)
        experts.layer_name = "layers.3"
        experts.kt_layer = HybridLayer(
            KTOptions(method="BF16", num_gpu_experts=hot),
            layer_idx=3,
            num_experts=4,
            num_experts_per_tok=2,
            hidden_size=64,
            moe_intermediate_size=32,
            activation=activation,
            has_cpu_part=False,
        )
        # PyTorch's build for the CPU has no tensors of other devices.
        tensors = [SimpleNamespace(is_cuda=device == "cuda")]
        experts.parameters = lambda tensors=tensors: iter(tensors)
        experts.quant_method = object.__new__(hybrid.NoHotExperts)
        found = error_of(experts._check_method)
        wanted = (
            f"kt: layers.3: {activation}: vLLM's kernels for the CPU compute hot experts without "
            "this limit; accepted: --kt-num-gpu-experts 0"
        )
        assert found == (wanted if refused else ""), (activation, hot, device, found)


def check_sums_left_to_the_model_are_refused() -> None:
    """They are refused when vLLM's kernel does not return sums."""
    unfinished = UnfinalizedMoEOutput(*(torch.ones(2) for _ in range(3)))
    experts = object.__new__(hybrid.HybridExperts)
    torch.nn.Module.__init__(experts)
    experts.layer_name = "model.layers.3.mlp.experts"
    experts.quant_method = SimpleNamespace(is_monolithic=False, apply=lambda **given: unfinished)
    try:
        experts._hot(torch.ones(2, 8), None, None)
    except RuntimeError as error:
        assert "(UnfinalizedMoEOutput) is not supported" in str(error)
    else:
        raise AssertionError("not refused")


# ---- Registering.


def check_a_renamed_function_stops_a_start() -> None:
    """It does so only with kt options; without them, kt-moe does not check vLLM."""
    renamed = dataclasses.replace(
        CONTRACT, names=(*CONTRACT.names, Name("vllm.engine.arg_utils:Renamed", "called", "x"))
    )
    hooks.CONTRACT = renamed
    try:
        engine_config()
        error = error_of(lambda: engine_config(additional_config={"kt": {}}))
        assert "lacks vllm.engine.arg_utils:Renamed, which kt-moe needs; install" in error, error
    finally:
        hooks.CONTRACT = CONTRACT


def check_a_wrong_value_ends_the_command_line() -> None:
    """It ends with one line, when vLLM's parser reads the value."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for switch in ("on", "off"):  # from a file, for which YAML makes them booleans
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vllm.yaml"
            path.write_text(f"kt-tuned: {switch}\nkt-num-gpu-experts: 3\n")
            parsed = parser.parse_args(["--config", str(path)])
        assert collect(parsed) == {"tuned": switch, "num_gpu_experts": 3}, parsed
    try:
        parser.parse_args(["--kt-method", "AMXINT9"])
    except SystemExit as stopped:
        assert str(stopped).startswith("kt: error: --kt-method AMXINT9: unknown method")
    else:
        raise AssertionError("not refused")


def check_nothing_is_installed_without_options() -> None:
    """Only the search for options is installed. With options, the front is prepared once, and
    models not yet."""

    def hooked() -> set[str]:
        functions = {
            "async": AsyncLLM.__init__,
            "engine": LLMEngine.__init__,
            "wait": utils.wait_for_engine_startup,
            "forward": MoERunner._select_forward,
            "weights": DefaultModelLoader.get_all_weights,
        }
        return {name for name, one in functions.items() if ours(one)}

    def ours(function: Any) -> bool:
        return "plugin_entrypoints" in function.__code__.co_filename

    engine_config()
    assert ours(EngineArgs.create_engine_config)
    assert hooked() == set() and not op_registry_oot and "KT_FAILURE_FILE" not in os.environ
    for _ in range(2):
        engine_config(additional_config={"kt": {}})
        assert hooked() == {"async", "engine", "wait"} and not op_registry_oot
        assert not hasattr(AsyncLLM.__init__.__wrapped__, "__wrapped__")
    with slot.taken():
        assert hooked() == {"async", "engine", "wait", "forward", "weights"}
        assert op_registry_oot["RoutedExperts"] is hybrid.HybridExperts
        own = op_registry_oot["GptOssRoutedExperts"]
        assert issubclass(own, (hybrid.HybridExperts, GptOssRoutedExperts))
        theirs = op_registry_oot["TransformersRoutedExperts"]
        assert issubclass(theirs, hybrid.HybridExperts) and not issubclass(theirs, hybrid.ReadHere)
    assert hooked() == {"async", "engine", "wait"} and not op_registry_oot


def check_workers_without_the_plugin_stop_a_start() -> None:
    """Otherwise vLLM would serve without kt-moe's layers."""
    made = engine_config(additional_config={"kt": {}})  # starts to listen
    stopped: list[str] = []
    core = SimpleNamespace(shutdown=lambda: stopped.append("engine"))
    engine = SimpleNamespace(vllm_config=made, engine_core=core)
    try:
        front._require_plugin(engine)
    except failure.StartError as error:
        line = "kt: error: vLLM's workers did not load the kt-moe plugin; see their log"
        assert str(error) == line and stopped == ["engine"]
    else:
        raise AssertionError("not stopped")
    with changed(made, "parallel_config.distributed_executor_backend", "ray"):
        front._require_plugin(engine)  # workers elsewhere have no way to confirm
    failure.confirm()
    front._require_plugin(engine)
    assert stopped == ["engine"]


def check_requests() -> None:
    """Checks which worker methods a front process accepts by name."""

    class Engine:
        def __init__(self, extension: str) -> None:
            parallel = SimpleNamespace(
                worker_extension_cls=extension, worker_cls="vllm.v1.worker.gpu_worker.Worker"
            )
            self.vllm_config = SimpleNamespace(parallel_config=parallel)

        def collective_rpc(self, method: Any, timeout: Any = None, args: tuple = ()) -> str:
            return "called"

    def call(engine: Engine, method: Any) -> str:
        try:
            return engine.collective_rpc(method=method)
        except RequestRefused as error:
            return str(error)

    plain, extended = Engine(""), Engine("my.Extension")
    for engine in (plain, extended):
        requests.guard_front(engine, dataclasses.replace(WORKER_OPERATIONS, refused=()))
        for entry in WORKER_OPERATIONS.refused:
            assert call(engine, entry.name) == f"kt: {entry.name}: {entry.reason}"
        for name in (*WORKER_OPERATIONS.accepted, print):
            assert call(engine, name) == "called"
    assert call(plain, "swap_weights").startswith("kt: swap_weights: this is not a known")
    assert call(extended, "swap_weights") == "called"


def check_the_longest_context() -> None:
    def derived(config: Any) -> int:
        patch_rope_parameters(config)
        found = ModelArchConfigConvertorBase(config, config).derive_max_model_len_and_key()
        sizes = SimpleNamespace(derived_max_model_len_and_key=found)
        return _get_and_verify_max_len(config, sizes, None, None, False, None)

    check_context("vllm", derived)


def check_the_largest_cuda_graph() -> None:
    """`kt tune` knows vLLM's rule."""
    gpu: Any = SimpleNamespace(name="NVIDIA H200", total=141 << 30)
    for streams, batch, size in itertools.product(
        (1, 2, 3, 5, 16, 100, 127, 128, 200, 300, 1000), (64, 2048, 8192), (None, 3, 17, 300)
    ):
        compilation = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL,
            max_cudagraph_capture_size=size,
            cudagraph_capture_sizes=None,
            post_init_cudagraph_sizes=lambda: None,
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=streams, max_num_batched_tokens=batch),
            uniform_decode_query_len=1,
            performance_mode="balanced",
            speculative_config=None,
        )
        VllmConfig._set_cudagraph_sizes(config)
        given = [] if size is None else ["--max-cudagraph-capture-size", str(size)]
        found = captured_tokens("vllm", gpu, streams, batch, given)
        assert found == compilation.max_cudagraph_capture_size, (streams, batch, size, found)


def check_changes_of_a_configuration() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    check_changes(lambda words: parser.parse_args(words).hf_overrides)
