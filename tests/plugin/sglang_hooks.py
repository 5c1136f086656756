"""Runs in the SGLang environment without an engine: checks what a run on the CPU does not show.

Prints OK at the end. An assertion names what is wrong.
"""

import ast
import asyncio
import dataclasses
import inspect
import logging
import os
import pickle
import pkgutil
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang_argument_checks as of_arguments
import sglang_delivery_checks as delivery
import sglang_layer_checks as layers
import sglang_sweep_checks as sweeps
from context_checks import check_context
from contract_checks import check_flags, check_table
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
from sglang.srt.layers.moe import kt_ep_wrapper
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
from sglang.srt.layers.moe.utils import resolve_shared_experts_config
from sglang.srt.managers.io_struct import (
    GetWeightsByNameReqInput,
    ScaleElasticEPReqInput,
    UnloadLoRAAdapterReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_exec, get_server_args, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_context_length

import kt_kernel
from kt_kernel.plugin_entrypoints import common, failure
from kt_kernel.plugin_entrypoints.common import RequestRefused
from kt_kernel.plugin_entrypoints.contract import Refusal
from kt_kernel.plugin_entrypoints.sglang import (
    checks,
    contract,
    hooks,
    layer,
    options,
    plugin,
    requests,
    startup,
)
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions

DEMO_MODEL = str(Path(kt_kernel.__file__).parent / "demo_model")
DEMO_EXPERTS = 16
BASE = ("--model-path", DEMO_MODEL, "--device", "cpu")
LOG: list[str] = []


def error_of(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except OptionError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


# ---- Hooks.


def check_nothing_is_hooked_without_options() -> None:
    ours = {
        target
        for target, found in HookRegistry._hooks.items()
        if any(source.plugin_name == "kt_moe" for _, _, source in found)
    }
    assert ours == {
        f"sglang.srt.server_args.ServerArgs.{name}"
        for name in ("add_cli_args", "from_cli_args", "check_server_args")
    }
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server_args = ServerArgs.from_cli_args(parser.parse_args([*BASE]))
    server_args.resolve_once()
    server_args.check_server_args()
    assert not any("kt" in name for name in vars(server_args)), vars(server_args)
    module = kt_ep_wrapper.__name__
    assert kt_ep_wrapper.KTEPWrapperMethod.__module__ == module
    assert not hasattr(kt_ep_wrapper.create_kt_config_from_server_args, "__wrapped__")


def check_options_install_the_hooks() -> None:
    """In a process whose plugins are loaded, hooks are installed once."""
    server_args = with_options(kt_num_gpu_experts=3)
    found = plugin._serving_hooks()
    assert all(hooks.in_effect(hook) for hook in found)
    before = [hooks._resolve(hook) for hook in found]
    server_args.check_server_args()
    assert all(a is hooks._resolve(hook) for a, hook in zip(before, found, strict=True))
    travelled = pickle.loads(pickle.dumps(server_args))
    decided = KTOptions(method="INT4_G32", num_gpu_experts=3, hot_format="engine")
    assert options.options_of(travelled) == decided and plugin._arrived


def check_lost_hooks_are_noticed() -> None:
    """SGLang only logs that it cannot apply a hook."""
    plugin_layer = layers.kt_layer
    plugin_layer.verify_hooks()
    for hook in plugin_layer.worker_hooks():
        owner, _, name = hook.target.rpartition("." if "." in hook.target.split(":")[1] else ":")
        holder = pkgutil.resolve_name(owner)
        ours = vars(holder)[name]
        original = ours.__base__ if isinstance(ours, type) else ours.__wrapped__
        setattr(holder, name, original)
        LOG.clear()
        line = error_of(plugin_layer.verify_hooks)
        if hook.without:
            assert line == "" and f"the hook on {hook.dotted} is not in effect" in LOG[0], LOG
        else:
            assert f"{hook.dotted} is not in effect" in line or "and kt-moe replace" in line, line
        setattr(holder, name, ours)
    create = fused_moe.create_kt_config_from_server_args
    fused_moe.create_kt_config_from_server_args = create.__wrapped__
    assert "has no effect in" in error_of(plugin_layer.verify_hooks)
    fused_moe.create_kt_config_from_server_args = create
    try:  # outside _initialize_model
        create(get_server_args(), 0)
        raise AssertionError("a layer without a model was accepted")
    except RuntimeError as error:
        assert "built outside SGLang's _initialize_model" in str(error)


def check_starts_that_fail() -> None:
    """The wait for the schedulers ends with the error of one of them, or because they are stock."""

    def ending(*schedulers: Any) -> str:
        try:
            assert startup._around_wait(wait, schedulers) == schedulers
            return ""
        except (failure.StartError, RuntimeError) as error:
            return str(error)

    def wait(schedulers: Any) -> Any:
        if not schedulers:
            raise RuntimeError("Rank 0 scheduler died")
        return schedulers

    startup.listen(command_line=False)
    assert ending() == "Rank 0 scheduler died"
    assert "kt: error: SGLang's schedulers did not load the kt-moe plugin" in ending({})
    failure.confirm()
    assert ending({}) == "" and "did not load" in ending({}, {})
    startup.listen(command_line=False)  # for the next engine
    failure._write("kt: error: layer 0 is bad")
    assert ending() == "kt: error: layer 0 is bad"
    startup.forget()  # an engine without options
    assert ending() == "Rank 0 scheduler died" and ending({}, {}) == ""


def check_hooks_on_arguments() -> None:
    """Without options, none of kt-moe's hooks runs. Options are read when the plugin registers and,
    because SGLang applies them later, again when there are any."""
    check = ServerArgs.check_server_args
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    try:
        del ServerArgs.check_server_args
        problem = common.install("SGLang", plugin._hook_arguments, logging.getLogger("sglang.kt"))
        assert "SGLang has no sglang.srt.server_args.ServerArgs.check_server_args" in problem
        ServerArgs.check_server_args = check.__wrapped__
        ServerArgs.from_cli_args(parser.parse_args([*BASE]))
        ServerArgs.from_cli_args(parser.parse_args([*BASE, "--kt-num-gpu-experts", "3"]))
        raise AssertionError("options were accepted that nothing checks")
    except SystemExit as end:
        assert "ServerArgs.check_server_args is not in effect" in str(end.code), end.code
    finally:
        ServerArgs.check_server_args = check


# ---- Arguments.


def with_options(**fields: Any) -> ServerArgs:
    """Server arguments as given to ``Engine(...)``, checked."""
    server_args = ServerArgs(DEMO_MODEL, device="cpu", **fields)
    server_args.resolve_once()
    server_args.check_server_args()
    return server_args


@contextmanager
def decided(server_args: ServerArgs, **fields: Any) -> Iterator[Any]:
    """Sets these fields, which SGLang must have, inside. Yields the resolved arguments."""
    declare_resolution(server_args, "test", **fields)
    try:
        yield resolving_view(server_args)
    finally:
        server_args._resolved_overrides.pop()


def other_than(refusal: Refusal) -> Any:
    """A value that is not accepted, of the same kind as the accepted ones."""
    kinds = {type(value) for value in refusal.accepted}
    return True if bool in kinds else 7 if int in kinds else "other"


def check_refused_arguments() -> None:
    """On SGLang's own arguments, other values are refused, and so is a missing attribute."""
    server_args = ServerArgs(DEMO_MODEL, device="cpu")
    server_args.resolve_once()
    contract.CONTRACT.refuse(resolving_view(server_args))
    drafts = (*contract.REFUSED_SPECULATION, *contract.REFUSED_DRAFT)
    refusals = (*contract.REFUSED, *drafts, *contract.BESIDE_COLD)
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    check_flags(contract.CONTRACT, parser, refusals)
    for entry in refusals:
        if not contract.CONTRACT.holds(entry.versions):
            continue
        for value in entry.accepted:
            with decided(server_args, **{entry.path: value}) as arguments:
                entry.check(arguments, "SGLang")
        with decided(server_args, **{entry.path: other_than(entry)}) as arguments:
            line = error_of(entry.check, arguments, "SGLang")
            assert line.startswith(entry.named) and entry.reason in line, (entry, line)
            renamed = dataclasses.replace(entry, path=f"{entry.path}_of_tomorrow")
            assert f"SGLang has no {renamed.path}" in error_of(renamed.check, arguments, "SGLang")


def check_arguments_that_need_more() -> None:
    server_args = ServerArgs(DEMO_MODEL, device="cpu")
    server_args.resolve_once()
    model = model_config_of(server_args)

    def refusal(arguments: Any, **given: Any) -> str:
        checked = KTOptions.from_mapping({"num_gpu_experts": 3} | given)
        return error_of(checks.prepared, arguments, model, checked)

    assert refusal(resolving_view(server_args)) == ""
    graphs = resolving_view(server_args).cuda_graph_config
    for phase in ("decode", "prefill"):
        for backend in ("full", "breakable", "disabled", "tc_piecewise"):
            backends = dataclasses.replace(getattr(graphs, phase), backend=backend)
            changed = dataclasses.replace(graphs, **{phase: backends})
            with decided(server_args, device="cuda", cuda_graph_config=changed) as arguments:
                line = refusal(arguments)
                assert refusal(arguments, num_gpu_experts=DEMO_EXPERTS) == ""  # nothing is cold
            assert (line == "") == (backend != "tc_piecewise")
            assert not line or line.startswith(f"--cuda-graph-backend-{phase} tc_piecewise: ")
    decode = dataclasses.replace(graphs.decode, backend="full", bs=[1, 8])
    flags = "--cuda-graph-max-bs-prefill N or --disable-prefill-cuda-graph"
    of_decode = "--cuda-graph-max-bs-decode N"
    for backend, sizes, captured, option in (
        ("breakable", [512, 2048], 2048, flags),
        ("breakable", [4, 8], 8, f"{flags}, together with {of_decode}"),
        ("breakable", [4], 8, of_decode),
        ("disabled", [512, 2048], 8, of_decode),
    ):
        prefill = dataclasses.replace(graphs.prefill, backend=backend, bs=sizes)
        changed = dataclasses.replace(graphs, decode=decode, prefill=prefill)
        for chunk, largest in ((4096, 4096), (-1, None)):
            fields = {"cuda_graph_config": changed, "chunked_prefill_size": chunk}
            with decided(server_args, **fields) as arguments:
                side = layer.engine_side(arguments)
            assert (side.captured, side.largest) == (captured, largest)
            assert side.graph_option == option
    speculative = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}
    with decided(server_args, cuda_graph_config=changed, **speculative) as arguments:
        assert layer.engine_side(arguments).captured == 32  # eight requests
    line = refusal(resolving_view(server_args), gpu_prefill_token_threshold=512)
    assert "512: experts can only be streamed to a CUDA device" in line
    with decided(server_args, enable_deterministic_inference=True) as arguments:
        assert "set KT_KERNEL_KIND=vector" in refusal(arguments)
        os.environ["KT_KERNEL_KIND"] = "vector"
        assert refusal(arguments) == ""
        line = refusal(arguments, max_deferred_experts_per_token=1)
        assert line.startswith("--kt-max-deferred-experts-per-token 1: deferral depends")
        line = refusal(arguments, enable_dynamic_expert_update="on")
        assert line.startswith("--kt-enable-dynamic-expert-update on: which experts"), line
        moving = {"num_gpu_experts": 3, "enable_dynamic_expert_update": "auto"}
        found = checks.prepared(arguments, model, KTOptions.from_mapping(moving))
        assert found.enable_dynamic_expert_update == "off"
        with decided(server_args, device="cuda") as arguments:
            line = refusal(arguments, gpu_prefill_token_threshold=512)
        assert line.startswith("--kt-gpu-prefill-token-threshold 512: which experts"), line
        del os.environ["KT_KERNEL_KIND"]
    classes, model.hf_config.architectures = model.hf_config.architectures, ["BeamForCausalLM"]
    with decided(server_args, tp_size=2) as arguments:
        assert refusal(arguments).startswith("--tp-size 2: with several ranks"), refusal(arguments)
    model.hf_config.architectures = ["Llama4ForCausalLM"]
    for given in ({}, {"num_gpu_experts": DEMO_EXPERTS}, {"allow_untested": True}):
        line = refusal(resolving_view(server_args), **given)
        assert line.startswith("model class Llama4ForCausalLM: SGLang loads it as"), line
    model.hf_config.architectures = classes
    with decided(server_args, quantization="awq") as arguments:
        found = refusal(arguments)
        assert "quantised with awq: " in found and "that the engine quantises" in found, found
    # SGLang selects a kernel for draft models even if there is none.
    with decided(server_args, speculative_moe_runner_backend="flashinfer_cutlass") as arguments:
        assert refusal(arguments) == ""
        with decided(server_args, speculative_algorithm="EAGLE") as arguments:
            line = "--speculative-moe-runner-backend flashinfer_cutlass: the kernel of"
            assert refusal(arguments).startswith(line), refusal(arguments)
    for algorithm in ("NGRAM", "EAGLE"):
        with decided(server_args, speculative_algorithm=algorithm) as arguments:
            assert refusal(arguments) == ""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for flag, reason in (("--encoder-only", "a server without"), ("--use-ray", "Ray's workers")):
        parsed = parser.parse_args([*BASE, "--kt-num-gpu-experts", "3", flag])
        try:
            ServerArgs.from_cli_args(parsed)
            raise AssertionError(f"{flag} was accepted")
        except SystemExit as end:
            assert str(end.code).startswith(f"kt: error: {flag}: {reason}"), end.code


def check_shared_experts_stay_apart() -> None:
    """With cold experts, SGLang does not fuse shared experts into the routed ones, and the log says
    so
    once: in the worker's copy of the arguments, however options and arguments were given, and in a
    process that reads the arguments before any check. Otherwise the setting is unchanged."""

    def arguments(flags: tuple[str, ...]) -> ServerArgs:
        parser = ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return ServerArgs.from_cli_args(parser.parse_args([*BASE, *flags]))

    def outcome(server_args: ServerArgs) -> tuple[bool, int]:
        """Whether the worker's model may fuse, and the number of log lines about it."""
        LOG.clear()
        server_args.resolve_once()
        server_args.check_server_args()
        publish(pickle.loads(pickle.dumps(server_args)), role="scheduler")
        assert checks.checked_options_of(get_server_args()) == options.options_of(server_args)
        return may_fuse(), sum("--disable-shared-experts-fusion is set" in line for line in LOG)

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
    checks.checked_options_of(get_server_args())
    assert not may_fuse()

    enforced = arguments(("--kt-num-gpu-experts", "3", "--enforce-shared-experts-fusion"))
    enforced.resolve_once()
    line = error_of(checks.checked_options_of, enforced)
    assert line.startswith("--enforce-shared-experts-fusion: shared experts cannot"), line


def check_kernels_skip_cold_experts() -> None:
    """Kernels that SGLang selects by itself, as for gpt-oss on a GPU, give way to those of Triton,
    and the log says so. Those that the user selects do not."""

    def outcome(*flags: str, selected: str | None = None) -> tuple[str, int]:
        """The kernels that the worker uses, and the number of log lines about them."""
        LOG.clear()
        parser = ArgumentParser()
        ServerArgs.add_cli_args(parser)
        flags = (*BASE, "--kt-num-gpu-experts", "3", *flags)
        server_args = ServerArgs.from_cli_args(parser.parse_args(flags))
        server_args.resolve_once()
        if selected is not None:
            declare_resolution(server_args, "test", moe_runner_backend=selected)
        checks.checked_options_of(server_args)
        publish(pickle.loads(pickle.dumps(server_args)), role="scheduler")
        lines = sum("--moe-runner-backend triton is set" in line for line in LOG)
        return get_exec().moe.moe_runner_backend, lines

    assert outcome() == ("auto", 0)
    assert outcome(selected="triton_kernel") == ("triton", 1)
    assert outcome(selected="triton") == ("triton", 0)
    line = error_of(outcome, "--moe-runner-backend", "triton_kernel")
    assert line.startswith("--moe-runner-backend triton_kernel: the kernel of"), line


class Fusing:
    """A model class that always fuses its shared expert if it may."""

    @staticmethod
    def shared_experts_fusion_disable_reason(hf_config: Any, quant_config: Any) -> None:
        return None

    @staticmethod
    def num_fusable_shared_experts(hf_config: Any) -> int:
        return 1


# ---- Requests.

# Requests whose handlers in the scheduler leave the weights alone. A request that a new version of
# SGLang adds must be listed here or be refused.
HARMLESS = {
    "abort_request",
    "add_external_corpus",
    "attach_hicache_storage_wrapped",
    "clear_hicache_storage_wrapped",
    "close_session",
    "configure_logging",
    "continue_generation",
    "detach_hicache_storage_wrapped",
    "expert_distribution_handle",
    "flush_wrapper.handle",
    "get_hicache_l3_cache_layout",
    "get_internal_state",
    "handle_batch_embedding_request",
    "handle_batch_generate_request",
    "handle_dumper_control",
    "handle_embedding_request",
    "handle_freeze_gc",
    "handle_generate_request",
    "handle_pd_role_switch",
    "handle_rpc_request",
    "handle_shutdown",
    "handle_update_weight_version",
    "list_external_corpora",
    "open_session",
    "pause_generation",
    "profiler_manager._profile",
    "remove_external_corpus",
    "set_internal_state",
    "slow_down",
}


def check_every_request_is_known() -> None:
    source = textwrap.dedent(inspect.getsource(Scheduler.init_request_dispatcher))
    [pairs] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.List)]
    refused = {f"weight_updater.{entry.name}" for entry in contract.UPDATER_OPERATIONS}
    refused |= {entry.name for entry in contract.SCHEDULER_OPERATIONS}
    handlers = set()
    for pair in pairs.elts:
        handler = ast.unparse(pair.elts[1])
        handlers.add(handler.removeprefix("lambda req: ").removesuffix("(req)")[len("self.") :])
    assert handlers <= HARMLESS | refused, handlers - HARMLESS - refused
    remote = {"save_remote_model", "save_sharded_model"}  # by handle_rpc_request
    assert refused <= handlers | remote, refused - handlers


