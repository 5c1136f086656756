"""kt tune on the CPU, with the demo model and without an engine."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outcome import failed
from tune_cases import CONTENT, DEMO_MODEL, SMALL

from kt_kernel.checkpoint.safetensors.families import FAMILIES
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.serving.server_process import ServerFailed
from kt_kernel.serving.tuned import Start
from kt_kernel.tuning import cpu, disturbance, plan, run, shape, small_engine
from kt_kernel.tuning.rates import HostRates
from kt_kernel.tuning.shape import as_config, shape_of

LAYERS_LESS = {"num_hidden_layers": CONTENT["num_hidden_layers"] - 3}
pytestmark = pytest.mark.usefixtures("quick")


def test_on_the_cpu(kt: Any, tmp_path: Path) -> None:
    code, out, err = kt("tune", DEMO_MODEL, *SMALL, "--methods", "BF16,AMXINT8")
    assert code == 0, err
    rows = [line for line in out.splitlines() if line.startswith("| ")][2:]
    methods = {row.split(" | ")[0][2:] for row in rows}
    assert methods == {"BF16", "AMXINT8", "INT4_G32"}
    assert sum("recommended" in row for row in rows) == 1
    assert all("--methods allows it" in row for row in rows if "INT4_G32" in row)
    assert f"vllm serve {DEMO_MODEL} --max-model-len 512 --max-num-seqs 1 --kt-" in out
    assert "there is no GPU" in out and "those of another machine" in out
    (file,) = (tmp_path / "config" / "kt-moe" / "tuned").iterdir()
    assert str(file) in err
    saved = json.loads(file.read_text())
    assert saved["device"] == "cpu" and saved["options"]["method"] in ("BF16", "AMXINT8")
    served = ServedModel(str(DEMO_MODEL), device="cpu")
    options = prepare(KTOptions(), SimpleNamespace(**CONTENT), served)
    assert options.method == saved["options"]["method"]


def test_on_a_busy_machine(kt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says so, the file is marked, and so is a start that uses it."""
    given = "tune", DEMO_MODEL, *SMALL, "--methods", "AMXINT8"
    for doubt in (None, "other processes used 40% of the CPUs during the measurement"):
        monkeypatch.setattr(disturbance, "disturbance", lambda *times, doubt=doubt: doubt)
        code, out, err = kt(*given)
        assert code == 0, err
        (file,) = (tmp_path / "config" / "kt-moe" / "tuned").iterdir()
        marked = json.loads(file.read_text())["disturbed"]
        served = ServedModel(str(DEMO_MODEL), device="cpu")
        started = prepare(KTOptions(), SimpleNamespace(**CONTENT), served).describe()
        assert started.count("measured on a busy machine (kt tune, ") == (doubt is not None)
        assert err.count("marked as measured on a busy machine") == (doubt is not None)
        if doubt is None:
            assert marked == {} and "Disturbed" not in out
            continue
        assert marked["memory"] == doubt and any("AMXINT8" in what for what in marked)
        named = "; ".join(f"{doubt} of {what}" for what in marked)
        assert len(marked) > 1
        assert out.count(f"Disturbed: {named}. Times may be wrong: end what else") == 1
        assert json.loads(kt(*given, "--no-save", "--json")[1])["disturbed"] == marked


