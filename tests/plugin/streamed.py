"""Imported inside an engine's process: streamed batches have all their cold experts streamed.

By measured times, the experts of tests are too small for it. Where STREAMED is "all", they are
streamed all the same. Where it is "on the CPU", they are streamed without a GPU: copies are done
at once, the compiled core unpacks, and torch multiplies.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kt_kernel.device.streaming.experts import PackedExperts
from kt_kernel.plugin_entrypoints import common
from kt_kernel.serving import hybrid_model, streaming
from kt_kernel.serving.streaming import ModelStreaming

sys.path.append(str(Path(__file__).parents[1]))

from simulated_gpu import ImmediateLane, Pins, divide_routes, products

VARIABLE = "STREAMED"
ALL, ON_CPU = "all", "on the CPU"


class Device:
    def __init__(self, device: torch.device) -> None:
        self.lane, self.backend = ImmediateLane(), Pins()


def _on_cpu() -> bool:
    return os.environ.get(VARIABLE) == ON_CPU


def _whole(*given: Any, original: Any = ModelStreaming.whole) -> bool:
    return VARIABLE in os.environ or original(*given)


def _refuse(*given: Any, original: Any = common.refuse_streaming) -> None:
    if not _on_cpu():
        original(*given)


def _start(
    layers: Any,
    options: Any,
    device: Any,
    dtype: Any,
    engine: Any,
    original: Any = hybrid_model.start_streaming,
) -> str | None:
    if not _on_cpu():
        return original(layers, options, device, dtype, engine)
    simulated = replace(engine, products=products, memory_left=lambda device: 1 << 34)
    return original(layers, options, device, dtype, simulated, Device)


def _unpack(
    self: PackedExperts,
    staged: Sequence[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    original: Any = PackedExperts.unpack,
) -> None:
    if not _on_cpu():
        return original(self, staged, w13, w2)
    shapes = (self.inter, self.hidden), (self.inter, self.hidden), (self.hidden, self.inter)
    for i in range(len(w13)):
        [slot] = [slot for slot in self.held if _is(self, slot, [part[i] for part in staged])]
        made = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes]
        for matrix, to in enumerate(made):
            self._core.unpack(slot, matrix, to.numpy())
        w13[i], w2[i] = torch.cat(made[:2]), made[2]


def _is(experts: PackedExperts, slot: int, copied: Sequence[torch.Tensor]) -> bool:
    """Whether these are the bytes of a slot's expert."""
    at = experts._positions[slot]
    return all(
        torch.equal(part.memory[at], one) for part, one in zip(experts.parts, copied, strict=True)
    )


def _divide(*given: Any, original: Any = streaming.divide_routes, **more: Any) -> Any:
    return (divide_routes if _on_cpu() else original)(*given, **more)


ModelStreaming.whole = _whole  # type: ignore[method-assign]
common.refuse_streaming = _refuse
hybrid_model.start_streaming = _start
streaming.divide_routes = _divide
PackedExperts.unpack = _unpack  # type: ignore[method-assign]
