"""Which experts are hot at the start: strategies, files and budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kt_kernel.routes.masks import ExpertMasks
from kt_kernel.routes.statistics import ExpertStatistics
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.model_config import routed_model
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.placement import plan_placement
from kt_kernel.serving.preflight import ServedModel, prepare

E, LAYERS = 8, (1, 2, 4)
CONFIG = SimpleNamespace(
    model_type="qwen3_moe",
    num_hidden_layers=5,
    decoder_sparse_step=1,
    mlp_only_layers=[0, 3],
    num_experts=E,
    num_experts_per_tok=2,
    hidden_size=128,
    moe_intermediate_size=96,
    _name_or_path="org/served",
)
COUNTS = np.array(
    [
        [9, 0, 0, 0, 0, 0, 0, 1],
        [0, 2, 3, 0, 0, 4, 1, 0],
        [30, 31, 32, 33, 34, 35, 0, 5],
    ],
    np.float64,
)
TOKENS = np.array([5.0, 5.0, 100.0])  # the last layer's counts are large, its frequencies are not


def statistics(**changes: Any) -> ExpertStatistics:
    return replace(ExpertStatistics(routed_model(CONFIG), LAYERS, COUNTS, TOKENS), **changes)


@pytest.fixture
def stats(tmp_path: Path) -> str:
    statistics().save(tmp_path / "stats")
    return str(tmp_path / "stats")


def hot(options: dict[str, Any], config: Any = CONFIG) -> dict[int, list[int]]:
    plan = plan_placement(KTOptions.from_mapping(options), config)
    return {layer: list(plan.of(layer).hot_experts) for layer in LAYERS}


def test_uniform() -> None:
    assert hot({"num_gpu_experts": 3}) == dict.fromkeys(LAYERS, [0, 1, 2])
    assert hot({}) == dict.fromkeys(LAYERS, [])
    assert hot({"gpu_experts_ratio": "0.45"}) == dict.fromkeys(LAYERS, [0, 1, 2])
    assert hot({"gpu_experts_ratio": 1}) == dict.fromkeys(LAYERS, list(range(E)))


def test_a_ratio_is_not_one_less_for_its_rounding() -> None:
    assert 0.29 * 100 < 29 and KTOptions(gpu_experts_ratio=0.29).hot_count(100) == 29


def test_front_loading() -> None:
    given = {"expert_placement_strategy": "front-loading"}
    assert hot({**given, "num_gpu_experts": 4}) == {1: [*range(8)], 2: [0, 1, 2, 3], 4: []}
    # 11 of 24; per layer rounded down they would be 9
    assert hot({**given, "gpu_experts_ratio": 0.49}) == {1: [*range(8)], 2: [0, 1, 2], 4: []}


def test_frequency_compares_shares_of_tokens(stats: str) -> None:
    """By hand: 9/5, 4/5, 3/5, 2/5, then 35/100, 34/100 … before 1/5."""
    order = [(1, 0), (2, 5), (2, 2), (2, 1), *((4, e) for e in (5, 4, 3, 2, 1, 0)), (1, 7), (2, 6)]
    for total in (3, 6, 9, 12):
        wanted: dict[int, list[int]] = {layer: [] for layer in LAYERS}
        for layer, expert in sorted(order[:total]):
            wanted[layer].append(expert)
        assert hot({"num_gpu_experts": total // 3, "expert_stats": stats}) == wanted
    ratio = {"gpu_experts_ratio": 0.26, "expert_placement_strategy": "frequency"}
    assert hot({**ratio, "expert_stats": stats}) == {1: [0], 2: [1, 2, 5], 4: [4, 5]}


def test_random_is_the_same_everywhere_and_differs_by_layer() -> None:
    options = {"num_gpu_experts": 3, "expert_placement_strategy": "random"}
    found = hot(options)
    assert found == hot(options) and all(len(experts) == 3 for experts in found.values())
    assert len({tuple(experts) for experts in found.values()}) > 1
    assert found[1] == [1, 3, 7]  # servers of other releases agree, too


def test_a_mask(tmp_path: Path) -> None:
    masks = np.zeros((3, E), bool)
    masks[0, [2, 5]] = masks[2] = True
    ExpertMasks(LAYERS, masks).save(tmp_path / "mask")
    options = {"gpu_experts_mask": str(tmp_path / "mask")}
    assert hot(options) == {1: [2, 5], 2: [], 4: [*range(E)]}
    plan = plan_placement(KTOptions.from_mapping(options), CONFIG)
    assert plan.some_hot and not plan.all_hot
    other = SimpleNamespace(**vars(CONFIG) | {"num_experts": 9})
    with pytest.raises(OptionError, match="mask: hot has 8 experts; the model has 9"):
        hot(options, other)


def test_layers_get_their_own_counts(stats: str) -> None:
    """Layers with all, some and none of their experts hot in one model."""
    options = KTOptions(
        method="BF16", num_gpu_experts=4, expert_placement_strategy="front-loading", cpuinfer=1
    )
    model = HybridModel(options, CONFIG)
    for layer in LAYERS:
        model.add_layer(
            layer_idx=layer,
            num_experts=E,
            num_experts_per_tok=2,
            hidden_size=128,
            moe_intermediate_size=96,
        )
    assert [layer.placement.num_slots for layer in model.layers] == [8, 4, 0]
    assert [layer.has_cpu_part for layer in model.layers] == [False, True, True]
    line = "in each 0 to 8 experts hot on the device and 0 to 8 cold on the CPU (selected by front"
    assert line in model.describe() and "no work for the CPU" not in model.describe()
    with pytest.raises(OptionError, match="layer 3 has experts, but front-loading has no such"):
        model.placement_of(3, E)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expert_placement_strategy": "hottest"}, "hottest: unknown; accepted: uniform, freq"),
        ({"expert_placement_strategy": "frequency", "num_gpu_experts": 1}, "needs --kt-expert-st"),
        (
            {"record_kt_gpu_expert_distribution": "a", "record_kt_expert_routes": "./a"},
            "routes ./a: give two different files",
        ),
        ({"expert_placement_strategy": "random"}, "random: without --kt-num-gpu-experts,"),
        ({"expert_stats": "STATS"}, "expert-stats .*: without --kt-num-gpu-experts, --kt-gpu"),
        (
            {"expert_stats": "STATS", "expert_placement_strategy": "random", "num_gpu_experts": 1},
            "--kt-expert-stats .*: .* random does not use statistics; accepted: frequency",
        ),
        ({"num_gpu_experts": 1, "gpu_experts_ratio": 0.5}, "experts 1 and .*ratio 0.5: give only"),
        ({"gpu_experts_mask": "STATS", "num_gpu_experts": 1}, "and --kt-gpu-experts-mask .* only"),
        (
            {"gpu_experts_mask": "STATS", "expert_placement_strategy": "uniform"},
            "uniform and --kt-gpu-experts-mask .*: give only one",
        ),
        ({"gpu_experts_ratio": 1.5}, "--kt-gpu-experts-ratio 1.5: expected a number from 0 to 1"),
        ({"gpu_experts_ratio": "nan"}, "ratio nan: expected a number from 0 to 1"),
        ({"gpu_experts_ratio": True}, "ratio True: expected a number from 0 to 1"),
        ({"expert_stats": "/no/such"}, "--kt-expert-stats /no/such: no such file"),
        ({"record_kt_expert_routes": "/no/such/file"}, "routes /no/such/file: its folder does not"),
        ({"record_kt_gpu_expert_distribution": "/"}, "/: exists and is not a regular file"),
        ({"record_kt_expert_routes": "LINK"}, "--record-kt-expert-routes .*link: its folder does"),
        ({"record_kt_expert_routes": "CIRCLE"}, "circle: Too many levels of symbolic links"),
        ({"expert_routes_tokens": 5}, "tokens 5: without --record-kt-expert-routes no routes"),
    ],
)
def test_options_that_contradict_each_other(
    given: dict[str, Any], message: str, stats: str
) -> None:
    link, circle = (Path(stats).with_name(name) for name in ("link", "circle"))
    link.symlink_to("none/file")
    circle.symlink_to("circle")
    named = {"STATS": stats, "LINK": str(link), "CIRCLE": str(circle)}
    given = {name: named.get(str(value), value) for name, value in given.items()}
    with pytest.raises(OptionError, match=message) as caught:
        KTOptions.from_mapping(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": replace(routed_model(CONFIG), name="org/other", num_experts_per_tok=4)},
            "the file is of org/other (qwen3_moe, 5 layers, 8 experts), not of org/served "
            "(qwen3_moe, 5 layers, 8 experts): num_experts_per_tok 4 instead of 2",
        ),
        ({"layers": (1, 2, 3)}, "it misses layer 4; the model's layers with experts are 1-2,4"),
        ({"counts": COUNTS * 0}, "no expert was ever used"),
        ({"counts": -COUNTS}, "counts must be finite and at least 0"),
        ({"layers": (2, 1, 4)}, "layers [2, 1, 4] must ascend"),
        ({"tokens": TOKENS[:2]}, "tokens has shape [2], but L is 3"),
    ],
)
def test_statistics_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Refused before the start."""
    path = tmp_path / "stats"
    statistics(**changes).save(path)
    options = KTOptions.from_mapping({"num_gpu_experts": 2, "expert_stats": str(path)})
    with pytest.raises(OptionError) as caught:
        prepare(options, CONFIG, ServedModel("served"))
    assert str(caught.value).startswith(f"--kt-expert-stats {path}: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_statistics(tmp_path: Path) -> None:
    path = tmp_path / "file"
    options = {"num_gpu_experts": 2, "expert_stats": str(path)}
    path.write_text("text")
    with pytest.raises(OptionError, match="not a safetensors file with kt-expert-statistics"):
        hot(options)
    ExpertMasks(LAYERS, np.ones((3, E), bool)).save(path)
    with pytest.raises(OptionError, match="says kt-gpu-experts-mask, version 1; expected kt-exp"):
        hot(options)


def test_workers_get_absolute_paths(stats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(stats).parent)
    given = {"num_gpu_experts": 1, "expert_stats": "stats", "record_kt_expert_routes": "routes"}
    options = prepare(KTOptions.from_mapping(given), CONFIG, ServedModel("served"))
    assert options.expert_stats == stats
    assert options.record_kt_expert_routes == str(Path(stats).with_name("routes"))
    assert KTOptions.from_mapping(options.to_mapping()) == options
    assert f"hot experts per layer 1, frequency by {stats}" in options.describe()