def test_with_a_gpu(kt: Any, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "DEFAULT_MEMORY", 16 << 20)
    given = "tune", DEMO_MODEL, *SMALL, "--json", "--engine", "sglang", "--methods", "INT4_G32"
    code, out, err = kt(*given, "--gpu-memory", "5GB")
    found = json.loads(out)
    assert code == 0, err
    assert found["command"].startswith("python -m sglang.launch_server --model-path ")
    assert "--mem-fraction-static 0.150" in found["command"]  # 2 of 5 GB are SGLang's own
    assert found["options"]["num_gpu_experts"] == CONTENT["num_experts"]
    assert "all experts fit on the GPU" in found["why"]
    # The engine takes 2 GiB, streaming 16 MiB, an expert of 8 layers 1.5, the rest about 10.
    code, out, _ = kt(*given, "--gpu-memory", "2076MB", "--no-save")
    some = json.loads(out)["options"]["num_gpu_experts"]
    assert 0 < some < CONTENT["num_experts"]
    code, out, _ = kt(*given, "--gpu-memory", "2068MB", "--no-save")
    assert "no hot expert fits" in json.loads(out)["why"]
    packed = json.loads(
        kt(*given, "--gpu-memory", "2076MB", "--hot-format", "packed", "--no-save")[1]
    )
    assert packed["options"]["hot_format"] == "packed"
    assert packed["options"]["num_gpu_experts"] > 3 * some
    assert {one["method"] for one in packed["candidates"]} == {"INT4_G32", "AMXINT8"}
    assert "--kt-hot-format packed" in packed["command"]
    (file,) = (tmp_path / "config" / "kt-moe" / "tuned").iterdir()
    assert json.loads(file.read_text())["options"] == found["options"]
    # A start with the same context has as many hot experts, and one with less memory has none.
    for share, count in ((None, 16), (0.15, 16), (0.001, None)):
        served = ServedModel(str(DEMO_MODEL), start=Start("sglang", 512, share))
        options = prepare(KTOptions(), SimpleNamespace(**CONTENT), served)
        assert options.num_gpu_experts == count, share


