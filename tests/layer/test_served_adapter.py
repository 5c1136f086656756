"""--kt-expert-lora-path without an engine: what is merged into which weights, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_files import MODULE, Deltas, write
from safetensors.torch import load_file, save_file
from test_layer import E, H, batch, shape
from test_preflight import CONFIG, DEMO_MODEL, SERVED, quantised_copy

from kt_kernel.conversion import Request, convert, make_plan
from kt_kernel.serving.hot_packed import RowHot
from kt_kernel.serving.hot_weights import HotShape
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.testing import moe_reference, quantise, row_error, values_of
from kt_kernel.weights.expert_tensors import MATRICES
from kt_kernel.weights.formats import FP8_ROW, INT8_ROW, WeightForm

HOT, INNER = 2, 64
LAYER_SHAPE = shape(moe_intermediate_size=INNER)
OF_LAYER = {"experts": E, "hidden": H, "inter": INNER}
OF_DEMO = {
    "layers": range(8),
    "experts": CONFIG["num_experts"],
    "hidden": CONFIG["hidden_size"],
    "inter": CONFIG["moe_intermediate_size"],
    "size": 0.01,
}
Weights = dict[str, torch.Tensor]


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, INNER, H), "up": (E, INNER, H), "down": (E, H, INNER)}
    return {
        name: (torch.randn(size, generator=generator) / 8).bfloat16()
        for name, size in shapes.items()
    }


def changed(weights: Weights, deltas: Deltas) -> Weights:
    return {name: (weights[name].double() + deltas[3][name]).float() for name in MATRICES}


def layer_of(adapter: Path, hot: int = HOT, **options: Any) -> HybridLayer:
    given = {"num_gpu_experts": hot, "cpuinfer": 1, "expert_lora_path": str(adapter), **options}
    return HybridModel(KTOptions.from_mapping(given)).add_layer(**LAYER_SHAPE)


def load(layer: HybridLayer, weights: Weights) -> list[torch.Tensor]:
    """As an engine does; returns what it keeps of the hot experts."""
    hot = []
    for which in MATRICES:
        for expert, matrix in enumerate(weights[which]):
            if layer.slot_of(expert) < 0:
                layer.add_weight(expert, which, matrix)
            else:
                hot.append(layer.hot_weight(expert, which, matrix, torch.bfloat16))
    layer.finish_loading()
    return hot


def check_cold(layer: HybridLayer, wanted: Weights, plain: Weights) -> None:
    """The cold experts have these weights, and not the plain ones."""
    x, ids, router = batch(9)
    layer.submit(x, ids, router)
    y = layer.collect(x).double()
    mask = torch.arange(E) < HOT
    near, far = (
        moe_reference(
            x, ids, router, *w.values(), method=layer.options.method, gpu_experts_mask=mask
        )
        for w in (wanted, plain)
    )
    touched = near.abs().sum(-1) > 0
    assert row_error(y[touched], near[touched]).max() < 5e-3
    assert row_error(y[touched], far[touched]).min() > 0.2


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
def test_merged_as_the_engine_loads(
    method: str, layout: str, weights: Weights, tmp_path: Path
) -> None:
    """Rounded once: to the method's format, or to the engine's dtype."""
    wanted = changed(weights, write(tmp_path, layout=layout, **OF_LAYER))
    layer = layer_of(tmp_path, method=method)
    hot = load(layer, weights)
    check_cold(layer, wanted, weights)
    expected = [matrix for which in MATRICES for matrix in wanted[which][:HOT]]
    for found, want in zip(hot, expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert ((found.float() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
@pytest.mark.parametrize("stored", ["BF16", "FP8"])
def test_merged_from_files(method: str, stored: str, weights: Weights, tmp_path: Path) -> None:
    tensors, plain = {}, {name: w.clone() for name, w in weights.items()}
    for which in MATRICES:
        for expert, matrix in enumerate(weights[which]):
            name = f"model.layers.3.mlp.experts.{expert}.{which}_proj.weight"
            if stored == "FP8":
                codes = quantise(matrix, WeightForm(FP8_ROW))
                tensors |= {name: codes.codes, f"{name}_scale": codes.scale}
                plain[which][expert] = values_of(codes)
            else:
                tensors[name] = matrix.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    deltas = write(tmp_path / "adapter", **OF_LAYER)
    layer = layer_of(tmp_path / "adapter", method=method, weight_path=str(tmp_path))
    load(layer, weights)
    exact = {name: w.double() for name, w in plain.items()}
    if stored == "FP8":
        for which in MATRICES:
            for expert, matrix in enumerate(weights[which]):
                exact[which][expert] = values_of(quantise(matrix, WeightForm(FP8_ROW))).double()
    check_cold(layer, changed(exact, deltas), exact)


def test_an_adapter_of_one_parameter(weights: Weights, tmp_path: Path) -> None:
    """The other matrices stay as they are, to the bit."""
    wanted = changed(weights, write(tmp_path / "both", **OF_LAYER))
    both = load_file(tmp_path / "both" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    module = MODULE.format(3)
    for parameter, wrap, parts in (
        ("gate_up_proj", "base_layer.", ("gate", "up")),
        ("down_proj", "", ("down",)),
    ):
        path = tmp_path / parameter
        path.mkdir()
        tensors = {
            f"{module}.lora_{side}.weight": both[f"{module}.{wrap}lora_{side}.weight"]
            for side in "AB"
        }
        save_file(tensors, path / "adapter_model.safetensors")
        config["target_parameters"] = [f"experts.{parameter}"]
        (path / "adapter_config.json").write_text(json.dumps(config))
        kept = iter(load(layer_of(path, hot=E, method="BF16"), weights))
        for which in MATRICES:
            for expert in range(E):
                found = next(kept)
                if which in parts:
                    want = wanted[which][expert]
                    assert (found.float() - want).norm() < 2**-8 * want.norm()
                else:
                    assert found is weights[which][expert] or torch.equal(
                        found, weights[which][expert]
                    )


@pytest.mark.parametrize("hot", [0, HOT, E])
def test_a_loaded_layer_refuses_other_weights(hot: int, weights: Weights, tmp_path: Path) -> None:
    """With all experts hot, too: the new weights would lack the adapter."""
    write(tmp_path, **OF_LAYER)
    layer = layer_of(tmp_path, hot=hot, method="BF16")
    layer.refuse_reload("here")
    load(layer, weights)
    with pytest.raises(RuntimeError, match="here: weights arrive after loading was finished"):
        layer.refuse_reload("here")


def test_hot_weights_that_did_not_pass(weights: Weights, tmp_path: Path) -> None:
    """An engine that fills its weights in another way would serve them without the adapter."""
    write(tmp_path, **OF_LAYER)
    layer = layer_of(tmp_path, hot=E, method="BF16")
    for expert in range(E):
        for which in ("gate", "up"):
            layer.hot_weight(expert, which, weights[which][expert], torch.float32)
    with pytest.raises(ValueError, match="layer 3, expert 0, down: the engine loaded it in a way"):
        layer.finish_loading()
    with pytest.raises(ValueError, match=r"expert 1, down: .*\[64, 32\]; an adapter can be merged"):
        layer.hot_weight(1, "down", weights["down"][1][:, :32], torch.float32)
    with pytest.raises(
        ValueError, match=r"expert 1, down: torch.int8 .* merged into \[64, 64\] in"
    ):
        layer.hot_weight(1, "down", weights["down"][1].to(torch.int8), torch.float32)


def test_merged_before_hot_experts_are_packed(weights: Weights, tmp_path: Path) -> None:
    """They are rounded once, like the cold ones: to 8 bits, and not to bfloat16 before."""
    wanted = changed(weights, write(tmp_path, **OF_LAYER))
    layer = layer_of(tmp_path, method="AMXINT8")
    layer.hot = hot = RowHot("layer 3", HotShape(HOT, H, INNER), torch.device("cpu"))
    for which in MATRICES:
        for expert, matrix in enumerate(weights[which]):
            deliver = layer.add_weight if layer.slot_of(expert) < 0 else layer.put_hot
            deliver(expert, which, matrix)
    layer.finish_loading()
    for expert in range(HOT):
        want = quantise(wanted["down"][expert], WeightForm(INT8_ROW))
        torch.testing.assert_close(hot.s2[expert], want.scale.flatten(), rtol=1e-5, atol=0)


def test_layers_are_compared_at_the_end(weights: Weights, tmp_path: Path) -> None:
    """For models whose configuration does not tell which layers have experts."""
    write(tmp_path, layers=(3, 4), **OF_LAYER)
    options = {"method": "BF16", "num_gpu_experts": E, "expert_lora_path": str(tmp_path)}
    model = HybridModel(KTOptions.from_mapping(options))
    load(model.add_layer(**LAYER_SHAPE), weights)
    assert f"; adapter {tmp_path} merged into layers 3-4" in model.describe()
    with pytest.raises(ValueError, match="changes experts of layers 4; the model's layers .*: 3;"):
        model.finish_loading()
    load(model.add_layer(**LAYER_SHAPE | {"layer_idx": 4}), weights)
    model.finish_loading()
    assert model.loaded
    with pytest.raises(ValueError, match="layer 3: .*gate_up_proj is .*another model"):
        HybridModel(KTOptions.from_mapping(options)).add_layer(**shape(moe_intermediate_size=32))


# ---- what is refused before anything is loaded


def check(adapter: Path | str, served: ServedModel = SERVED, config: Any = None, **options: Any):
    """The error, or the options as the workers get them."""
    given = KTOptions.from_mapping({"expert_lora_path": str(adapter), **options})
    try:
        return prepare(given, SimpleNamespace(**CONFIG | (config or {})), served)
    except OptionError as error:
        assert "\n" not in str(error)
        return str(error)


def test_accepted(tmp_path: Path) -> None:
    for layout in ("fused", "per_expert"):
        write(tmp_path / layout, layout=layout, **OF_DEMO)
        for hot in (0, 4, CONFIG["num_experts"]):
            options = check(tmp_path / layout, num_gpu_experts=hot)
            assert options.method == "INT4_G32"
            assert options.expert_lora_path == str(tmp_path / layout)
            assert f", adapter {tmp_path / layout}" in options.describe()
    some = OF_DEMO | {"layers": (2, 5)}
    write(tmp_path / "some", layers_to_transform=[2, 5], **some)
    assert isinstance(check(tmp_path / "some"), KTOptions)
    write(tmp_path / "named", target_modules=r".*layers\\.(2|5)\\.mlp\\.experts.*", **some)
    assert isinstance(check(tmp_path / "named"), KTOptions)
    assert isinstance(check(tmp_path / "some", weight_path=str(DEMO_MODEL)), KTOptions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": range(9)}, "changes experts of layers 8; the model's layers with experts: 0-7"),
        ({"layers": range(7)}, "has no tensors for layers 7; .* or adapter_config.json lacks lay"),
        ({"experts": 8}, "the model has 16 experts per layer, but gate_up_proj has 32 rows of A"),
        ({"experts": 8, "layout": "per_expert"}, "but gate has adapters of 8 experts up to 7"),
        ({"hidden": 96}, r"gate_up_proj is \[256, 96\], and hidden size \d+ and intermediate size"),
        ({"inter": 96}, r"gate_up_proj is \[192, \d+\], and hidden size \d+ and intermediate"),
        (
            {"inter": 96, "layout": "per_expert"},
            r"down of expert 0 is \[\d+, 96\], and hidden size",
        ),
        ({"size": float("inf")}, "layer 0: a tensor has a NaN or infinite value"),
        ({"r": 8}, "gate_up_proj has 64 rows of A for rank 8"),
        ({"r": 8, "layout": "per_expert"}, "lora_A.weight is .* the configuration has rank 8 for"),
        ({"rank_pattern": {"experts.down_proj": 2}}, "down_proj has 64 rows of A for rank 2"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern has '\\(', which is no regular expression"),
        ({"rank_pattern": [2]}, "rank_pattern is \\[2\\]; expected an object"),
        ({"alpha_pattern": {"down": "2"}}, "alpha_pattern\\['down'\\] is '2'; expected a number"),
        ({"r": 0}, "r is 0; expected an integer of at least 1"),
        ({"r": 2.5}, "r is 2.5; expected an integer"),
        ({"lora_alpha": None}, "lora_alpha is None; expected a number"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: 'LORA'"),
        ({"use_dora": True}, "use_dora is true, which is not supported; accepted: false or null"),
        ({"bias": "all"}, 'bias is "all", which is not supported; accepted: "none" or null'),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\], which is not suppo"),
        ({"init_lora_weights": "pissa_niter_4"}, "is 'pissa_niter_4', which also changed the base"),
        ({"layers": ()}, "it has no tensors of experts"),
        ({"target_parameters": [], "wrap": 1}, "target_parameters of its configuration names none"),
    ],
)
def test_refused_adapters(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    wrap = changes.get("wrap")
    write(tmp_path, **OF_DEMO | {k: v for k, v in changes.items() if k != "wrap"})
    if wrap:
        path = tmp_path / "adapter_model.safetensors"
        tensors = load_file(path)
        save_file({n: t for n, t in tensors.items() if "base_layer" not in n}, path)
    error = check(tmp_path)
    assert isinstance(error, str) and error.startswith(f"--kt-expert-lora-path {tmp_path}: ")
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "self_attn.q_proj",
            r"modules other than experts \(self_attn.q_proj\), .*merge_adapter",
        ),
        ("mlp.gate", r"modules other than experts \(mlp.gate\)"),
        ("mlp.experts.16.w9", "experts.16.w9.lora_A.weight: unknown part of experts; known:"),
    ],
)
def test_refused_tensors(name: str, message: str, tmp_path: Path) -> None:
    module = f"base_model.model.model.layers.0.{name}"
    pair = {
        f"{module}.lora_A.weight": torch.ones(4, 8),
        f"{module}.lora_B.weight": torch.ones(8, 4),
    }
    write(tmp_path, more=pair, **OF_DEMO)
    assert re.search(message, check(tmp_path))
    write(tmp_path, more={f"{module}.lora_A.weight": torch.ones(4, 8)}, **OF_DEMO)
    assert f"{module}.lora_A.weight has no {module}.lora_B.weight beside it" in check(tmp_path)
    write(tmp_path, more=pair | {f"{module}.lora_B.weight": torch.ones(4)}, **OF_DEMO)
    assert "lora_B.weight is torch.float32 [4]; expected a matrix of floats" in check(tmp_path)
    write(tmp_path, more={"base_model.model.lm_head.weight": torch.ones(4, 8)}, **OF_DEMO)
    assert "lm_head.weight cannot be merged; only LoRA's A and B" in check(tmp_path)


def test_two_modules_of_one_layer(tmp_path: Path) -> None:
    write(tmp_path / "one", **OF_DEMO)
    tensors = load_file(tmp_path / "one" / "adapter_model.safetensors")
    draft = {n.replace("model.layers.0.", "mtp.layers.0."): t for n, t in tensors.items()}
    write(tmp_path, more={n: t for n, t in draft.items() if "mtp.layers" in n}, **OF_DEMO)
    assert "changes two modules of experts in layer 0, " in check(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    error = check(tmp_path)
    assert error.startswith(f"--kt-expert-lora-path {tmp_path}: no adapter_config.json; expected a")
    write(tmp_path, **OF_DEMO)
    weights = tmp_path / "adapter_model.safetensors"
    assert "no adapter_config.json; expected a folder with" in check(weights)
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{weights}: " in check(tmp_path)
    weights.unlink()
    assert "no adapter_model.safetensors; expected a folder with" in check(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    assert "adapter_config.json: not valid JSON" in check(tmp_path)
    with pytest.raises(OptionError, match="--kt-expert-lora-path /no/such: no such file or folder"):
        check("/no/such")


def test_methods_that_keep_quantised_values(tmp_path: Path) -> None:
    write(tmp_path / "adapter", **OF_DEMO | {"layers": (0,)}, layers_to_transform=[0])
    (tmp_path / "fp8").mkdir()
    path = quantised_copy(tmp_path / "fp8")
    given = {"weight_path": str(path), "config": {"num_hidden_layers": 1}}
    accepted = (
        "accepted: --kt-method BF16, AMXINT8, AMXINT4, MOE_INT8, MOE_INT4, INT4_G32, INT4_G128"
    )
    for method, why in (
        ("FP8_PERCHANNEL", "method FP8_PERCHANNEL keeps"),
        ("auto", "method FP8_PERCHANNEL, selected for FP8 with scales per row, keeps"),
    ):
        error = check(tmp_path / "adapter", method=method, **given)
        assert error.startswith(f"--kt-expert-lora-path: {why}") and error.endswith(accepted), error
    assert check(tmp_path / "adapter", method="BF16", **given).method == "BF16"
    for method in ("MXFP4", "LLAMAFILE"):
        assert f"method {method} keeps the checkpoint's" in check(tmp_path, method=method)
    packed = tmp_path / "packed"
    convert(make_plan(Request(str(DEMO_MODEL), str(packed), "AMXINT8", threads=2)))
    error = check(tmp_path / "adapter", weight_path=str(packed), method="AMXINT8")
    assert error.startswith(f"--kt-weight-path {packed}: layer 0 is stored in ")
    assert "16-bit, 32-bit and FP8 weights only" in error


def test_a_quantised_model(tmp_path: Path) -> None:
    """Its cold experts are dequantised first; hot ones would stay in the engine's format."""
    write(tmp_path / "adapter", **OF_DEMO | {"layers": (0,)})
    (tmp_path / "model").mkdir()
    model = quantised_copy(tmp_path / "model")
    settings = {"quantization_config": {"quant_method": "fp8"}, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(CONFIG | settings))
    given: dict[str, Any] = {"served": ServedModel(str(model), "fp8"), "config": settings}
    options = check(tmp_path / "adapter", method="AMXINT8", **given)
    assert (options.method, options.weight_path) == ("AMXINT8", str(model))
    assert "method FP8_PERCHANNEL, selected for " in check(tmp_path / "adapter", **given)
    error = check(tmp_path / "adapter", method="BF16", num_gpu_experts=1, **given)
    assert error.startswith("--kt-expert-lora-path with --kt-num-gpu-experts 1: the served model")


def test_layers_are_not_known(tmp_path: Path) -> None:
    """The number of layers is."""
    unknown = {"decoder_sparse_step": None}
    write(tmp_path, **OF_DEMO | {"layers": (1, 3)})
    assert isinstance(check(tmp_path, config=unknown), KTOptions)
    assert "layers 0, 2, 4-7" in check(tmp_path)
    error = check(tmp_path, config=unknown | {"num_hidden_layers": 3})
    assert "changes experts of layer 3; the model has 3 layers" in error


def test_experts_without_a_gate(tmp_path: Path) -> None:
    write(tmp_path, **OF_DEMO)
    error = check(tmp_path, config={"model_type": "nemotron_h", "mlp_hidden_act": "relu2"})
    assert error.startswith(f"--kt-expert-lora-path {tmp_path}: an adapter cannot be merged into")
