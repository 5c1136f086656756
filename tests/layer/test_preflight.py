"""Options against a model's configuration: what a worker would refuse is refused in one line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import kt_kernel
from kt_kernel.serving.model_config import moe_layers, num_experts
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.testing import quantise
from kt_kernel.weights.formats import FP8_ROW, WeightForm

DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
SERVED = ServedModel(str(DEMO_MODEL))


def check(options: dict[str, Any], **changes: Any) -> str:
    """The error, "" without one."""
    try:
        prepare(KTOptions.from_mapping(options), SimpleNamespace(**CONFIG | changes), SERVED)
    except OptionError as error:
        return str(error)
    return ""


def test_accepted() -> None:
    assert check({}) == ""
    assert check({"weight_path": str(DEMO_MODEL), "num_gpu_experts": 4, "cpuinfer": 1}) == ""
    assert check({"weight_path": str(DEMO_MODEL)}, num_hidden_layers=4) == ""
    assert check({"gpu_experts_ratio": 0}) == check({"gpu_experts_ratio": 0.0625}) == ""
    total = {"gpu_experts_ratio": 0.0079, "expert_placement_strategy": "front-loading"}
    assert check(total) == ""


@pytest.mark.parametrize(
    ("options", "changes", "line"),
    [
        ({"threadpool_count": 65}, {}, "--kt-threadpool-count 65: threadpool_count=65; accepted"),
        ({"cpuinfer": 5000}, {}, "--kt-cpuinfer 5000: cpuinfer_threads=5000; accepted: 1 to"),
        (
            {"num_gpu_experts": 17},
            {},
            "--kt-num-gpu-experts 17: the model has 16 experts",
        ),
        (
            {"method": "INT4_G128"},
            {"moe_intermediate_size": 96},
            "--kt-method INT4_G128: moe_intermediate_size=96 is not divisible",
        ),
        (
            {"gpu_experts_ratio": 0.06},
            {},
            "--kt-gpu-experts-ratio 0.06: of 16 experts per layer, that is none; accepted: 0, or "
            "at least 0.0625",
        ),
        (
            {"gpu_experts_ratio": 0.007, "expert_placement_strategy": "front-loading"},
            {},
            "--kt-gpu-experts-ratio 0.007: of 128 experts of all layers, that is none; accepted: "
            "0, or at least 0.0079",
        ),
        ({}, {"num_experts": 70000}, "num_experts=70000; accepted"),
        ({}, {"num_experts": None}, "model class Qwen3MoeForCausalLM: its configuration has no"),
    ],
)
def test_refused(options: dict[str, Any], changes: dict[str, Any], line: str) -> None:
    assert check(options, **changes).startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_experts": 8}, "the last of 16 experts"),
        ({"hidden_size": 128}, "has shape [128, 256]; expected [128, 128]"),
        ({"moe_intermediate_size": 96}, "has shape [128, 256]; expected [96, 256]"),
        ({"num_hidden_layers": 9}, "layer 8 has no experts; layers with experts: 0-7"),
    ],
)
def test_weights_of_another_model(changes: dict[str, Any], line: str) -> None:
    error = check({"weight_path": str(DEMO_MODEL)}, **changes)
    assert error.startswith(f"--kt-weight-path {DEMO_MODEL}: ") and line in error, error


def test_folder_without_weights(tmp_path: Path) -> None:
    error = check({"weight_path": str(tmp_path)})
    assert error.startswith(f"--kt-weight-path {tmp_path}: ") and "safetensors" in error


@pytest.mark.parametrize(
    "variable", ["KT_KERNEL_CPU_VARIANT", "KT_KERNEL_KIND", "KT_WATCHDOG_SECONDS"]
)
def test_environment_variables(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "bogus")
    assert check({}).startswith(f"{variable}=bogus")


def test_sizes_under_other_names() -> None:
    mixtral = SimpleNamespace(
        num_local_experts=8,
        num_experts_per_tok=2,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
    )
    assert num_experts(mixtral) == 8 and moe_layers(mixtral) == [2]
    with pytest.raises(OptionError, match="moe_intermediate_size=96 is not divisible"):
        prepare(KTOptions(method="INT4_G128"), mixtral, SERVED)
    prepare(KTOptions(method="INT4_G128"), SimpleNamespace(n_routed_experts=8), SERVED)


def test_layers_with_experts() -> None:
    def layers(**config: Any) -> list[int]:
        return moe_layers(SimpleNamespace(num_hidden_layers=6, **config))

    assert layers(decoder_sparse_step=1, mlp_only_layers=[]) == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[5]) == [1, 3]
    assert layers(first_k_dense_replace=2) == [2, 3, 4, 5]
    assert layers(first_k_dense_replace=1, moe_layer_freq=2) == [2, 4]


def quantised_copy(folder: Path) -> Path:
    """The demo model's first layer, its experts in FP8 with one scale per row."""
    tensors = {}
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if ".experts." in name:
                matrix = quantise(file.get_tensor(name), WeightForm(FP8_ROW))
                tensors[name] = matrix.codes
                tensors[name + "_scale"] = matrix.scale
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_method_and_checkpoint_that_disagree(tmp_path: Path) -> None:
    path = quantised_copy(tmp_path)
    assert check({"weight_path": str(path), "method": "FP8_PERCHANNEL"}) == ""
    assert check({"weight_path": str(path), "method": "AMXINT8"}) == ""
    error = check({"weight_path": str(path), "method": "FP8"})
    assert error.startswith(f"--kt-weight-path {path}: ") and "FP8_PERCHANNEL reads;" in error
    error = check({"weight_path": str(DEMO_MODEL), "method": "MXFP4"})
    assert error.startswith(f"--kt-weight-path {DEMO_MODEL}: ") and "not quantised (BF16)" in error
    error = check({"method": "MXFP4"})
    assert error.startswith("--kt-method MXFP4 needs quantised weights, but the served")


