"""--kt-gpu-experts-memory: how many hot experts fit into so many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kt_kernel.routes.statistics import ExpertStatistics
from kt_kernel.serving.budget import hot_expert_bytes
from kt_kernel.serving.hot_packed import GroupedHot, RowHot
from kt_kernel.serving.hot_weights import DenseHot, HotShape
from kt_kernel.serving.model_config import routed_model
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.placement import plan_placement
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO, LayerForm, WeightForm

H, INTER, E = 128, 64, 8
LAYERS = (1, 2, 4)
CONFIG = SimpleNamespace(
    model_type="qwen3_moe",
    num_hidden_layers=5,
    decoder_sparse_step=1,
    mlp_only_layers=[0, 3],
    num_experts=E,
    num_experts_per_tok=2,
    hidden_size=H,
    moe_intermediate_size=INTER,
)
EXPERT = 3 * H * INTER * 2  # bytes in 16 bits


def prepared(given: dict[str, Any], ranks: int = 1, value_bytes: int = 2) -> KTOptions:
    served = ServedModel("org/model", ranks=ranks, value_bytes=value_bytes)
    return prepare(KTOptions.from_mapping(given), CONFIG, served)


def hot_counts(options: KTOptions) -> list[int]:
    plan = plan_placement(options, CONFIG)
    return [plan.of(layer).num_hot for layer in LAYERS]


def checkpoint_of(form: WeightForm) -> Any:
    """A checkpoint whose layers have this form."""

    @contextmanager
    def each_expert(*given: Any) -> Iterator[Any]:
        yield SimpleNamespace(form=LayerForm.same(form))

    return SimpleNamespace(
        layers=lambda: [1], sizes=lambda layer: (E, H, INTER), each_expert=each_expert
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("INT4_G32", None),
        ("AMXINT8", None),
        ("RAWINT4", WeightForm(INT4_GROUP, 32, 1)),
        ("AWQ_INT4", WeightForm(INT4_ZERO, 32)),
    ],
)
def test_bytes_of_packed_experts(method: str, form: WeightForm | None, ranks: int) -> None:
    shape, device = HotShape(slots=5, hidden=H, inter=INTER, ranks=ranks), torch.device("cpu")
    tensors: RowHot | GroupedHot = RowHot("layer 0", shape, device)
    if method != "AMXINT8":
        zeros = method == "AWQ_INT4"
        tensors = GroupedHot("layer 0", shape, 32, zeros, torch.bfloat16, device)
    options = KTOptions(method=method, num_gpu_experts=5, hot_format="packed")
    checkpoint = None if form is None else checkpoint_of(form)
    assert 5 * hot_expert_bytes(options, H, INTER // ranks, 2, checkpoint) == tensors.nbytes


def test_bytes_of_biases(tmp_path: Path) -> None:
    """Of gpt-oss: float32, as SGLang holds them."""
    stacks = {"gate_up_proj": (E, H, 2 * INTER), "down_proj": (E, INTER, H)}
    tensors = {name: torch.zeros(size) for name, size in stacks.items()}
    tensors |= {f"{name}_bias": torch.zeros(E, size[2]) for name, size in stacks.items()}
    named = {
        f"model.layers.{layer}.mlp.experts.{name}": tensor.bfloat16()
        for name, tensor in tensors.items()
        for layer in range(3)
    }
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    config = SimpleNamespace(
        model_type="gpt_oss",
        num_hidden_layers=3,
        num_local_experts=E,
        num_experts_per_tok=2,
        hidden_size=H,
        intermediate_size=INTER,
    )
    for ranks in (1, 2):
        shape, part = HotShape(5, H, INTER, 0, ranks), INTER // ranks
        hot = DenseHot(
            "layer 0",
            shape,
            torch.zeros(5, 2 * part, H, dtype=torch.bfloat16),
            torch.zeros(5, H, part, dtype=torch.bfloat16),
            b13=torch.zeros(5, 2 * part),
            b2=torch.zeros(5, H),
        )
        assert hot.nbytes == 5 * (3 * H * part * 2 + (2 * part + H) * 4)
        served = ServedModel(str(tmp_path), ranks=ranks, own_loading=True)
        for memory, count in ((3 * hot.nbytes, 5), (3 * hot.nbytes - 1, 4)):
            options = prepare(KTOptions(gpu_experts_memory=memory), config, served)
            assert plan_placement(options, config).of(0).num_hot == count, ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_of_experts_without_a_gate(ranks: int) -> None:
    """Of Nemotron-H."""
    config = SimpleNamespace(
        model_type="nemotron_h",
        mlp_hidden_act="relu2",
        num_hidden_layers=4,
        hybrid_override_pattern="ME*E",
        n_routed_experts=E,
        num_experts_per_tok=2,
        hidden_size=H,
        moe_intermediate_size=INTER,
    )
    part = INTER // ranks
    up, down = (torch.zeros(size, dtype=torch.bfloat16) for size in ((part, H), (H, part)))
    each = up.nbytes + down.nbytes
    for memory, count in ((2 * 3 * each, 3), (2 * 3 * each - 1, 2)):
        given = KTOptions(gpu_experts_memory=memory, expert_placement_strategy="front-loading")
        options = prepare(given, config, ServedModel("org/model", ranks=ranks))
        plan = plan_placement(options, config)
        assert plan.of(1).num_hot + plan.of(3).num_hot == memory // each
        uniform = prepare(
            replace(given, expert_placement_strategy=None), config, ServedModel("m/m", ranks=ranks)
        )
        assert plan_placement(uniform, config).of(3).num_hot == count


@pytest.mark.parametrize(
    ("memory", "counts"),
    [
        (3 * EXPERT, [1, 1, 1]),
        (12 * EXPERT - 1, [3, 3, 3]),
        (12 * EXPERT, [4, 4, 4]),
        (13 * EXPERT, [4, 4, 4]),
        (24 * EXPERT, [8, 8, 8]),
        (10**9, [8, 8, 8]),
    ],
)
def test_as_many_as_fit_in_each_layer(memory: int, counts: list[int]) -> None:
    given = {"gpu_experts_memory": memory}
    options = prepared(given)
    assert hot_counts(options) == counts
    # Workers get the result as a mapping.
    assert hot_counts(KTOptions.from_mapping(options.to_mapping())) == counts
    assert hot_counts(prepared(given | {"expert_placement_strategy": "random"})) == counts


def test_parts_of_experts_and_other_values() -> None:
    memory = {"gpu_experts_memory": 6 * EXPERT}
    assert hot_counts(prepared(memory, ranks=2)) == [4, 4, 4]
    assert hot_counts(prepared(memory, value_bytes=4)) == [1, 1, 1]
    # 3.56 times as many in groups of 4 bits.
    packed = prepared(memory | {"hot_format": "packed", "method": "INT4_G32"})
    assert packed.hot_format == "packed" and hot_counts(packed) == [7, 7, 7]


def test_pairs_of_a_strategy_for_the_whole_model(tmp_path: Path) -> None:
    memory = {"gpu_experts_memory": 13 * EXPERT}
    front = prepared(memory | {"expert_placement_strategy": "front-loading"})
    assert hot_counts(front) == [8, 5, 0]
    counts = np.arange(3 * E, dtype=np.float64).reshape(3, E)
    statistics = ExpertStatistics(routed_model(CONFIG), LAYERS, counts, np.full(3, 100.0))
    statistics.save(tmp_path / "stats")
    by_use = prepared(memory | {"expert_stats": str(tmp_path / "stats")})
    assert hot_counts(by_use) == [0, 5, 8]
    # One pair is enough for it.
    one = {"gpu_experts_memory": EXPERT, "expert_stats": str(tmp_path / "stats")}
    assert hot_counts(prepared(one)) == [0, 0, 1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"gpu_experts_memory": 3 * EXPERT - 1},
            ["a hot expert takes 0.05MB", "each of 3 layers takes 0.15MB; give at least 0.15MB"],
        ),
        (
            {"gpu_experts_memory": EXPERT - 1, "expert_placement_strategy": "front-loading"},
            ["give at least 0.05MB, or --kt-num-gpu-experts 0"],
        ),
    ],
)
def test_too_little(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError, match="--kt-gpu-experts-memory 0.[01]5MB: ") as caught:
        prepared(given)
    assert all(word in str(caught.value) for word in words), caught.value
    enough = str(caught.value).partition("give at least ")[2].partition(",")[0]
    assert sum(hot_counts(prepared(given | {"gpu_experts_memory": enough}))) > 0


def test_layers_that_are_not_known() -> None:
    options = KTOptions.from_mapping({"gpu_experts_memory": "1GB"})
    config = SimpleNamespace(num_experts=8, num_hidden_layers=4, hidden_size=H)
    with pytest.raises(OptionError, match=r"memory 1GB: the model's configuration does not say"):
        prepare(options, config, ServedModel("org/model"))


@pytest.mark.parametrize("other", ["num_gpu_experts", "gpu_experts_ratio"])
def test_one_budget_only(other: str) -> None:
    with pytest.raises(OptionError, match="--kt-gpu-experts-memory 1GB: give only one of them"):
        KTOptions.from_mapping({other: 1, "gpu_experts_memory": "1GB"})
    with pytest.raises(OptionError, match="expected a size in MB or GB"):
        KTOptions.from_mapping({"gpu_experts_memory": "1TB"})


def test_it_counts_as_hot_experts() -> None:
    options = KTOptions.from_mapping(
        {
            "gpu_experts_memory": "1GB",
            "hot_format": "packed",
            "enable_dynamic_expert_update": "auto",
        }
    )
    assert options.hot_option == "--kt-gpu-experts-memory 1GB"
    assert replace(options, gpu_experts_memory=None).hot_option is None
