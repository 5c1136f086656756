"""The live expert cache with the engine's own FP8 weights: codes and scales are copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_model import CPU, answer, check_sums, started
from grid import FULL, examples
from safetensors.torch import save_file

from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import quantise, row_error
from kt_kernel.weights.formats import FP8_BLOCK, WeightForm

E, K, H, INNER, SLOTS, LAYERS = 6, 2, 256, 256, 2, 2
NAMES = "gate", "up", "down"
CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


class Engine:
    """Codes and scales of the slots, and the weights that they stand for."""

    def __init__(self, experts: list[dict[str, tuple[torch.Tensor, torch.Tensor]]]) -> None:
        self.tensors = tuple(
            torch.stack([torch.cat([expert[name][part] for name in names]) for expert in experts])
            for part in range(2)
            for names in (("gate", "up"), ("down",))
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        w13, w2, s13, s2 = self.tensors
        for codes, scales in ((w13, s13), (w2, s2)):
            blocks = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
            yield codes.float() * blocks[:, : codes.shape[1], : codes.shape[2]]


def save(folder: Path, hidden: int = H, inter: int = INNER) -> Path:
    """A checkpoint in FP8."""
    g, tensors = torch.Generator().manual_seed(0), {}
    sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    for layer in range(LAYERS):
        for expert in range(E):
            for name, size in sizes.items():
                found = quantise(torch.randn(size, generator=g) / 8, WeightForm(FP8_BLOCK))
                place = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                assert found.scale is not None
                tensors[place] = found.codes.view(torch.float8_e4m3fn)
                tensors[f"{place}_scale_inv"] = found.scale
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "qwen3_moe", "quantization_config": CONFIG, "num_experts": E}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path)


def make(
    folder: Path, hot: int, moving: str, pools: int = 1, hidden: int = H, inter: int = INNER
) -> tuple[HybridModel, list[Engine]]:
    from safetensors.torch import load_file

    given = {"method": "FP8", "cpuinfer": 2, "num_gpu_experts": hot, "weight_path": str(folder)}
    given |= {"enable_dynamic_expert_update": moving, "threadpool_count": pools}
    if hot:
        given["hot_format"] = "engine"
    model, engines = HybridModel(KTOptions.from_mapping(given)), []
    tensors = load_file(folder / "model.safetensors")
    for number in range(LAYERS):
        layer = model.add_layer(
            layer_idx=number,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=hidden,
            moe_intermediate_size=inter,
        )
        layer.finish_loading()
        if not hot:
            continue
        place = f"model.layers.{number}.mlp.experts"
        held = Engine(
            [
                {
                    name: (
                        tensors[f"{place}.{expert}.{name}_proj.weight"],
                        tensors[f"{place}.{expert}.{name}_proj.weight_scale_inv"],
                    )
                    for name in NAMES
                }
                for expert in range(hot)
            ]
        )
        layer.slot_weights = held.tensors
        engines.append(held)
    return model, engines


def batch(number: int, hidden: int = H) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(number)
    tokens = (1, 5)[number % 2]
    ids = torch.randint(0, E, (tokens, K), generator=g, dtype=torch.int32)
    return (
        torch.randn(tokens, hidden, generator=g).bfloat16(),
        ids,
        torch.rand(tokens, K, generator=g),
    )


@pytest.mark.parametrize("pools", [1, 2] if FULL else [2])
def test_experts_move_and_nothing_changes(
    folder: Path, restless: None, simulated_gpu: None, pools: int
) -> None:
    """The same sums as with all experts cold; a lost or a doubled expert would be seen. Each pool
    has its part of an expert, in blocks of 128."""
    model, engines = make(folder, SLOTS, "on", pools)
    assert len(model.layers[0].wrapper.packed_experts().parts) == pools
    cold, _ = make(folder, 0, "off")
    cache, placements = started(model), set()
    steps = examples(8, full=16)
    for number in range(steps):
        check_sums(model, cold, engines, batch(number))
        placements.add(model.layers[0].current_placement)
    assert len(placements) > steps // 4 and cache.counters.cache_uploads > steps // 2
    x, ids, router = batch(1)
    want = answer(model.layers[0], engines[0], x, ids, router)[0].double()
    for factor in (0, 2):
        wrong = router.clone()
        wrong[0, 0] *= factor
        found = answer(model.layers[0], engines[0], x, ids, wrong)[0].double()
        assert row_error(found, want).max() > 0.1


def test_a_hidden_size_with_a_part_of_a_block(
    tmp_path: Path, restless: None, simulated_gpu: None
) -> None:
    """Scales of the last columns of gate and up, and of the last rows of down, stand for fewer."""
    hidden, inter = 192, 128
    save(tmp_path, hidden, inter)
    model, engines = make(tmp_path, SLOTS, "on", hidden=hidden, inter=inter)
    assert engines[0].tensors[2].shape == (SLOTS, 2, 2)
    cold, _ = make(tmp_path, 0, "off", hidden=hidden, inter=inter)
    cache = started(model)
    for number in range(4):
        check_sums(model, cold, engines, batch(number, hidden))
    assert cache.counters.cache_uploads > 1


def test_blocks_across_gate_and_up(tmp_path: Path) -> None:
    """Where gate ends within a block of 128 rows, the engine has no scales of up alone."""
    save(tmp_path, inter=192)
    model, _ = make(tmp_path, SLOTS, "on", inter=192)
    for layer in model.layers:
        w13, w2, s13, s2 = layer.slot_weights
        layer.slot_weights = w13, w2, s13[:, :3].contiguous(), s2  # of 384 rows
    message = "layer 0: blocks of 128 rows lie across gate and up of 192 rows; accepted: --kt-hot"
    with pytest.raises(OptionError, match=message):
        model.start_cache(CPU)


def _changed(number: int, change: Any) -> Any:
    def apply(layer: Any) -> None:
        tensors = list(layer.slot_weights)
        tensors[number] = change(tensors[number])
        layer.slot_weights = tuple(tensors)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _changed(2, lambda s: s[:, :1]),
            r"holds scales of hot experts as \[2, 1, 2\] .* \[2, 4, 2",
        ),
        (
            _changed(2, lambda s: s.double()),
            "hot experts in torch.float64; accepted: .* 128 blocks",
        ),
        (_changed(3, lambda s: s.bfloat16()), "FP8 with .* scales, and the CPU holds"),
        (_changed(0, lambda w: w.flip(1).contiguous()), "in a layout of its own"),
        (
            lambda layer: setattr(layer, "slot_weights", layer.slot_weights[:2]),
            "float8_e4m3fn; acc",
        ),
    ],
)
def test_weights_that_cannot_be_replaced(folder: Path, change: Any, message: str) -> None:
    model, _ = make(folder, SLOTS, "on")
    change(model.layers[1])
    with pytest.raises(OptionError, match=f"dynamic-expert-update on: layer 1.*{message}"):
        model.start_cache(CPU)
