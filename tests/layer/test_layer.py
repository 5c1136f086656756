"""The engine-neutral layer: who computes which expert, and weights that arrive one by one."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_kernel.moe.activation import ExpertActivation, check_activation
from kt_kernel.moe.placement import Placement
from kt_kernel.runtime import pools
from kt_kernel.serving import report
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import moe_reference, row_error
from kt_kernel.weights.expert_tensors import MATRICES

E, K, H, INNER = 6, 2, 64, 48


def shape(**changes: Any) -> dict[str, Any]:
    return {
        "layer_idx": 3,
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        **changes,
    }


def layer_of(hot: int = 2, has_cpu_part: bool = True, **options: Any) -> HybridLayer:
    given = {"method": "BF16", "num_gpu_experts": hot, "cpuinfer": 1, **options}
    return HybridLayer(KTOptions.from_mapping(given), **shape(), has_cpu_part=has_cpu_part)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.bfloat16) / 8

    return {"gate": random(E, INNER, H), "up": random(E, INNER, H), "down": random(E, H, INNER)}


def load(layer: HybridLayer, weights: dict[str, torch.Tensor], skip: tuple = ()) -> None:
    """Matrix by matrix, in the order of a checkpoint sorted by matrix rather than by expert."""
    for which in layer.activation.matrices:
        for expert in layer.placement.cold_experts:
            if (expert, which) not in skip:
                layer.add_weight(expert, which, weights[which][expert])


def batch(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=generator, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    return x, ids.int(), torch.rand(tokens, K, generator=generator)


@pytest.mark.parametrize("hot", [0, 2, 5])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8"])
def test_cold_part_is_right(hot: int, method: str, weights: dict[str, torch.Tensor]) -> None:
    layer = layer_of(hot, method=method)
    load(layer, weights)
    layer.finish_loading()
    x, ids, router = batch(9)
    layer.submit(x, ids, router)
    y = layer.collect(x)
    mask = torch.arange(E) < hot
    want = moe_reference(x, ids, router, *weights.values(), method=method, gpu_experts_mask=mask)
    assert y.dtype == x.dtype and y.shape == x.shape
    touched = want.abs().sum(-1) > 0
    assert row_error(y[touched].double(), want[touched]).max() < 5e-3
    assert not y[~touched].any()
    assert layer.stats()["expert_calls"] == int((ids >= hot).sum())


@pytest.mark.parametrize(
    "activation",
    [
        {"activation": "gelu_tanh"},
        {"activation": "relu2", "gated": False},
        {"apply_router_weight_on_input": True},
        {"activation": "situ", "situ_beta": 0.8, "situ_linear_beta": 1.1},
        {"activation": "swiglustep", "swiglu_limit": 0.4},
    ],
    ids=str,
)
def test_other_functions_of_experts(
    activation: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    made = check_activation(**activation)
    layer = HybridLayer(
        KTOptions(method="BF16", num_gpu_experts=2, cpuinfer=1), **shape(activation=made)
    )
    load(layer, weights)
    layer.finish_loading()
    if not made.gated:
        with pytest.raises(ValueError, match="gate: no such matrix; accepted: up, down"):
            layer.add_weight(3, "gate", weights["gate"][3])
        weights = weights | {"gate": None}
    x, ids, router = batch(9)
    layer.submit(x, ids, router)
    activation.pop("gated", None)
    mask = torch.arange(E) < 2
    want = moe_reference(x, ids, router, *weights.values(), gpu_experts_mask=mask, **activation)
    assert row_error(layer.collect(x).double(), want).max() < 5e-3


def test_zero_experts(weights: dict[str, torch.Tensor]) -> None:
    """The engines' routes of weight 0 in place of zero experts are not computed: their expert's
    values may overflow."""
    config = SimpleNamespace(num_experts=E, zero_expert_num=4)
    options = KTOptions(method="BF16", num_gpu_experts=2, cpuinfer=1)
    layer = HybridModel(options, config).add_layer(**shape())
    for which in weights:
        weights[which][5] = torch.inf
    load(layer, weights)
    layer.finish_loading()
    x = batch(3)[0]
    ids, router = torch.tensor([[5, 2], [5, 0], [3, 5]]), torch.tensor([[0, 1.0], [0, 1], [1, 0]])
    slots, hot_router = layer.submit(x, ids, router, cold_slot=-1)
    assert slots.tolist() == [[-1, -1], [-1, 0], [-1, -1]] and hot_router[1].tolist() == [0, 1]
    mask = torch.arange(E) < 2
    ids = torch.where(router > 0, ids, -1)
    want = moe_reference(x, ids, router, *weights.values(), gpu_experts_mask=mask)
    found = layer.collect(x)
    assert found.isfinite().all() and layer.stats()["expert_calls"] == 2
    assert row_error(found[[0, 2]].double(), want[[0, 2]]).max() < 5e-3


def test_hot_and_cold_parts_make_the_whole(weights: dict[str, torch.Tensor]) -> None:
    layer = layer_of(2)
    load(layer, weights)
    layer.finish_loading()
    x, ids, router = batch(7)
    slots, hot_router = layer.submit(x, ids, router)
    assert slots.dtype == ids.dtype and int(slots.min()) >= 0 and int(slots.max()) < 2
    hot = moe_reference(x, slots, hot_router, *(w[:2] for w in weights.values()))
    want = moe_reference(x, ids, router, *weights.values())
    assert row_error(layer.collect(x, hot, scale=2.0) / 2, want).max() < 5e-3


def test_hot_routes(weights: dict[str, torch.Tensor]) -> None:
    layer = layer_of(2)
    load(layer, weights)
    layer.finish_loading()
    x = batch(4)[0]
    ids = torch.tensor([[0, 1], [1, 2], [5, -1], [6, 99]])
    router = torch.ones(4, 2)
    slots, hot_router = layer.submit(x, ids, router, cold_slot=-1)
    assert slots.tolist() == [[0, 1], [1, -1], [-1, -1], [-1, -1]]
    assert hot_router.tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]
    assert router.all()
    assert layer.submit(x, ids, router)[0].tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("cold_slot", [-1, 0])
@pytest.mark.parametrize(
    "padding",
    [torch.tensor([False, True, False, True, True]), torch.tensor([0, -1, 7, -1, -9])],
    ids=["mask", "slots"],
)
def test_padding_costs_nothing(
    padding: torch.Tensor, cold_slot: int, weights: dict[str, torch.Tensor]
) -> None:
    layer, elsewhere = layer_of(2), layer_of(2, has_cpu_part=False)
    load(layer, weights)
    for made in (layer, elsewhere):
        made.finish_loading()
    x, ids, router = batch(5)
    routes = layer.submit(x, ids, router, cold_slot=cold_slot, padding=padding)
    y, real = layer.collect(x), torch.tensor([0, 2])
    assert layer.stats()["expert_calls"] == int((ids[real] >= 2).sum())
    whole = layer.submit(x, ids, router, cold_slot=cold_slot)
    assert torch.equal(y[real], layer.collect(x)[real]) and not y[[1, 3, 4]].any()
    for part, all_rows, nothing in zip(routes, whole, (cold_slot, 0), strict=True):
        assert torch.equal(part[real], all_rows[real]) and (part[[1, 3, 4]] == nothing).all()
    other = elsewhere.submit(x, ids, router, cold_slot=cold_slot, padding=padding)
    assert all(map(torch.equal, other, routes))
    for made in (layer, elsewhere):
        with pytest.raises(ValueError, match=r"layer 3: padding is \[4\] .* accepted: \[5\]"):
            made.submit(x, ids, router, padding=padding[:4])


@pytest.mark.parametrize("hot", [0, 2])
def test_a_rank_that_computes_no_cold_experts(hot: int, weights: dict[str, torch.Tensor]) -> None:
    """Under tensor parallelism one rank does; the others only add their part of the hot ones."""
    ours, other = layer_of(hot), layer_of(hot, has_cpu_part=False)
    for layer in (ours, other):
        load(layer, weights)
        layer.finish_loading()
    assert other.loaded and not other.takes_weights and other.packed_bytes == 0
    assert not other.stats() and "another rank" in other.describe_cpu()
    x, ids, router = batch(5)
    for mine, theirs in zip(ours.submit(x, ids, router), other.submit(x, ids, router), strict=True):
        assert torch.equal(mine, theirs)
    if hot == 0:
        assert not other.collect(x).any() and other.collect(x).shape == x.shape
    else:
        part = torch.randn_like(x)
        assert torch.equal(other.collect(x, part.clone(), scale=2.0), part * 2)
        assert torch.equal(other.collect(x, part.clone()), part)


def test_placement() -> None:
    layer = layer_of(2)
    assert layer.placement == Placement.first(E, 2)
    assert [layer.slot_of(expert) for expert in range(E)] == [0, 1, -1, -1, -1, -1]
    for expert in (-1, E):
        with pytest.raises(ValueError, match=f"expert {expert} does not exist; accepted: 0 to 5"):
            layer.slot_of(expert)


def test_all_hot_needs_nothing() -> None:
    layer = layer_of(E)
    assert not layer.takes_weights and layer.stats() == {} and layer.packed_bytes == 0
    layer.finish_loading()
    assert layer.loaded
    x, ids, router = batch(1)
    with pytest.raises(RuntimeError, match="submit needs cold experts; all 6 are hot"):
        layer.submit(x, ids, router)


def test_unusable_options() -> None:
    with pytest.raises(OptionError, match="--kt-num-gpu-experts 7: the model has 6 experts"):
        layer_of(E + 1)
    with pytest.raises(ValueError, match="layer 3: biases of experts are read from files only"):
        HybridLayer(KTOptions(method="BF16"), **shape(has_bias=True))
    options = KTOptions(method="BF16", gpu_prefill_token_threshold=64)
    for activation in (
        ExpertActivation(swiglu_limit=7.0),
        ExpertActivation("relu2", gated=False),
        ExpertActivation(router_weight_on_input=True),
    ):
        with pytest.raises(
            OptionError, match=rf"64: layer 3: experts with {re.escape(str(activation))} cannot"
        ):
            HybridLayer(options, **shape(activation=activation, streams=False))
        assert HybridLayer(options, **shape(activation=activation)).activation == activation


def test_missing_weights_are_named(weights: dict[str, torch.Tensor]) -> None:
    layer = layer_of(2)
    load(layer, weights, skip=((3, "up"), (5, "gate"), (5, "down")))
    with pytest.raises(ValueError, match=r"did not arrive: 3 \(up\); 5 \(gate, down\)$"):
        layer.finish_loading()
    for expert, which in ((3, "up"), (5, "gate"), (5, "down")):
        layer.add_weight(expert, which, weights[which][expert])
    layer.finish_loading()
    layer.finish_loading()  # a second call does nothing
    assert layer.loaded
    with pytest.raises(RuntimeError, match="after loading was finished"):
        layer.add_weight(3, "up", weights["up"][3])


@pytest.mark.parametrize(
    ("expert", "which", "tensor", "message"),
    [
        (
            1,
            "gate",
            torch.zeros(INNER, H),
            "weights of hot experts belong to the engine; cold experts: 2-5",
        ),
        (9, "gate", torch.zeros(INNER, H), "expert 9 does not exist; accepted: 0 to 5"),
        (
            2,
            "w1",
            torch.zeros(INNER, H),
            "no such matrix; accepted: gate, up, down",
        ),
        (2, "down", torch.zeros(INNER, H), r"shape \(48, 64\), expected \(64, 48\)"),
        (2, "up", torch.zeros(INNER, H, dtype=torch.int8), "dtype torch.int8; accepted: "),
    ],
)
def test_wrong_weight(expert: int, which: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(2).add_weight(expert, which, tensor)


def test_weight_twice(weights: dict[str, torch.Tensor]) -> None:
    layer = layer_of(2)
    layer.add_weight(2, "gate", weights["gate"][2])
    with pytest.raises(ValueError, match="layer 3, expert 2, gate: arrived twice"):
        layer.add_weight(2, "gate", weights["gate"][2])


def test_weights_are_copied(weights: dict[str, torch.Tensor]) -> None:
    """A loader may reuse its buffer for the next tensor."""
    layer, buffers = layer_of(2), {name: torch.empty_like(w[0]) for name, w in weights.items()}
    for which in MATRICES:
        for expert in layer.placement.cold_experts:
            layer.add_weight(expert, which, buffers[which].copy_(weights[which][expert]))
    layer.finish_loading()
    x, ids, router = batch(5)
    layer.submit(x, ids, router)
    mask = torch.arange(E) < 2
    want = moe_reference(x, ids, router, *weights.values(), gpu_experts_mask=mask)
    touched = want.abs().sum(-1) > 0
    assert row_error(layer.collect(x)[touched].double(), want[touched]).max() < 5e-3


def test_weight_path(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {
            f"model.layers.3.mlp.experts.{expert}.{which}_proj.weight": matrix[expert].clone()
            for which, matrix in weights.items()
            for expert in range(E)
        },
        tmp_path / "model.safetensors",
    )
    layer = layer_of(2, weight_path=str(tmp_path))
    assert not layer.takes_weights
    layer.add_weight(2, "gate", torch.zeros(INNER, H))  # the engine's own are not wanted
    layer.finish_loading()
    with pytest.raises(RuntimeError, match="replacing weights while serving is not supported"):
        layer.add_weight(2, "gate", torch.zeros(INNER, H))
    x, ids, router = batch(5)
    layer.submit(x, ids, router)
    other = layer_of(2)
    load(other, weights)
    other.finish_loading()
    other.submit(x, ids, router)
    assert torch.equal(layer.collect(x), other.collect(x))


def model_of(layers: int, weights: dict[str, torch.Tensor], **options: Any) -> HybridModel:
    given = {"method": "BF16", "num_gpu_experts": 2, "cpuinfer": 1, **options}
    model = HybridModel(KTOptions.from_mapping(given))
    for index in range(layers):
        layer = model.add_layer(**shape(layer_idx=index))
        load(layer, weights)
    return model


def test_several_sets_of_experts_in_a_layer(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Each has its own weights, and options that name layers by number are refused."""
    model = model_of(1, weights)
    second = model.add_layer(**shape(layer_idx=0))
    load(second, {name: -tensor for name, tensor in weights.items()})
    x, ids, router = batch(3)
    found = []
    for layer in model.layers:
        layer.finish_loading()
        layer.submit(x, ids, router)
        found.append(layer.collect(x))
    assert not torch.equal(*found)
    model = HybridModel(KTOptions.from_mapping({"method": "BF16", "weight_path": str(tmp_path)}))
    model.add_layer(**shape(layer_idx=1))
    with pytest.raises(
        OptionError, match="--kt-weight-path: layer 1 of the model has several sets"
    ):
        model.add_layer(**shape(layer_idx=1))


