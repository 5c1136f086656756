"""Parts of sglang_hooks.py: what the plugin changes and refuses of SGLang's arguments."""

import dataclasses
import itertools
import json
import os
import pickle
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

from gptq_demo import DEMO_MODEL, write_gptq
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
from sglang.srt.runtime_context import get_exec, publish
from sglang.srt.server_args import ServerArgs

from kt_kernel.plugin_entrypoints.sglang import checks, options
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.tuning.batches import batch_tokens, captured_tokens

DEMO_EXPERTS = 16
BASE = ("--model-path", str(DEMO_MODEL), "--device", "cpu")


def check_how_a_draft_model_is_loaded() -> None:
    """As the served one if it has experts: weights that do not come from files are refused."""
    with tempfile.TemporaryDirectory() as folder:
        dense = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}
        (Path(folder) / "config.json").write_text(json.dumps(dense))
        for algorithm, draft, refused in (
            ("EAGLE", None, True),  # a part of the served model
            ("EAGLE", str(DEMO_MODEL), True),
            ("EAGLE", "/no/such/folder", True),
            ("EAGLE", folder, False),
            ("NGRAM", None, False),
        ):
            for form in ("dummy", "safetensors"):
                server_args = ServerArgs(str(DEMO_MODEL), device="cpu")
                server_args.resolve_once()
                declare_resolution(
                    server_args,
                    "test",
                    speculative_algorithm=algorithm,
                    speculative_draft_model_path=draft,
                    speculative_draft_load_format=form,
                )
                arguments, model = resolving_view(server_args), model_config_of(server_args)
                line = ""
                try:
                    checks.prepared(arguments, model, KTOptions(num_gpu_experts=3))
                except OptionError as error:
                    line = str(error)
                start = "--speculative-draft-load-format dummy: cold experts need their weights one"
                assert line.startswith(start) if refused and form == "dummy" else line == "", line


def check_long_prompts_are_not_captured(log: list[str]) -> None:
    """SGLang captures short prompts only, or those below a given threshold, and the log says so,
    unless the user chose which ones are captured, nothing can be streamed, or no expert is cold.
    Batches as long as those that are captured for decoding are not streamed, and stay captured."""
    sizes = [16, 256, 512, 2048, 8192]

    def outcome(
        flags: str = "",
        hot: int = 3,
        device: str = "cuda",
        decoding: int = 4,
        config: Mapping[str, Any] = MappingProxyType({}),
        **given: Any,
    ) -> Any:
        """Sizes that the worker captures, and the lines of the log about it."""
        log.clear()
        parser = ArgumentParser()
        ServerArgs.add_cli_args(parser)
        server_args = ServerArgs.from_cli_args(parser.parse_args([*BASE, *flags.split()]))
        server_args.resolve_once()
        graphs = resolving_view(server_args).cuda_graph_config
        prefill = dataclasses.replace(graphs.prefill, backend="breakable", bs=sizes, max_bs=8192)
        decode = dataclasses.replace(graphs.decode, backend="full", bs=[1, decoding])
        declare_resolution(
            server_args,
            "test",
            device=device,
            cuda_graph_config=dataclasses.replace(graphs, decode=decode, prefill=prefill),
        )
        checked = KTOptions.from_mapping({"num_gpu_experts": hot} | given)
        setattr(server_args, options.OPTIONS_KEY, checked.to_mapping())
        model_config_of(server_args).hf_text_config.update(config)
        checks.checked_options_of(server_args)
        publish(pickle.loads(pickle.dumps(server_args)), role="scheduler")
        prefill = get_exec().graph.cuda_graph_config.prefill
        assert prefill.backend == "disabled" or prefill.max_bs == max(prefill.bs)
        lines = [line for line in log if "--cuda-graph-max-bs-prefill" in line]
        return None if prefill.backend == "disabled" else prefill.bs, len(lines)

    assert outcome() == ([16, 256], 1)
    assert outcome(gpu_prefill_token_threshold=512) == ([16, 256], 1)
    assert outcome(gpu_prefill_token_threshold=4000) == ([16, 256, 512, 2048], 1)
    assert outcome(gpu_prefill_token_threshold=5) == (None, 1)
    assert outcome(decoding=512) == ([16, 256, 512], 1)
    assert outcome(decoding=256, gpu_prefill_token_threshold=5) == ([16, 256], 1)
    for memory, streams in ((141 << 30, 4), (180 << 30, 512)):  # what `kt tune` expects
        gpu: Any = SimpleNamespace(total=memory)
        expected = captured_tokens("sglang", gpu, streams, 8192, ())
        assert outcome(decoding=streams)[0][-1] == expected, (memory, streams)
    for unchanged in (
        outcome("--cuda-graph-max-bs-prefill 8192"),
        outcome("--cuda-graph-bs-prefill 16 8192"),
        outcome(hot=DEMO_EXPERTS),
        outcome(device="cpu"),
        outcome(gpu_prefill_token_threshold=0),
        outcome(gpu_prefill_token_threshold=8193),
        outcome(config={"swiglu_limit": 7.0}),
        outcome(config={"hidden_act": "gelu"}),
    ):
        assert unchanged == (sizes, 0)
    with tempfile.TemporaryDirectory() as folder:
        write_gptq(Path(folder), ordered=True)
        assert outcome(weight_path=folder, method="GPTQ_INT4") == (sizes, 0)
        assert outcome(weight_path=folder, method="AMXINT8") == ([16, 256], 1)
    os.environ["KT_KERNEL_KIND"] = "vector"
    assert outcome() == (sizes, 0)
    del os.environ["KT_KERNEL_KIND"]


def check_sizes_by_the_gpu() -> None:
    """`kt tune` knows which batches SGLang chooses by a GPU's memory and the number of requests."""
    for memory, streams in itertools.product((16, 24, 48, 80, 141, 180), (4, 40, 1000)):
        server_args = ServerArgs(str(DEMO_MODEL), device="cpu", max_running_requests=streams)
        server_args.resolve_once()
        graphs = resolving_view(server_args).cuda_graph_config
        # What SGLang chose for a CPU is taken back.
        decode = dataclasses.replace(graphs.decode, max_bs=None, bs=None)
        declare_resolution(
            server_args,
            "test",
            device="cuda",
            chunked_prefill_size=None,
            cuda_graph_config=dataclasses.replace(graphs, decode=decode),
        )
        with mock.patch.object(
            memory_hook, "get_device_memory_capacity", lambda device, memory=memory: memory << 10
        ):
            memory_hook.handle_gpu_memory_settings(server_args)
        arguments = resolving_view(server_args)
        gpu: Any = SimpleNamespace(total=memory << 30)
        batch = batch_tokens("sglang", gpu, ())
        assert batch == arguments.chunked_prefill_size, memory
        found = captured_tokens("sglang", gpu, streams, batch, ["--disable-prefill-cuda-graph"])
        assert found == arguments.cuda_graph_config.decode.max_bs, (memory, streams, found)