def check_every_entry_fails_in_its_own_way() -> None:
    """Operations fail as HTTP and ``Engine`` expect it, and work in an engine without options."""
    asked = {
        "get_weights_by_name": GetWeightsByNameReqInput(name="model.experts.w13_weight"),
        "scale_elastic_ep": ScaleElasticEPReqInput(new_ep_size=2),
    }
    lora = UnloadLoRAAdapterReqInput(lora_name="adapter")
    ours = SimpleNamespace(server_args=with_options(kt_num_gpu_experts=3))
    stock = SimpleNamespace(server_args=with_options())
    for hook in requests.entry_hooks():
        [operation] = hook.function.args
        message = asked.get(operation.name, lora)
        assert hook.function(lambda *args: "reached", stock, message) == "reached"
        try:
            answer = asyncio.run(hook.function(None, ours, message))
            said = answer if isinstance(answer, tuple) else (answer.success, answer)
            assert said[0] is False and "kt-moe does not support" in str(said[1]), operation
        except RequestRefused as error:
            assert f"kt-moe does not support {operation.name}: " in str(error)
    other = GetWeightsByNameReqInput(name="model.norm.weight")
    [reads] = [hook for hook in requests.entry_hooks() if "get_weights" in hook.target]
    assert reads.function(lambda *args: "reached", ours, other) == "reached"


