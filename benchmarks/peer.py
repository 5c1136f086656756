"""Runs one compiled MoE class of kt-kernel in its own process; run.py --peer starts it.

    peer.py REQUEST FD      REQUEST: JSON, see `Request`; answers go to FD, one JSON per line

Loads only kt-kernel's extension, from the folder to which its wheel was unpacked. Nothing is
installed, and none of kt-kernel's Python runs. Requests follow on standard input, one per line:
{"tokens": T, "seconds": s} is answered with {"times": [...]}; {"output": T, "path": p} writes the
output of a fixed batch to p. Weights and batches are those of kt-moe's layer, from the same seeds.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from helper import serve
from methods import METHODS, Source, expert_sources
from rounds import visitor
from shapes import SEED, Routing, Shape, check_ids, inputs

# Classes of kt-kernel 0.7.2 that compute a method, in its order of preference.
CLASSES = {
    "BF16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
    "AMXINT8": ("AMXInt8_MOE",),
    "AMXINT4": ("AMXInt4_MOE",),
    "RAWINT4": ("AMXInt4_KGroup_MOE", "AVXVNNI256RawInt4_MOE", "AVX2RawInt4_MOE"),
    "GPTQ_INT4": ("AVXVNNI256GPTQInt4Packed_MOE", "AVXVNNI256GPTQInt4_MOE", "AVX2GPTQInt4_MOE"),
    "FP8": ("AMXFP8_MOE", "AVX2FP8_MOE"),
    "FP8_PERCHANNEL": ("AMXFP8PerChannel_MOE",),
    "MXFP8": ("AMXMXFP8_KGroup_MOE", "AVX2MXFP8_MOE"),
    "MXFP4": ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"),
    "NVFP4": ("AVX2MXFP4_MOE",),
}
# This class keeps reading the weights it was given, so each expert needs its own; otherwise all
# would come from a cache. The other classes copy them (seen by overwriting the sources after
# loading).
READS_SOURCES = ("AVX2RawInt4_MOE",)
EIGHT_BITS = ("FP8", "FP8_PERCHANNEL", "MXFP8")
FOUR_BITS = ("RAWINT4", "GPTQ_INT4", "MXFP4", "NVFP4")
GROUPS = {"FP8": 128, "MXFP8": 32, "RAWINT4": 32, "GPTQ_INT4": 128, "MXFP4": 32, "NVFP4": 16}


@dataclass
class Request:
    folder: str
    variant: str  # "amx", "avx512_bf16", ..., "avx2"
    method: str
    shape: list[Any]
    layers: int
    max_tokens: int
    threads: list[int]  # per pool
    nodes: list[int]


class Refused(Exception):
    """kt-kernel cannot run this here; the message says why."""


def load_extension(folder: str, variant: str) -> ModuleType:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(folder) / "kt_kernel" / f"_kt_kernel_ext_{variant}{suffix}"
    if not path.is_file():
        raise Refused(f"no {path.name} in {path.parent}: unpack the wheel for this Python there")
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pick_class(moe: ModuleType, method: str, variant: str) -> Any:
    flags = next(
        set(line.split())
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("flags")
    )
    if method in ("AMXINT8", "AMXINT4") and "amx_int8" not in flags:
        raise Refused(f"kt-kernel's {method} needs a CPU with AMX")
    for name in CLASSES.get(method, ()):
        if name.startswith("AVXVNNI256") and not flags & {"avx_vnni", "avxvnni"}:
            continue
        if hasattr(moe, name):
            return getattr(moe, name)
    raise Refused(f"kt-kernel's {variant} variant has no class for {method}")


def peer_tensors(method: str, source: Source) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weights, scales) of a matrix in kt-kernel's form."""
    data, scale = source.data, source.scale
    if method == "GPTQ_INT4":  # int32 [K/8, N], lowest nibble first; float32 [K/group, N]
        words = data.view(torch.int32)  # eight nibbles along K, low first
        return words.t().contiguous(), scale.float().t().contiguous()
    if method == "MXFP4":
        return data, torch.exp2(scale.float() - 127).to(torch.bfloat16)
    if method == "NVFP4":
        blocks = scale.view(torch.float8_e4m3fn).float()
        return data, (blocks * source.factor).to(torch.bfloat16)
    return data, scale


