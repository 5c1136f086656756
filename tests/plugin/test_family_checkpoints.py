"""Our readers find the experts of the tiny models whose published form is not what transformers
writes, and of Gemma 4, whose experts are not inside an MLP module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_models import EXPERTS, FAMILIES, FamilyReference, make

from kt_kernel.checkpoint import open_checkpoint

NAMES = [
    name
    for name, family in FAMILIES.items()
    if family.dropped or family.renamed or family.transposed or name.startswith("Gemma4")
    # The names of Mistral's own files, and of a class that SGLang alone reads.
    if name
    not in ("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration", "ZayaForCausalLM")
]
# Of classes whose config.json has the model_type of another one, with experts at another place.
MODEL_TYPES = {"DeepseekForCausalLM": "deepseek"}


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path / name)
    stacks = FamilyReference(name, path).stacks()
    if name in MODEL_TYPES:
        config = path / "config.json"
        about = json.loads(config.read_text()) | {"model_type": MODEL_TYPES[name]}
        config.write_text(json.dumps(about))
    checkpoint = open_checkpoint(path)
    layers = checkpoint.layers()
    assert len(layers) == len(stacks)
    for layer, (gate_up, down) in zip(layers, stacks, strict=True):
        sizes = checkpoint.sizes(layer)
        assert sizes[0] == EXPERTS
        found = checkpoint.read_experts(layer, *sizes)
        for e in range(EXPERTS):
            first = [part for part in (found.gate[e], found.up[e]) if part is not None]
            assert torch.cat(first).float().equal(gate_up[e])
            assert found.down[e].float().equal(down[e])