if __name__ == "__main__":
    handler = logging.Handler()
    handler.emit = lambda record: LOG.append(record.getMessage())
    logging.getLogger("sglang.kt").addHandler(handler)
    logging.getLogger("sglang.kt").setLevel(logging.INFO)
    load_plugins()
    check_nothing_is_hooked_without_options()
    check_table(contract.CONTRACT)
    check_context("sglang", get_context_length)
    check_refused_arguments()
    check_arguments_that_need_more()
    check_every_request_is_known()
    check_hooks_on_arguments()
    check_options_install_the_hooks()
    check_every_entry_fails_in_its_own_way()
    check_starts_that_fail()
    check_shared_experts_stay_apart()
    check_kernels_skip_cold_experts()
    of_arguments.check_long_prompts_are_not_captured(LOG)
    of_arguments.check_sizes_by_the_gpu()
    of_arguments.check_how_a_draft_model_is_loaded()
    check_lost_hooks_are_noticed()
    sweeps.check_references_are_found_in_one_sweep()
    sweeps.check_the_registry_is_left_as_it_was()
    layers.check_padding()
    layers.check_draft_models()
    layers.check_models_of_transformers()
    layers.check_no_mask_that_nobody_fills()
    layers.check_hot_routes_are_int32()
    layers.check_packed_routes()
    layers.check_what_a_layer_may_be()
    delivery.check_hot_experts_are_delivered()
    delivery.check_random_weights()
    delivery.check_what_models_see_while_they_load()
    layers.check_other_experts()
    layers.check_activations_of_hot_experts_on_the_cpu()
    layers.check_what_models_ask()
    layers.check_scaling_is_applied_once()
    print("OK")
