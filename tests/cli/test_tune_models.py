"""What kt tune predicts for models whose experts are not plain 16-bit SwiGLU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_demo import write_gptq
from outcome import failed
from safetensors.torch import load_file, save_file
from tune_cases import CONTENT, DEMO_MODEL, SMALL

from kt_kernel import KTMoEWrapper
from kt_kernel.tuning import plan
from kt_kernel.tuning.arguments import OVERRIDES_FLAG

pytestmark = pytest.mark.usefixtures("quick")


def test_experts_that_an_engine_loads_in_its_own_way(kt: Any, gpu: None, tmp_path: Path) -> None:
    """As many are hot as fit in 16 bits, as the server holds them, and not in the model's FP8."""
    write_fp8(tmp_path / "model")
    weights = 3 * CONTENT["hidden_size"] * CONTENT["moe_intermediate_size"]
    given = "tune", tmp_path / "model", *SMALL, "--gpu-memory", "4200MB", "--no-save", "--json"
    scales = 4 / 128**2
    for name, engine, each in (
        ("Qwen3MoeForCausalLM", "vllm", 1 + scales),
        ("InklingForCausalLM", "vllm", 2),
        ("InklingForConditionalGeneration", "vllm", 2),
        ("InklingForCausalLM", "sglang", 1 + scales),
        ("GptOssForCausalLM", "vllm", 2),
        ("GptOssForCausalLM", "sglang", 2),
    ):
        changes = json.dumps({"architectures": [name]})
        more = "--engine-args", shlex.join([OVERRIDES_FLAG[engine], changes]), "--engine", engine
        code, out, err = kt(*given, *more)
        assert code == 0, err
        found = json.loads(out)
        bytes_of = {row["num_gpu_experts"]: row["gpu_bytes"] for row in found["candidates"]}
        assert bytes_of[2] == 2 * CONTENT["num_hidden_layers"] * weights * each, (name, engine)
        result = kt(*given, *more, "--hot-format", "engine")
        assert (result[0] == 0) == (each != 2), result
        if each == 2:
            line = "--kt-hot-format engine: the engine loads the experts of this class in its own"
            failed(result, 1, line)


