"""A small model on the CPU whose experts move, and an engine that computes its hot ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from simulated_gpu import hot_products

from kt_kernel.device.uploads import HostUploads, Upload
from kt_kernel.serving.cache import ModelCache
from kt_kernel.serving.hot_packed import PackedHot, packed_hot
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import row_error
from kt_kernel.weights.expert_tensors import MATRICES

E, K, H, INNER, SLOTS, LAYERS = 8, 2, 64, 96, 3, 2
CPU = torch.device("cpu")


def random_weights() -> list[dict[str, torch.Tensor]]:
    """[E, rows, columns] of each matrix, for each layer."""
    g = torch.Generator().manual_seed(0)
    sizes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    return [
        {name: (torch.randn(E, *size, generator=g) / 8).bfloat16() for name, size in sizes.items()}
        for _ in range(LAYERS)
    ]


class PackedEngine:
    """The weights [S, 2I, H] and [S, H, I] that packed hot experts stand for at the moment."""

    def __init__(self, hot: PackedHot) -> None:
        self._hot = hot

    def __iter__(self) -> Iterator[torch.Tensor]:
        hot = self._hot
        for codes, scales in ((hot.w13, hot.s13), (hot.w2, hot.s2)):
            if hot.bits == 8:
                yield codes * scales[..., None]
                continue
            numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(2).float() - 8
            yield (numbers.unflatten(2, (-1, hot.group)) * scales.float()[..., None]).flatten(2)


class InstantUploads(HostUploads):
    """Uploads that copy nothing."""

    def __init__(self) -> None:
        super().__init__(lambda *given: torch.empty(0))

    def _copy(self, upload: Upload) -> None:
        pass


def make(weights: list[dict[str, torch.Tensor]], **options: Any) -> tuple[HybridModel, list[Any]]:
    """A loaded model on the CPU, and the engine's weights of each layer."""
    given = {"method": "INT4_G32", "cpuinfer": 2, "num_gpu_experts": SLOTS}
    given["enable_dynamic_expert_update"] = "on"
    model = HybridModel(KTOptions.from_mapping(given | options))
    engine = []
    for number, of_layer in enumerate(weights):
        layer = model.add_layer(
            layer_idx=number,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=INNER,
        )
        if layer.options.hot_format == "packed":
            packed = packed_hot(
                layer.options, number, layer.placement, layer.hot_shape(0, 1), torch.bfloat16, CPU
            )
            layer.hot = packed
            for expert in range(E):
                give = layer.deliver_hot if layer.slot_of(expert) >= 0 else layer.add_weight
                more = (torch.bfloat16,) if layer.slot_of(expert) >= 0 else ()
                for which in MATRICES:
                    give(expert, which, of_layer[which][expert], *more)
            layer.finish_loading()
            engine.append(PackedEngine(packed))
            continue
        hot = len(layer.placement.hot_experts)
        w13 = torch.cat([of_layer["gate"], of_layer["up"]], 1)[:hot].clone()
        w2 = of_layer["down"][:hot].clone()
        for expert in range(E):
            if expert >= hot or layer.keeps_hot:
                for which in MATRICES:
                    layer.add_weight(expert, which, of_layer[which][expert])
        layer.finish_loading()
        layer.slot_weights = w13, w2
        engine.append((w13, w2))
    return model, engine


def answer(
    layer: HybridLayer,
    engine: Any,
    x: Any,
    ids: Any,
    router: Any,
    *,
    pause: float = 0.0,
    **more: Any,
) -> Any:
    """A batch, with an engine that computes the hot experts after so many seconds."""
    slots, weights = layer.submit(x, ids, router, cold_slot=-1, **more)
    time.sleep(pause)
    return layer.collect(x, hot_products(x, slots, weights, *engine))


def check_sums(
    model: HybridModel,
    cold: HybridModel,
    engine: Any,
    inputs: Any,
    most: float = 0.02,
    pause: float = 0.0,
    **more: Any,
) -> None:
    """Each layer's sum is that of the same layer in a model with all experts cold."""
    for layer, alone, held in zip(model.layers, cold.layers, engine, strict=True):
        alone.submit(*inputs, **more)
        want = alone.collect(inputs[0]).double()
        real = want.abs().sum(-1) > 0
        found = answer(layer, held, *inputs, pause=pause, **more)
        assert row_error(found[real], want[real]).max() < most


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    tokens = (1, 7, 40)[number % 3]
    x = torch.randn(tokens, H, generator=g).bfloat16()
    ids = torch.randint(0, E, (tokens, K), generator=g, dtype=torch.int32)
    ids[-1, 0] = (-1, E)[number % 2]
    return x, ids, torch.rand(tokens, K, generator=g)


def started(model: HybridModel) -> ModelCache:
    # As engines load models: a tensor whose device or dtype is not given would be wrong.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            line = model.start_cache(CPU)
    finally:
        torch.set_default_dtype(before)
    assert line is not None and "experts of 2 layers move" in line
    assert model.cache is not None
    model.cache.begin()
    return model.cache
