"""Where the weights of hot experts come from, if --kt-weight-path cannot be read as values: the
engine delivers those of a 16-bit model, and a quantised model is refused before it is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kt_kernel
from kt_kernel.conversion import Request, convert, make_plan
from kt_kernel.serving.hot_packed import packed_hot
from kt_kernel.serving.hot_weights import HotShape
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.testing import quantise, values_of
from kt_kernel.weights.expert_tensors import matrix_shapes
from kt_kernel.weights.formats import INT4_GROUP, WeightForm

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from gguf_models import Model

DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
H, I = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]  # noqa: E741


def decided(path: Path, quantisation: str | None, **given: Any) -> KTOptions:
    options = KTOptions.from_mapping({"weight_path": str(path), "num_gpu_experts": 4} | given)
    return prepare(options, SimpleNamespace(**CONFIG), ServedModel("served", quantisation))


@pytest.fixture(scope="module", params=["AMXINT8", "INT4_G32"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / request.param
    convert(make_plan(Request(str(DEMO_MODEL), str(path), request.param, scale_search=False)))
    return path


@pytest.mark.parametrize("form", ["auto", "bf16", "packed"])
def test_a_quantised_model_needs_files_with_values(packed: Path, form: str) -> None:
    for quantisation in ("awq", "compressed-tensors", "fp8"):
        if (quantisation, form) == ("fp8", "auto"):
            assert decided(packed, "fp8").hot_format == "engine"
            continue
        with pytest.raises(OptionError, match=f"{quantisation}, .* as a packed directory") as e:
            decided(packed, quantisation, hot_format=form)
        assert ("accepted: --kt-hot-format engine" in str(e.value)) == (quantisation == "fp8")
    assert decided(packed, "awq", num_gpu_experts=0).weight_path == str(packed)


def test_a_quantised_model_with_cold_experts_in_gguf(tmp_path: Path) -> None:
    model = Model(("Q8_0", "Q8_0", "Q4_0"), hidden=H, inter=I, layers=(0,), experts=16)
    path = model.save(tmp_path / "m.gguf")
    with pytest.raises(OptionError, match="--kt-num-gpu-experts 4 with .* stored as GGUF"):
        decided(path, "awq")
    assert decided(path, None).hot_format == "engine"


def test_the_engine_delivers_the_hot_experts_of_a_16_bit_model(packed: Path) -> None:
    options = decided(packed, None, hot_format="packed", cpuinfer=1)
    assert options.hot_format == "packed" and not options.reads_hot
    if packed.name == "AMXINT8":
        return
    model = HybridModel(options, SimpleNamespace(**CONFIG))
    layer = model.add_layer(
        layer_idx=0,
        num_experts=CONFIG["num_experts"],
        num_experts_per_tok=CONFIG["num_experts_per_tok"],
        hidden_size=H,
        moe_intermediate_size=I,
    )
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    assert name.format(4) in model.names_read_here and name.format(3) not in model.names_read_here
    shape = HotShape(4, H, I)
    layer.hot = packed_hot(options, 0, layer.placement, shape, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(0)
    delivered = {}
    for slot in range(4):
        for which, size in matrix_shapes(H, I).items():
            delivered[slot, which] = torch.randn(size).bfloat16()
            layer.put_hot(slot, which, delivered[slot, which])
    layer.finish_loading()
    want = values_of(quantise(delivered[2, "down"], WeightForm(INT4_GROUP, 32, scale_type=1)))
    codes = layer.hot.w2[2]
    low_first = torch.stack((codes & 15, codes >> 4), -1).flatten(1).double() - 8
    assert torch.equal(low_first * layer.hot.s2[2].double().repeat_interleave(32, 1), want)


def test_readable_files_are_read() -> None:
    assert decided(DEMO_MODEL, None, hot_format="packed").reads_hot
    assert not decided(DEMO_MODEL, None, hot_format="bf16").reads_hot  # the engine's own