def test_experts_without_a_gate(kt: Any, gpu: None, tmp_path: Path) -> None:
    """Nemotron-H's have two matrices: what is hot and cold takes as much as in the files."""
    layers, experts = CONTENT["num_hidden_layers"], CONTENT["num_experts"]
    tensors = {
        name.replace("model.", "backbone.").replace(".mlp.", ".mixer."): tensor
        for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items()
        if "gate_proj" not in name
    }
    save_file(tensors, tmp_path / "model.safetensors")
    content = {name: value for name, value in CONTENT.items() if name != "hidden_act"}
    del content["decoder_sparse_step"]
    changes = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}
    changes |= {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": layers * "E"}
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    given = "tune", tmp_path, *SMALL, "--methods", "BF16", "--no-save", "--json"
    code, out, err = kt(*given, "--gpu-memory", "4200MB")
    assert code == 0, err
    in_files = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    rows = [row for row in json.loads(out)["candidates"] if row["method"] == "BF16"]
    for row in rows:
        hot = row["num_gpu_experts"] / experts
        assert row["gpu_bytes"] == hot * in_files
        assert row["cpu_bytes"] == pytest.approx((1 - hot) * in_files, rel=0.01)
        assert row["streaming_from"] is None
    assert {row["num_gpu_experts"] for row in rows} > {0, 2}
    rest = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." not in name)
    found = plan.find_model(str(tmp_path)).shape
    assert (found.rest_bytes, found.kv_bytes, found.moe_layers) == (rest, 0, tuple(range(layers)))


def write_fp8(folder: Path) -> None:
    """The demo model with experts in FP8, with scales of blocks."""
    folder.mkdir()
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if ".experts." in name:
            rows, columns = (-(-size // 128) for size in tensor.shape)
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(rows, columns)
    save_file(tensors, folder / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    content = CONTENT | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "kind", "streamed"),
    [
        ({}, "", True),
        ({"hidden_act": "gelu"}, "", False),
        ({"model_type": "gpt_oss", "hidden_act": "gelu"}, "", True),
        ({}, "vector", False),
    ],
)
def test_which_prompts_are_predicted_as_streamed(
    kt: Any,
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    kind: str,
    streamed: bool,
) -> None:
    """Those of models whose experts the server streams."""
    if kind:
        monkeypatch.setenv("KT_KERNEL_KIND", kind)
    more = "--engine-args", shlex.join(["--hf-overrides", json.dumps(changes)])
    code, out, err = kt(
        *("tune", DEMO_MODEL, *SMALL, "--engine", "vllm", "--methods", "AMXINT8"),
        *("--no-save", "--json", *more),
    )
    assert code == 0, err
    rows = [row for row in json.loads(out)["candidates"] if row["num_gpu_experts"] == 0]
    assert rows and all((row["streaming_from"] is not None) == streamed for row in rows), rows


def test_memory_for_streamed_experts(kt: Any, gpu: None) -> None:
    """It is kept beside cold experts that may be streamed, and not where none is."""

    def hot(memory: str, *changes: str) -> tuple[set[int], str]:
        """The compared numbers of hot experts, and what the report says of the memory."""
        given = "tune", DEMO_MODEL, *SMALL, "--methods", "INT4_G32", "--no-save"
        given += "--engine", "vllm", "--gpu-memory", memory
        if changes:
            given += "--engine-args", shlex.join(["--hf-overrides", *changes])
        [line] = [line for line in kt(*given)[1].splitlines() if line.startswith("Memory: ")]
        rows = json.loads(kt(*given, "--json")[1])["candidates"]
        return {row["num_gpu_experts"] for row in rows}, line

    # The engine takes 2 GiB, an expert of 8 layers 1.5 MiB, the rest 5.4.
    without = "2GB for the engine, "
    kept = "4GB for the engine and for streaming, "
    everything, most = CONTENT["num_experts"], 9
    gelu = '{"hidden_act": "gelu"}'
    for memory, changes, counts, said in (
        ("2068MB", (), {0}, kept),
        ("2068MB", (gelu,), {0, 2, 4, 8, most}, without),
        ("2090MB", (), {0, everything}, without),
        ("2090MB", (gelu,), {0, 2, 4, 8, 12, everything}, without),
        ("4116MB", (), {0, 2, 4, 8, most, everything}, without),
    ):
        found, line = hot(memory, *changes)
        assert (found, said in line) == (counts, True), (memory, changes, found, line)


@pytest.mark.parametrize(("ordered", "group"), [(False, 32), (True, 32), (True, -1)])
def test_experts_in_the_order_of_their_activations(
    kt: Any, gpu: None, tmp_path: Path, ordered: bool, group: int
) -> None:
    """They are streamed by methods that quantise anew, and if their order is the usual one. One
    group per row has no other."""
    write_gptq(tmp_path, ordered, group)
    given = "tune", tmp_path, *SMALL, "--methods", "GPTQ_INT4,AMXINT8", "--no-save", "--json"
    code, out, err = kt(*given)
    assert code == 0, err
    streamed = {
        row["method"]: row["streaming_from"] is not None
        for row in json.loads(out)["candidates"]
        if row["num_gpu_experts"] == 0
    }
    assert streamed == {"GPTQ_INT4": not ordered or group < 0, "AMXINT8": True}
    for method, expected in streamed.items():  # what the server finds when it has loaded them
        layer = KTMoEWrapper(
            layer_idx=0,
            num_experts=CONTENT["num_experts"],
            num_experts_per_tok=CONTENT["num_experts_per_tok"],
            hidden_size=CONTENT["hidden_size"],
            moe_intermediate_size=CONTENT["moe_intermediate_size"],
            weight_path=str(tmp_path),
            method=method,
        )
        layer.load_weights(torch.arange(CONTENT["num_experts"]))
        if expected:
            layer.packed_experts()
            continue
        with pytest.raises(ValueError, match=r"columns are stored in another order \(act-order\)"):
            layer.packed_experts()


def test_experts_that_cannot_be_packed(kt: Any, gpu: None) -> None:
    given = "tune", DEMO_MODEL, *SMALL, "--hot-format", "packed", "--methods", "INT4_G32"
    more = "--engine-args", "--hf-overrides.hidden_act gelu"
    failed(kt(*given, *more), 1, "--kt-hot-format packed: the engines' kernels for packed weights")