def test_on_several_gpus(
    kt: Any, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of hot experts is that of one GPU, so the memory for them is recommended, which
    counts for each GPU; a start takes no number from the file."""
    monkeypatch.setattr(plan, "DEFAULT_MEMORY", 16 << 20)
    given = "tune", DEMO_MODEL, *SMALL, "--methods", "INT4_G32", "--gpu-memory", "2076MB"
    one = json.loads(kt(*given, "--json", "--no-save")[1])
    assert one["not_predicted"] == []
    speculation = """-sc '{"method": "ngram"}'"""
    given += "--engine-args", f"--tp-size=2 {speculation}"
    two = json.loads(kt(*given, "--json")[1])
    assert "num_gpu_experts" not in two["options"] and "--kt-num-gpu-experts" not in two["command"]
    words = shlex.split(two["command"])
    memory = words[words.index("--kt-gpu-experts-memory") + 1]
    options = KTOptions.from_mapping({"gpu_experts_memory": memory})
    [chosen] = [
        row["gpu_bytes"]
        for row in one["candidates"]
        if row["num_gpu_experts"] == one["options"]["num_gpu_experts"]
        and row["method"] == "INT4_G32"
        and row["threads"] == one["options"].get("cpuinfer")
        and row["deferred"] == 0
    ]
    assert 0.98 * chosen < (options.gpu_experts_memory or 0) <= chosen
    assert "as many hot experts as fit into what one GPU has left" in two["why"]
    (file,) = (tmp_path / "config" / "kt-moe" / "tuned").iterdir()
    saved = json.loads(file.read_text())
    assert saved["need"] is None and "num_gpu_experts" not in saved["options"]
    out = kt(*given, "--no-save")[1]
    assert out.count("Not in the predictions: --tensor-parallel-size 2 (") == 1
    assert "); -sc (a step gives one token" in out


def test_what_does_not_fit(kt: Any, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failed(
        kt("tune", DEMO_MODEL, *SMALL, "--gpu-memory", "1GB"),
        1,
        "takes 2.01GB of the GPU without any expert",
        "it may take 1GB;",
    )
    monkeypatch.setattr(run, "available_memory", lambda: 1 << 20)
    result = kt("tune", DEMO_MODEL, *SMALL, "--gpu-memory", "2068MB")
    assert result[0] == 1 and result[1] == ""
    last = result[2].splitlines()[-1]
    assert last.startswith("kt: error: the cold experts take 6.75MB of memory in INT4_G32"), last


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["/no/such/model"], ["no such folder"]),
        ([DEMO_MODEL, "--engine", "llama"], ["--engine llama: unknown engine; accepted: vllm"]),
        ([DEMO_MODEL, "--methods", "INT3"], ["--methods INT3: unknown method; accepted: BF16"]),
        ([DEMO_MODEL, "--methods", "FP8"], ["--methods FP8: it keeps quantised weights"]),
        ([DEMO_MODEL, "--gpu-memory", "much"], ["--gpu-memory much: expected a size in MB or GB"]),
        ([DEMO_MODEL, "--hot-format", "int3"], ["--kt-hot-format int3: unknown; accepted: auto"]),
        ([DEMO_MODEL, "--prompt", 2048], ["--prompt 2048: with --context 2048, at most 2046"]),
        ([DEMO_MODEL, "--kt-expert-stats", "/none"], ["/none: no such file"]),
        ([DEMO_MODEL, "--methods", ","], ["--methods ,: expected names such as INT4_G32"]),
        ([DEMO_MODEL, "--answer", 2048], ["--answer 2048: with --context 2048, at most 2047"]),
        ([""], ["the model's name is empty; expected a folder or a repository"]),
        ([DEMO_MODEL / "config.json"], ["config.json: a file; expected the model's folder"]),
        ([DEMO_MODEL, "--engine-args", "'x"], ["--engine-args 'x: No closing quotation"]),
        (
            [DEMO_MODEL, "--engine-args", "--max_model_len=9"],
            ["--engine-args --max_model_len=9: kt tune gives it by its own option --context"],
        ),
        (
            [DEMO_MODEL, "--engine", "sglang", "--engine-args", "--max-running-requests 9"],
            ["--engine-args --max-running-requests: kt tune gives it", "option --streams"],
        ),
        ([DEMO_MODEL, "--engine-args", "--kt-method BF16"], ["--kt-method: kt tune chooses kt"]),
        ([DEMO_MODEL, "--engine-args", "--ssl-certfile x"], ["--ssl-certfile: kt tune asks its"]),
        ([DEMO_MODEL, "--engine-args", "--hf-overrides " + 9999 * "["], ["not valid JSON"]),
    ],
)
def test_bad_input(kt: Any, given: list[Any], words: list[str]) -> None:
    failed(kt("tune", *given), 1, *words)


def test_more_memory_than_the_gpu_has(kt: Any, gpu: None) -> None:
    given = "tune", DEMO_MODEL, *SMALL, "--gpu-memory", "21GB"
    failed(kt(*given), 1, "--gpu-memory 21GB: the GPU has 20GB")
    for name in ("--gpu-memory-utilization", "--device_memory_utilization"):  # vLLM has two
        more = "--engine-args", f"{name}=0.5"
        failed(kt(*given[:-2], *more), 1, "--gpu-memory-utilization 0.5: with a GPU, give --gpu-m")


def test_other_programs_use_the_gpu(kt: Any, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is told to take what they leave."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 << 30, 20 << 30))
    given = "tune", DEMO_MODEL, *SMALL, "--methods", "INT4_G32", "--no-save"
    code, out, err = kt(*given, "--json")
    assert code == 0 and "the GPU has 20GB, of which 6GB are free" in err
    assert "--gpu-memory-utilization 0.285" in json.loads(out)["command"]
    failed(kt(*given, "--gpu-memory", "7GB"), 1, "7GB: the GPU has 20GB, of which 6GB are free")
    # What is said to be free is accepted.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((6 << 30) + 1, 20 << 30))
    failed(kt(*given, "--gpu-memory", "7GB"), 1, "of which 6GB are free")
    assert kt(*given, "--gpu-memory", "6GB")[0] == 0


def test_a_context_above_the_models_own(kt: Any, tmp_path: Path) -> None:
    most = CONTENT["max_position_embeddings"]
    failed(
        kt("tune", DEMO_MODEL, "--context", most + 1),
        1,
        f"--context {most + 1}: vllm serves {DEMO_MODEL} with at most {most} tokens "
        f"(its configuration: max_position_embeddings {most}); ",
        '--engine-args "--hf-overrides ..." changes that, and VLLM_ALLOW_LONG_MAX_MODEL_LEN=1',
    )
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    longer = "tune", tmp_path, "--context", most + 1, "--no-save", "--engine"
    failed(
        kt(*longer, "sglang", "--engine-args", "--hf-overrides={}"),
        1,
        "sglang serves",
        "--json-model-override-args ...",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
    )
    # The engine's own arguments may change the limit.
    for engine, flag in (("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")):
        for changes in ({"max_position_embeddings": most + 1}, {"rope_scaling": {"factor": 9}}):
            given = shlex.join([flag, json.dumps(changes)])
            result = kt(*longer, engine, "--engine-args", given)
            assert result[0] == 0, result
    fewer = "--hf-overrides.max_position_embeddings", str(most - 1)
    failed(
        kt("tune", DEMO_MODEL, "--context", most, "--engine-args", shlex.join(fewer)),
        1,
        f"with at most {most - 1} tokens",
    )
    _, out, _ = kt("tune", DEMO_MODEL, "--no-save", "--json", "--context", 128)
    assert json.loads(out)["assumed"]["goal"]["answer"] == 127
    # By default, requests are as long as the model can have them.
    _, out, _ = kt("tune", DEMO_MODEL, "--no-save", "--json")
    assumed = json.loads(out)["assumed"]
    assert (assumed["context"], assumed["goal"]["prompt"]) == (most, most - 2)


def test_the_users_changes_of_the_model_count(kt: Any, tmp_path: Path) -> None:
    """A start with the same changes finds the options, and one without them does not."""
    changes = {"num_hidden_layers": 3, "num_experts_per_tok": 2}
    by_key = [f"--hf-overrides.{key}={value}" for key, value in changes.items()]
    words = {"vllm": by_key, "sglang": ["--json-model-override-args", json.dumps(changes)]}
    for engine, given in words.items():
        code, out, err = kt(
            *("tune", DEMO_MODEL, *SMALL, "--engine", engine),
            *("--engine-args", shlex.join(given), "--methods", "AMXINT8"),
        )
        assert code == 0 and "3 layers with 16 experts of 256 x 128, 2 per token" in err, err
        (file,) = (tmp_path / "config" / "kt-moe" / "tuned").iterdir()
        for content, method in ((CONTENT | changes, "AMXINT8"), (CONTENT, "INT4_G32")):
            served = ServedModel(str(DEMO_MODEL), device="cpu")
            options = prepare(KTOptions(), SimpleNamespace(**content), served)
            assert options.method == method, engine
        file.unlink()
    failed(
        kt("tune", DEMO_MODEL, "--engine-args", "--hf-overrides {"),
        1,
        "--engine-args --hf-overrides {: not valid JSON",
    )


def test_layers_that_are_not_served_take_no_memory() -> None:
    """A checkpoint also has those of multi-token prediction, or that a change leaves out."""
    whole, fewer = (plan.find_model(str(DEMO_MODEL), one).shape for one in ({}, LAYERS_LESS))
    layers = CONTENT["num_hidden_layers"]
    assert fewer.layers == len(fewer.moe_layers) == layers - 3
    assert fewer.layer_bytes / whole.layer_bytes == pytest.approx(1 - 3 / layers, rel=0.01)
    assert whole.rest_bytes - fewer.rest_bytes == whole.layer_bytes - fewer.layer_bytes
    text = {"text_config": CONTENT, "model_type": "multimodal"}
    changed = as_config(text, {"text_config": LAYERS_LESS, "num_experts": 1})
    assert (changed.num_hidden_layers, changed.num_experts) == (layers - 3, CONTENT["num_experts"])
    assert shape_of("demo", changed) == shape_of("demo", as_config(CONTENT | LAYERS_LESS))


def test_a_method_that_does_not_fit_the_model(kt: Any, tmp_path: Path) -> None:
    narrow = CONTENT | {"moe_intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    failed(
        kt("tune", tmp_path, "--methods", "INT4_G128"),
        1,
        "--methods INT4_G128: experts of 256 x 96 are not multiples of 128",
    )


def test_a_failed_check_saves_nothing(
    kt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*given: Any) -> None:
        raise ServerFailed("the server exited")

    monkeypatch.setattr(run, "engine_of", lambda wishes: ("vllm", True))
    monkeypatch.setattr(run, "check", check)
    given = "tune", DEMO_MODEL, *SMALL
    code, out, err = kt(*given)
    assert code == 0 and "Recommended" in out
    assert "the check failed: the server exited" in err
    assert "not saved, because the check failed; --no-check saves them" in err
    assert not (tmp_path / "config").exists()
    assert "saved to" in kt(*given, "--no-check")[2]

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "check", interrupted)
    code, out, _ = kt(*given)  # what was measured until then is not lost
    assert code == 130 and "Recommended" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["config.json: not valid JSON"]),
        ("[1]", ["config.json: list, expected a JSON object"]),
        ("{}", ["class SimpleNamespace: its configuration has no number of experts (num_experts"]),
        ({"num_experts": 10**9}, ["number of experts 1000000000; accepted: 1 to 65536"]),
        ({"num_hidden_layers": 10**7}, ["num_hidden_layers 10000000; accepted: 1 to 10000"]),
        ({"num_experts_per_tok": 17}, ["num_experts_per_tok 17; accepted: 1 to 16"]),
        ({"hidden_size": 1 << 20}, ["hidden_size 1048576; accepted: 1 to 65536"]),
        (
            {"hidden_size": 1 << 16, "moe_intermediate_size": 1 << 16, "num_hidden_layers": 1},
            ["measuring the CPU takes ", "of memory for 8 experts, and 1GB are available"],
        ),
    ],
)
def test_bad_configurations(
    kt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Any, words: list[str]
) -> None:
    """Each is refused before it takes memory."""
    monkeypatch.setattr(cpu, "available_memory", lambda: 1 << 30)
    content = text if isinstance(text, str) else json.dumps(CONTENT | text)
    (tmp_path / "config.json").write_text(content)
    code, out, err = kt("tune", tmp_path, "--no-save")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"kt: error: {tmp_path}"), last
    for word in words:
        assert word in last, last


def test_a_folder_that_cannot_be_written_is_said_first(
    kt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    failed(kt("tune", DEMO_MODEL, *SMALL), 1, f"{tmp_path / 'file'}: Not a directory")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    failed(kt("tune", DEMO_MODEL, *SMALL), 1, f"{tmp_path}: Permission denied")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    failed(
        kt("tune", DEMO_MODEL, *SMALL), 1, "home directory. Set XDG_CONFIG_HOME, or give --no-save"
    )
    assert kt("tune", DEMO_MODEL, *SMALL, "--no-save")[0] == 0


def test_a_model_without_experts(kt: Any, tmp_path: Path) -> None:
    dense = CONTENT | {"num_experts": None, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    failed(kt("tune", tmp_path), 1, f"{tmp_path}: model class LlamaForCausalLM", "no number of")


def test_sizes_of_a_model() -> None:
    tuned = plan.find_model(str(DEMO_MODEL))
    with_files, config = tuned.shape, as_config(CONTENT)
    estimated = shape_of("demo", config)
    assert with_files.kv_bytes == estimated.kv_bytes
    assert estimated.rest_bytes == pytest.approx(with_files.rest_bytes, rel=0.05)
    file_bytes = (DEMO_MODEL / "model.safetensors").stat().st_size
    experts = with_files.expert_weights * CONTENT["num_experts"] * len(with_files.moe_layers) * 2
    assert with_files.rest_bytes + experts == pytest.approx(file_bytes, rel=0.01)
    latent = as_config(CONTENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert shape_of("demo", latent).kv_bytes == CONTENT["num_hidden_layers"] * 576 * 2
    text = {"text_config": CONTENT, "model_type": "multimodal"}
    for content in (text, {"thinker_config": text}):
        assert shape_of("demo", as_config(content)) == shape_of("demo", config)


@pytest.mark.parametrize(
    ("more", "reach"),
    [
        ({}, "FFFF"),
        ({"full_attention_interval": 4}, "000F"),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 5}, "000F"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}, "9F9F"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "FFFF"),
        ({"layers_block_type": ["mamba", "attention", "moe", "mamba"]}, "0F00"),
        ({"hybrid_override_pattern": "M*E-"}, "0F00"),
        # As transformers 5 writes it.
        (
            {
                "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
                "num_hidden_layers": None,
            },
            "0F00",
        ),
        ({"layer_types": ["full_attention"]}, "FFFF"),  # too short
    ],
)
def test_how_far_layers_attend(more: dict[str, Any], reach: str) -> None:
    content = CONTENT | {"num_hidden_layers": 4} | more
    if more.keys() & {"layers_block_type", "hybrid_override_pattern"}:
        content.pop("decoder_sparse_step")
    found = shape_of("demo", as_config(content))
    assert found.reach == tuple(math.inf if c == "F" else float(c) for c in reach)
    cache = shape_of("demo", as_config(CONTENT | {"num_hidden_layers": 4})).kv_bytes
    assert found.kv_bytes * 4 == cache * sum(map(bool, found.reach))


def test_keys_with_two_parts() -> None:
    """Multi-head latent attention: a head's keys have 128 + 64 values, its values 128."""
    parts = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": None}
    found = shape_of("demo", as_config(CONTENT | parts | {"num_attention_heads": 16}))
    assert found.attention == 16 * (192 + 128) / 2


def test_names_of_routed_experts() -> None:
    """No expert counts as a weight besides the experts."""
    named: list[str] = []
    for family in FAMILIES.values():
        named += [f"{experts}.0.up_proj.weight" for experts in family.experts]
        named += [name for stack in family.stacked for name in stack.names().values()]
    for name in named:
        assert shape._ROUTED.search(f"model.layers.0.{name}"), name
    for name in ("mlp.shared_experts.up_proj", "mlp.gate", "block_sparse_moe.router.layer"):
        assert not shape._ROUTED.search(f"model.layers.0.{name}.weight"), name


def test_host_rates_are_plausible() -> None:
    rates = HostRates(*cpu.host_rates())
    assert 1e8 < rates.bandwidth < 1e13 and 1e7 < rates.flops < 1e15


def test_an_engine_is_measured_within_what_was_asked_for(
    kt: Any, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a longer context nor more of the GPU than the user gave."""
    plans = []

    def serving(plan: Any, *given: Any) -> Any:
        plans.append(plan)
        raise ServerFailed("the server exited")

    monkeypatch.setattr(run, "engine_of", lambda wishes: ("vllm", True))
    monkeypatch.setattr(small_engine, "serving", serving)
    monkeypatch.setattr(run, "serving", serving)
    given = "tune", DEMO_MODEL, *SMALL, "--gpu-memory", "10GB"
    code, out, err = kt(*given)
    assert code == 0 and "its usual times are taken" in err and "the check failed" in err
    measured, checked = plans
    assert (measured.context, measured.memory) == (512, 0.5)
    assert measured.overrides is not None and measured.overrides["num_hidden_layers"] == 8
    assert (checked.context, checked.memory, checked.overrides) == (512, 0.5, None)
    assert measured.options is None and "num_gpu_experts" in checked.options
    kt(*given, "--context", 140)
    assert len(plans) == 3  # too short to measure the engine
    # With long prompts, attention's own rate is measured, too.
    longer = "--engine-args", "--hf-overrides.max_position_embeddings=99999", "--no-check"
    for context, prompt, measured_context in ((16384, 8192, 8192), (65536, 9000, 32768)):
        kt("tune", DEMO_MODEL, *longer, "--context", context, "--prompt", prompt)
        assert plans[-1].context == measured_context