class Layers:
    """kt-kernel's layers of one method, and their batches."""

    def __init__(self, request: Request) -> None:
        self.shape = Shape(*request.shape)
        ext = load_extension(request.folder, request.variant)
        kind = pick_class(ext.moe, request.method, request.variant)
        self.name = kind.__name__
        pools = ext.WorkerPoolConfig()
        pools.subpool_count = len(request.threads)
        pools.subpool_numa_map = request.nodes
        pools.subpool_thread_count = request.threads
        self._cpu = ext.CPUInfer(pools)
        self._request, self._ext, self._kind = request, ext, kind
        self._keep: list[torch.Tensor] = []  # sources, for READS_SOURCES
        sources = expert_sources(METHODS[request.method], self.shape)
        self._layers = [self._make(sources, number) for number in range(request.layers)]
        self._routing = Routing(self.shape, request.layers, SEED)
        self._batches: dict[int, Any] = {}

    def _make(self, sources: list[Source], number: int) -> Any:
        shape, method = self.shape, self._request.method
        config = self._ext.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.inter, 0)
        config.layer_idx, config.pool = number, self._cpu.backend_
        config.max_len = max(32, -(-self._request.max_tokens // 32) * 32)
        alive = []
        for name, source in zip(("gate", "up", "down"), sources, strict=True):
            if method in ("AMXINT8", "AMXINT4"):  # the class quantises all experts at once
                stacked = source.data.expand(shape.experts, -1, -1).contiguous()
                alive.append(stacked)
                setattr(config, f"{name}_proj", stacked.data_ptr())
                continue
            weights, scales = peer_tensors(method, source)
            own = self.name in READS_SOURCES
            every = [weights.clone() if own else weights for _ in range(shape.experts)]
            alive += every if scales is None else [*every, scales]
            setattr(config, f"{name}_projs", [[t.data_ptr() for t in every]])
            scale = 0 if scales is None else scales.data_ptr()
            setattr(config, f"{name}_scales", [[scale] * shape.experts])
        if method in EIGHT_BITS + FOUR_BITS:
            quant = config.quant_config
            quant.bits = 8 if method in EIGHT_BITS else 4
            quant.group_size = GROUPS.get(method, 0)
            quant.zero_point, quant.per_channel = False, method == "FP8_PERCHANNEL"
            config.quant_config = quant
        layer = self._kind(config)
        slots = torch.arange(shape.experts)
        self._cpu.submit(layer.load_weights_task(slots.data_ptr()))
        self._cpu.sync()
        if method not in ("AMXINT8", "AMXINT4"):
            self._keep += alive
        return layer

    def output(self, tokens: int) -> torch.Tensor:
        x, weights = inputs(self.shape, tokens)
        out = torch.zeros_like(x)
        self._forward(0, x, check_ids(self.shape, tokens), weights, out)
        return out

    def visit(self, tokens: int, seconds: float) -> list[float]:
        if tokens not in self._batches:
            x, weights = inputs(self.shape, tokens)
            out = torch.zeros_like(x)

            def step() -> float:
                layer, ids = self._routing.draw(tokens)
                return self._forward(layer, x, ids, weights, out)

            self._batches[tokens] = visitor(step)
        return self._batches[tokens](seconds)

    def _forward(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> float:
        count = torch.tensor([len(x)], dtype=torch.int32)
        begin = time.perf_counter()
        task = self._layers[layer].forward_task(
            count.data_ptr(),
            self.shape.top_k,
            ids.data_ptr(),
            weights.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            False,
        )
        self._cpu.submit(task)
        self._cpu.sync()
        return time.perf_counter() - begin


def start(request: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    torch.set_num_threads(1)
    layers = Layers(Request(**request))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "output" in asked:
            torch.save(layers.output(asked["output"]), asked["path"])
            return {"done": True}
        return {"times": layers.visit(asked["tokens"], asked["seconds"])}

    return layers.name, answer


if __name__ == "__main__":
    serve(start, (Refused, ImportError, RuntimeError, ValueError, TypeError, AttributeError))
