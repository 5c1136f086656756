"""Runs in the SGLang environment: kt-moe together with another plugin, loaded before and after it,
and in processes that get the server arguments of another one.

The other plugin is in the folder other_plugin. Prints OK at the end. An assertion names what is
wrong.
"""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

# Tokenizer workers have already imported it.
import sglang.srt.managers.tokenizer_manager  # noqa: F401
from sglang.srt.layers.moe import kt_ep_wrapper
from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
from sglang.srt.managers.io_struct import CheckWeightsReqInput
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

import kt_kernel
from kt_kernel.serving.option_table import OptionError

DEMO_MODEL = str(Path(kt_kernel.__file__).parent / "demo_model")
OTHER = str(Path(__file__).parent / "other_plugin")


def checked(**fields: int) -> ServerArgs:
    server_args = ServerArgs(DEMO_MODEL, device="cpu", **fields)
    server_args.resolve_once()
    server_args.check_server_args()
    return server_args


def check_order(first: str) -> None:
    """Checks the order in which hooks are registered."""
    found = [source.plugin_name for hooks in HookRegistry._hooks.values() for *_, source in hooks]
    assert found[0] == first and set(found) == {"other", "kt_moe"}, found


def check_without_options(does: str) -> None:
    """The other plugin gets what it requests."""
    import sglang_other

    server_args = checked()
    assert not hasattr(server_args, "_kt_options")
    assert sglang_other.CALLS == ["arguments"]
    if does == "wrap":
        return
    modules = [kt_ep_wrapper, fused_moe] if does == "replace" else [kt_ep_wrapper]
    for module in modules:
        assert module.KTEPWrapperMethod.__name__ == "OtherMethod", module
    if does == "replace":
        assert fused_moe.create_kt_config_from_server_args(server_args, 0) == "other"


def check_a_taken_slot(does: str) -> None:
    try:
        checked(kt_num_gpu_experts=3)
        raise AssertionError("the other plugin's slot was taken")
    except OptionError as error:
        who = "the plugin other" if does == "replace" else "code of sglang_other"
        assert f"both {who} and kt-moe replace " in str(error), error
        assert "SGLANG_PLUGINS" in str(error) and "\n" not in str(error)
    assert kt_ep_wrapper.KTEPWrapperMethod.__name__ == "OtherMethod"


def check_both_wrap() -> None:
    import sglang_other

    server_args = checked(kt_num_gpu_experts=3)
    publish(server_args, role="scheduler")
    sglang_other.CALLS.clear()
    manager = SimpleNamespace(server_args=server_args)
    asked = TokenizerControlMixin.check_weights(manager, CheckWeightsReqInput())
    done, message, *_ = asyncio.run(asked)
    assert not done and "kt-moe does not support check_weights" in message
    layer = object.__new__(fused_moe.FusedMoE)
    with contextlib.suppress(Exception):  # there are no ranks
        fused_moe.FusedMoE.__init__(layer, 8, 64, 32, 0)
    assert sglang_other.CALLS[-1] == "layer", sglang_other.CALLS
    sglang_other.CALLS.clear()
    try:
        fused_moe.FusedMoE.__init__(layer, 8, 64, 32, 0, no_combine=True)
        raise AssertionError("one result per expert was accepted")
    except ValueError as error:
        assert "layer 0: one result per expert is not supported" in str(error)


def check(first: str, does: str) -> None:
    sys.path.insert(0 if first == "other" else len(sys.path), OTHER)
    os.environ["SGLANG_OTHER"] = does
    load_plugins()
    check_order(first)
    check_without_options(does)
    if does == "wrap":
        check_both_wrap()
    else:
        check_a_taken_slot(does)


def send(connection: Connection) -> None:
    """Runs in the main process of an engine."""
    load_plugins()
    connection.send_bytes(pickle.dumps(checked(kt_num_gpu_experts=3)))


def check_what_arrives(arguments: bytes, worker: bool) -> None:
    """Hooks are in effect in tokenizer workers, which load no plugins, and in a scheduler after it
    has loaded them."""
    server_args = pickle.loads(arguments)
    from kt_kernel.plugin_entrypoints.sglang import hooks, layer, options, requests, startup

    assert options.options_of(server_args).num_gpu_experts == 3
    assert all(map(hooks.in_effect, requests.entry_hooks()))
    everywhere = (*layer.worker_hooks(), *startup.HOOKS)
    assert not any(map(hooks.in_effect, everywhere))
    if worker:
        load_plugins()
        assert all(map(hooks.in_effect, everywhere))
        layer.verify_hooks()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # everything has been imported by now

    def run(function: Callable[..., None], *args: object) -> None:
        process = fork.Process(target=function, args=args)
        process.start()
        process.join()
        assert process.exitcode == 0, function

    run(check, "other", "replace")
    run(check, "kt_moe", "replace")
    run(check, "other", "assign")
    run(check, "kt_moe", "wrap")
    ours, theirs = fork.Pipe()
    run(send, theirs)
    arguments = ours.recv_bytes()
    for worker in (False, True):
        run(check_what_arrives, arguments, worker)
    print("OK")
