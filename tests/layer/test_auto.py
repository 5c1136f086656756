"""What is decided before an engine starts: the method, and where the cold experts come from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kt_kernel
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare

E, H, I, LAYERS = 4, 128, 128, 2  # noqa: E741
DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
SIZES = {
    "num_experts": E,
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "decoder_sparse_step": 1,
}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
UNQUANTISED = ServedModel(str(DEMO_MODEL))


def save(folder: Path, formats: list[str], quantised: bool = True, **names: Any) -> Path:
    """A model whose layers have experts in FP8 or BF16."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, kind in enumerate(formats):
        for expert in range(E):
            for projection in ("gate", "up", "down"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                weight = torch.ones(H, I)
                tensors[name] = weight.to(torch.float8_e4m3fn if kind == "FP8" else torch.bfloat16)
                if kind == "FP8":
                    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = SIZES | {"model_type": "qwen3_moe"} | names
    if quantised:
        config["quantization_config"] = FP8_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decide(served: ServedModel, **options: Any) -> KTOptions:
    return prepare(KTOptions.from_mapping(options), SimpleNamespace(**SIZES), served)


def error_of(served: ServedModel, **options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        decide(served, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return save(tmp_path / "fp8", ["FP8"] * LAYERS)


@pytest.mark.parametrize("options", [{}, {"method": "auto"}, {"method": None}])
def test_an_unquantised_model(options: dict[str, Any]) -> None:
    """Its weights come from the engine: nothing is read, wherever it is."""
    for path in (str(DEMO_MODEL), "some-org/not-downloaded"):
        decided = decide(ServedModel(path), **options)
        assert decided == KTOptions(method="INT4_G32")
        assert "kt: method INT4_G32 (auto: 16- or 32-bit weights), hot" in decided.describe()


def test_weights_elsewhere(fp8: Path) -> None:
    decided = decide(UNQUANTISED, weight_path=str(fp8), num_gpu_experts=1)
    assert decided == KTOptions(
        method="FP8", weight_path=str(fp8), num_gpu_experts=1, hot_format="engine"
    )
    assert "method FP8 (auto: FP8 with scales per 128x128 block), hot" in decided.describe()


def test_what_travels_is_what_was_decided(fp8: Path) -> None:
    """Workers make the options of the mapping, and decide nothing."""
    mapping = decide(UNQUANTISED, weight_path=str(fp8)).to_mapping()
    assert mapping == {"method": "FP8", "weight_path": str(fp8)}
    assert KTOptions.from_mapping(json.loads(json.dumps(mapping))).method == "FP8"


def test_a_relative_path(fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may run in another folder."""
    monkeypatch.chdir(fp8.parent)
    assert decide(UNQUANTISED, weight_path="fp8").weight_path == str(fp8)


def test_a_method_that_is_named(fp8: Path) -> None:
    for method in ("FP8", "AMXINT4"):
        decided = decide(UNQUANTISED, weight_path=str(fp8), method=method)
        assert decided.method == method and f"method {method}, hot" in decided.describe()
    error = error_of(UNQUANTISED, weight_path=str(fp8), method="RAWINT4")
    assert (
        error.startswith(f"--kt-weight-path {fp8}: ")
        and "method FP8 reads; method RAWINT4" in error
    )


def test_a_quantised_model_is_its_own_weight_path(fp8: Path) -> None:
    served = ServedModel(str(fp8), "fp8")
    assert decide(served) == KTOptions(method="FP8", weight_path=str(fp8))
    assert decide(served, method="AMXINT8") == KTOptions(method="AMXINT8", weight_path=str(fp8))
    assert decide(served, weight_path=str(fp8)).weight_path == str(fp8)
    assert f"cold weights from {fp8}" in decide(served).describe()


def test_a_quantised_model_with_unquantised_experts(tmp_path: Path) -> None:
    path = save(tmp_path / "attention only", ["BF16"] * LAYERS)
    assert decide(ServedModel(str(path), "fp8")).method == "INT4_G32"


def test_a_model_that_the_engine_quantises(tmp_path: Path) -> None:
    path = save(tmp_path / "bf16", ["BF16"] * LAYERS, quantised=False)
    error = error_of(ServedModel(str(path), "fp8"))
    assert error.startswith(f"served model {path}, quantised with fp8: {path} is not quantised, ")


def test_a_quantised_model_that_is_nowhere() -> None:
    error = error_of(ServedModel("nothing", "fp8"))
    assert error.startswith("served model nothing, quantised with fp8: no such file or folder, and")


def test_layers_that_differ(tmp_path: Path) -> None:
    path = save(tmp_path / "mixed", ["BF16", "FP8"])
    decided = decide(UNQUANTISED, weight_path=str(path))
    assert decided.method == "FP8"
    assert decided.reason is not None and "16- or 32-bit weights in layer 0" in decided.reason
    assert decide(UNQUANTISED, weight_path=str(path), method="INT4_G128").method == "INT4_G128"


def test_layers_that_predict_later_tokens_do_not_count(tmp_path: Path) -> None:
    path = save(tmp_path / "mtp", ["FP8"] * LAYERS + ["BF16"])
    assert decide(UNQUANTISED, weight_path=str(path)).method == "FP8"


def test_sizes_that_do_not_suit_the_method_chosen() -> None:
    config = SimpleNamespace(**SIZES | {"moe_intermediate_size": 80})
    with pytest.raises(OptionError) as caught:
        prepare(KTOptions(), config, UNQUANTISED)
    assert str(caught.value).startswith(
        "--kt-method INT4_G32 (selected for 16- or 32-bit weights): moe_intermediate_size=80 is not"
    )
    assert prepare(KTOptions(method="AMXINT4"), config, UNQUANTISED).method == "AMXINT4"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_gpu_experts": 99}, "--kt-num-gpu-experts 99: the model has 4"),
        ({"cpuinfer": 5000}, "--kt-cpuinfer 5000: "),
    ],
)
def test_other_options_are_checked_before_anything_is_fetched(
    options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kt_kernel.serving.preflight.local_path", lambda *given: pytest.fail("fetched")
    )
    for more, served in (
        ({"weight_path": "some-org/some-name"}, UNQUANTISED),
        ({}, ServedModel("some-org/some-name", "fp8")),
    ):
        assert error_of(served, **options, **more).startswith(line)


def test_a_layer_takes_no_undecided_method() -> None:
    with pytest.raises(
        ValueError, match="layer 3: method auto is not decided; call kt_kernel.serving.preflight"
    ):
        HybridLayer(
            KTOptions(),
            layer_idx=3,
            num_experts=E,
            num_experts_per_tok=2,
            hidden_size=H,
            moe_intermediate_size=I,
        )
