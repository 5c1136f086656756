"""A hybrid layer with any experts hot, which also move between batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kt_kernel.moe.placement import COLD, Placement
from kt_kernel.serving import hybrid as layers
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import moe_reference, row_error
from kt_kernel.weights.expert_tensors import MATRICES

E, K, H, INNER = 6, 2, 64, 96
SCATTERED = Placement((COLD, 0, COLD, COLD, 1, COLD), 2)
SWAPPED = Placement((COLD, 1, COLD, 0, COLD, COLD), 2)  # expert 4 leaves slot 1 to expert 1
NONE_HOT = Placement((COLD,) * E, 2)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(E, *size, generator=generator, dtype=torch.bfloat16) / 8
        for name, size in (("gate", (INNER, H)), ("up", (INNER, H)), ("down", (H, INNER)))
    }


def layer_of(
    placement: Placement,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    method: str = "BF16",
    **more: Any,
) -> HybridLayer:
    """A loaded layer, with the placement that no option can ask for yet."""
    monkeypatch.setattr(layers, "initial_placement", lambda *given: placement)
    made = HybridLayer(
        KTOptions(method=method, num_gpu_experts=placement.num_slots, cpuinfer=2),
        layer_idx=3,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
        **more,
    )
    for expert in placement.cold_experts:
        for which in MATRICES:
            made.add_weight(expert, which, weights[which][expert])
    made.finish_loading()
    return made


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of decode and of prefill, with ids that do not exist."""
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 7, 80):
        x = torch.randn(tokens, H, generator=generator, dtype=torch.bfloat16)
        ids = torch.randint(-1, E + 1, (tokens, K), generator=generator, dtype=torch.int32)
        ids[0] = torch.tensor([4, 1])
        yield x, ids, torch.rand(tokens, K, generator=generator)


def answers(layer: HybridLayer) -> list[torch.Tensor]:
    """Routes for the engine's kernels, and the cold experts' sum."""
    found = []
    for x, ids, router in batches():
        found += layer.submit(x, ids, router, cold_slot=-1)
        found.append(layer.collect(x))
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("placement", [SCATTERED, SWAPPED])
def test_any_experts_may_be_hot(
    placement: Placement, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(placement, weights, monkeypatch)
    rows = sorted(placement.hot_experts, key=layer.slot_of)
    engine = [weights[name][rows] for name in MATRICES]
    for x, ids, router in batches():
        slots, hot_router = layer.submit(x, ids, router)
        hot = moe_reference(x, slots, hot_router, *engine).to(x.dtype)
        want = moe_reference(x, ids, router, *(weights[name] for name in MATRICES))
        real = want.abs().sum(-1) > 0
        assert row_error(layer.collect(x, hot)[real].double(), want[real]).max() < 1e-2


@pytest.mark.parametrize(
    ("method", "has_cpu_part"),
    [("BF16", True), ("AMXINT8", True), ("INT4_G32", True), ("BF16", False)],
)
def test_moving_experts_is_building_the_layer_so(
    method: str,
    has_cpu_part: bool,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, routes and sums, there and back."""

    def made(placement: Placement) -> HybridLayer:
        return layer_of(placement, weights, monkeypatch, method, has_cpu_part=has_cpu_part)

    fresh = {placement: answers(made(placement)) for placement in (NONE_HOT, SCATTERED, SWAPPED)}
    layer = made(NONE_HOT)
    with torch.inference_mode():  # as engines run
        assert same(answers(layer), fresh[NONE_HOT])
    for placement in (SCATTERED, SWAPPED, NONE_HOT, SWAPPED, SCATTERED):
        layer.set_placement(placement)
        assert layer.placement == placement
        with torch.inference_mode():
            assert same(answers(layer), fresh[placement])
    assert not same(fresh[SCATTERED], fresh[SWAPPED])


def test_a_batch_keeps_the_placement_that_it_was_submitted_with(
    weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(NONE_HOT, weights, monkeypatch)
    *_, (x, ids, router) = batches()
    layer.submit(x, ids, router)
    wanted = layer.collect(x)
    for _ in range(10):
        layer.submit(x, ids, router)
        layer.set_placement(SCATTERED)
        assert torch.equal(layer.collect(x), wanted)
        layer.set_placement(NONE_HOT)


@pytest.mark.parametrize("has_cpu_part", [True, False])
def test_moves_that_are_refused(
    has_cpu_part: bool, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(SCATTERED, weights, monkeypatch, has_cpu_part=has_cpu_part)
    before = answers(layer)
    for placement, message in (
        (SWAPPED, "layer 3: expert 4 cannot become cold: .* not loaded on the CPU; .* 0,2-3,5"),
        (Placement.first(E, 3), "layer 3: the placement has 6 experts and 3 slots; .* 6 and 2"),
        (Placement.first(E + 1, 2), "layer 3: the placement has 7 experts and 2 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.set_placement(placement)
        assert layer.placement == SCATTERED and same(answers(layer), before)


def test_experts_stay_until_loading_is_finished() -> None:
    layer = HybridLayer(
        KTOptions(method="BF16", num_gpu_experts=2),
        layer_idx=3,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
    )
    with pytest.raises(RuntimeError, match="layer 3: set_placement before loading is finished"):
        layer.set_placement(SCATTERED)


def test_what_a_model_says_of_different_layers(
    weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HybridModel(KTOptions(method="BF16"))
    of_layer = iter([SCATTERED, Placement.first(E, 3)])
    monkeypatch.setattr(HybridModel, "placement_of", lambda *given: next(of_layer))
    for number in range(2):
        model.add_layer(
            layer_idx=number,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=INNER,
        )
    line = "kt: 2 MoE layers, in each 2 to 3 experts hot on the device and 3 to 4 cold on the CPU;"
    assert model.describe().startswith(line)
    assert "2 hot experts [1,4] on the device, 4 cold" in model.layers[0].describe()