def test_sizes_that_do_not_suit_the_method() -> None:
    error = check({"weight_path": str(DEMO_MODEL), "method": "MXFP4"}, moe_intermediate_size=80)
    assert error.startswith("--kt-method MXFP4: moe_intermediate_size=80 is not divisible by")


def test_a_class_that_the_engine_loads_in_its_own_way() -> None:
    """All experts are read from the served model, also where it is not quantised."""
    config, options = SimpleNamespace(**CONFIG), KTOptions(num_gpu_experts=2)
    assert prepare(options, config, SERVED).weight_path is None
    made = prepare(options, config, replace(SERVED, own_loading=True))
    assert made.weight_path == str(DEMO_MODEL) and made.reads_hot and made.method == "INT4_G32"


def test_packed_experts_with_another_activation() -> None:
    packed = {"num_gpu_experts": 2, "hot_format": "packed", "method": "INT4_G32"}
    assert check(packed) == ""
    for changes in ({"hidden_act": "gelu"}, {"model_type": "llama4_text"}, {"swiglu_limit": 7.0}):
        assert check(packed, **changes).startswith("--kt-hot-format packed: the engines' kernels")


def test_gguf(tmp_path: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
    from gguf_models import Model

    model = Model(("Q8_0", "Q8_0", "Q4_0"), hidden=64, inter=32, layers=(0, 1))
    path = model.save(tmp_path / "m.gguf", split_max_tensors=3).parent
    config = {
        "num_experts": 3,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
    }
    options = {"weight_path": str(path), "method": "LLAMAFILE"}
    assert check(options, **config) == ""
    start = f"--kt-weight-path {path}: "
    error = check(options, **config | {"num_hidden_layers": 3})
    assert error.startswith(start) and "layer 2 has no experts" in error
    error = check(options, **config | {"num_experts": 4})
    assert error.startswith(start) and "ffn_gate_exps" in error and "3 experts of" in error
    error = check(options | {"method": "AMXINT8"}, **config)
    assert error.startswith(start) and "which only method LLAMAFILE reads" in error
    error = check(options | {"weight_path": str(DEMO_MODEL)})
    assert "method LLAMAFILE reads GGUF files" in error
