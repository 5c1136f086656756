"""Random weights for an engine's own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kt_kernel.serving.random_weights import fill

E, H, INNER = 4, 8, 6
Delivered = dict[tuple[int, str], torch.Tensor]


class Experts(torch.nn.Module):
    """An engine's expert layer, which keeps ``slots`` experts, and notes what it is given."""

    def __init__(self, slots: int, gated: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.empty(slots, (1 + gated) * INNER, H))
        self.w2_weight = torch.nn.Parameter(torch.empty(slots, H, INNER))
        if bias:
            self.w2_bias = torch.nn.Parameter(torch.empty(slots, H))
        self.given: Delivered = {}
        for parameter in self.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: Any, matrix: Any, name: str, shard_id: str, expert_id: int) -> None:
        assert name.endswith("w2_weight" if shard_id == "w2" else "w13_weight")
        self.given[expert_id, shard_id] = matrix


class Model(torch.nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, H)
        self.norm = torch.nn.LayerNorm(H)
        self.table = torch.nn.Parameter(torch.tensor([[0, 3], [2, 1]]), requires_grad=False)
        self.experts = Experts(**given)


def filled(moved: int = 0, **given: Any) -> Model:
    model = Model(**given)
    fill(model, lambda layer: E, moved)
    return model


@pytest.mark.parametrize("gated", [True, False])
def test_weights_do_not_depend_on_where_experts_are(gated: bool) -> None:
    whole, none = filled(slots=E, gated=gated), filled(slots=0, gated=gated)
    shards = ("w1", "w3", "w2") if gated else ("w1", "w2")
    assert [*none.experts.given] == [(expert, shard) for expert in range(E) for shard in shards]
    for key, matrix in whole.experts.given.items():
        assert matrix.shape == ((H, INNER) if key[1] == "w2" else (INNER, H))
        assert torch.equal(matrix, none.experts.given[key]) and matrix.dtype == torch.bfloat16
    others = [model.state_dict() for model in (whole, none)]
    for name in ("embed.weight", "norm.weight", "norm.bias", "table"):
        assert torch.equal(others[0][name], others[1][name])
    assert not torch.equal(*(whole.experts.given[expert, "w1"] for expert in (0, 1)))


def test_moved_experts() -> None:
    own, moved = filled(slots=E).experts.given, filled(1, slots=E).experts.given
    for (expert, shard), matrix in moved.items():
        assert torch.equal(matrix, own[(expert - 1) % E, shard])


def test_parameters_stay_in_their_range() -> None:
    model = filled(slots=0)
    assert int(model.table.min()) >= 0 and int(model.table.max()) <= 3
    assert (model.norm.weight - 1).abs().max() < 1 and (model.norm.weight != 1).all()
    assert model.norm.bias.abs().max() < 1 and (model.norm.bias != 0).any()


def test_experts_with_other_parameters_are_an_error() -> None:
    with pytest.raises(ValueError, match="experts: experts with parameters .*w2_bias; accepted"):
        filled(slots=E, bias=True)
