"""Which tensors an engine does not get, by the names in published checkpoints."""

from __future__ import annotations

import pytest

from kt_kernel.moe.placement import Placement
from kt_kernel.serving.names_read_here import NamesReadHere

NAMES = NamesReadHere({1: Placement.first(8, 2), 3: Placement.first(8, 0)})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.2.gate_proj.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight_scale_inv",
        "language_model.model.layers.1.mlp.experts.3.up_proj.weight_packed",
        "layers.3.ffn.experts.0.w1.scale",
        "model.layers.3.block_sparse_moe.experts.0.w2.weight",
        "model.layers.1.mlp.experts.gate_proj.5.weight",
        "model.layers.3.mlp.experts.gate_up_proj_blocks",
        "model.layers.3.feed_forward.experts.down_proj",
        "model.layers.1.mlp.experts.down_proj.5.weight",
        "model.layers.3.block_sparse_moe.input_linear.weight",
        "model.layers.3.moe.gate_proj.weight",
        "model.layers.3.moe.down_proj.weight_scale_inv",
        "language_model.model.layers.3.mlp.experts.fc1.weight",
    ],
)
def test_cold(name: str) -> None:
    assert name in NAMES


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.1.gate_proj.weight",  # hot
        "model.layers.1.mlp.experts.8.gate_proj.weight",  # the model will say so
        "model.layers.1.mlp.experts.gate_up_proj",  # some of them are hot
        "model.layers.1.mlp.experts.gate_proj.0.weight",
        "model.layers.1.block_sparse_moe.output_linear.weight",  # some of them are hot
        "model.layers.3.block_sparse_moe.router.layer.weight",
        "model.layers.3.shared_mlp.input_linear.weight",
        "model.layers.3.moe.gate.weight",
        "model.layers.2.mlp.experts.5.gate_proj.weight",  # a layer that is not ours
        "model.layers.13.mlp.experts.5.gate_proj.weight",
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.mlp.shared_expert.up_proj.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.3.mlp.experts.e_score_correction_bias",
        "model.layers.3.mlp.experts.shared_expert.up_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_of_the_engine(name: str) -> None:
    assert name not in NAMES


def test_weights_are_not_read() -> None:
    """The engine's iterator keeps its order and its tensors."""
    given = [("model.norm.weight", 1), ("layers.3.ffn.experts.0.w1.weight", 2), ("lm_head", 3)]
    assert list(NAMES.without(iter(given))) == [given[0], given[2]]
    assert list(NamesReadHere({}).without(given)) == given