def test_model(weights: dict[str, torch.Tensor]) -> None:
    model = model_of(2, weights)
    assert not model.loaded
    for layer in model.layers:
        layer.finish_loading()
    assert model.loaded
    line = model.describe()
    assert "\n" not in line
    assert "kt: 2 MoE layers, in each 2 experts hot on the device [0-1] and 4 cold" in line
    assert "BF16" in line and "MB packed from the served checkpoint" in line
    x, ids, router = batch(4)
    for layer in model.layers:
        layer.submit(x, ids, router)
        layer.collect(x)
    assert model.stats()["expert_calls"] == 2 * int((ids >= 2).sum())


def test_deferral_goes_from_layer_to_layer(weights: dict[str, torch.Tensor]) -> None:
    """All experts of the first layer deferred: the second one's result carries them."""
    late = model_of(2, weights, max_deferred_experts_per_token=K, num_gpu_experts=0)
    now = model_of(2, weights, num_gpu_experts=0)
    x, ids, router = batch(4)
    results = []
    for model in (late, now):
        for layer in model.layers:
            layer.finish_loading()
            layer.submit(x, ids, router)
            results.append(layer.collect(x).double())
    assert not results[0].any()
    assert row_error(results[1], results[2] + results[3]).max() < 1e-2


def test_report(
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "stats.json"
    monkeypatch.setenv(report.STATS_FILE_VARIABLE, str(path))
    model = model_of(1, weights)
    model.layers[0].finish_loading()
    with caplog.at_level(logging.DEBUG):
        report.watch(model, logging.getLogger("test"))
    assert model.describe() in caplog.text
    whole, of_layer = model.describe_loading()
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels[whole] == "INFO" and levels[of_layer] == "DEBUG"
    assert re.match(r"kt: 1 MoE layers loaded: .*MB packed from .*MB in .* s of packing", whole)
    assert of_layer.startswith("kt: layer 0 loaded: ")
    x, ids, router = batch(4)
    model.layers[0].submit(x, ids, router)
    model.layers[0].collect(x)
    wanted = int((ids >= 2).sum())
    for _ in range(50):
        (found,) = json.loads(path.read_text())["models"]
        if found["expert_calls"] == wanted:
            break
        report.time.sleep(0.1)
    assert found["expert_calls"] == wanted
    assert found["layers"] == [{"layer": 0, "hot_experts": [0, 1], "cold_experts": [2, 3, 4, 5]}]


def test_stats_file_that_cannot_be_written(
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning; the server goes on, and nothing is left behind."""
    monkeypatch.setenv(report.STATS_FILE_VARIABLE, str(tmp_path / "gone" / "stats.json"))
    model = model_of(1, weights)
    model.layers[0].finish_loading()
    logger = logging.getLogger("test")
    report.watch(model, logger)
    report.watch(model, logger)
    assert caplog.text.count("cannot write the counters") == 1
    monkeypatch.setenv(report.STATS_FILE_VARIABLE, str(tmp_path))  # a folder: replacing it fails
    report.watch(model, logger)
    assert caplog.text.count("cannot write the counters") == 2
    assert list(tmp_path.iterdir()) == [] and list(tmp_path.parent.glob("*.[0-9]*")) == []


def test_stats_file_in_a_folder_of_others(
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A link at the name that a temporary file could have is not followed, everybody who may read
    the folder's files may read this one, and a pipe is not taken away."""
    victim, path, pipe = tmp_path / "victim", tmp_path / "stats.json", tmp_path / "pipe"
    victim.write_text("precious")
    for suffix in (f".{os.getpid()}", ".partial", ".tmp"):
        Path(f"{path}{suffix}").symlink_to(victim)
    monkeypatch.setenv(report.STATS_FILE_VARIABLE, str(path))
    model = model_of(1, weights)
    model.layers[0].finish_loading()
    umask = os.umask(0o022)
    try:
        report.watch(model, logging.getLogger("test"))
    finally:
        os.umask(umask)
    assert victim.read_text() == "precious"
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert path.stat().st_mode & 0o777 == 0o644
    os.mkfifo(pipe)
    monkeypatch.setenv(report.STATS_FILE_VARIABLE, str(pipe))
    report.watch(model, logging.getLogger("test"))
    assert pipe.is_fifo() and "not a regular file" in caplog.text


def test_too_many_threads_are_told_in_the_log_once(
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever filter an engine has for Python's warnings, and for however many layers."""
    many = pools.usable_cores() + 3
    monkeypatch.setattr(pools, "_warned", set())
    monkeypatch.setattr(pools, "_logged", False)
    with pytest.warns(RuntimeWarning) as seen:
        models = [model_of(3, weights, cpuinfer=many) for _ in range(2)]
    assert len(seen) == 1 and "--kt-cpuinfer" in str(seen[0].message)
    for model in models:
        for layer in model.layers:
            layer.finish_loading()
        report.watch(model, logging.getLogger("test"))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and warnings[0].startswith(f"kt: {many} CPU threads on ")
    assert f"at most {pools.usable_cores()} with --kt-cpuinfer" in warnings[0]


def test_a_child_forked_while_weights_arrive_can_load_on(weights: dict[str, torch.Tensor]) -> None:
    """The lock is held by a thread of the parent when it forks; the child must not wait for it."""
    layer = layer_of()
    with layer._loading._lock:
        child = os.fork()
        if child == 0:
            load(layer, weights)
            layer.finish_loading()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
