"""Routine "load": the wrapper reads and packs a checkpoint file, as in an engine."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import anonymous_memory
from methods import DENSE_TYPES, Method, Source, expert_sources
from rounds import Line
from shapes import Shape

from kt_kernel import KTMoEWrapper
from kt_kernel.testing import int4_settings

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


def checkpoint_tensors(method: Method, source: Source, n: int, k: int) -> dict[str, torch.Tensor]:
    """A matrix with the names and dtypes that checkpoints of its method have."""
    data, scale = source.data, source.scale
    if method.dense:
        return {"weight": data}
    if method.name == "RAWINT4":
        shape = torch.tensor([n, k])
        return {
            "weight_packed": data.view(torch.int32),
            "weight_scale": scale,
            "weight_shape": shape,
        }
    if method.name == "GPTQ_INT4":  # packed along K, [K/8, N]; zero points are stored minus one
        zeros = torch.full((scale.shape[1], n // 8), 0x77777777, dtype=torch.int32)
        return {
            "qweight": data.view(torch.int32).t().contiguous(),
            "scales": scale.t().contiguous(),
            "qzeros": zeros,
            "g_idx": (torch.arange(k) // method.group).to(torch.int32),
        }
    if method.name == "MXFP4":
        return {"weight_packed": data, "weight_scale": scale}
    if method.name == "NVFP4":
        return {
            "weight": data,
            "weight_scale": scale.view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(source.factor),
        }
    name = "weight_scale" if method.name == "FP8_PERCHANNEL" else "weight_scale_inv"
    return {"weight": data.view(torch.float8_e4m3fn), name: scale}


def config(method: Method) -> dict[str, Any]:
    """The config of a Qwen3-MoE checkpoint, including its quantization_config."""
    quantisation = {
        "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "FP8_PERCHANNEL": {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "MXFP8": {"quant_method": "mxfp8"},
        "RAWINT4": int4_settings(["lm_head"]),
        "GPTQ_INT4": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": method.group,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        },
        "MXFP4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }.get(method.name)
    return {"model_type": "qwen3_moe"} | (
        {"quantization_config": quantisation} if quantisation else {}
    )


def write_layer(path: Path, layer: int, experts: int, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file with the same tensors for all experts of a layer. Never holds all
    of it in memory; it is on the disk when this returns."""
    header: dict[str, Any] = {}
    position = 0
    for expert in range(experts):
        for name, tensor in tensors.items():
            end = position + tensor.nbytes
            header[f"model.layers.{layer}.mlp.experts.{expert}.{name}"] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = [t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors.values()]
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(experts):
            for part in data:
                file.write(part)
        file.flush()
        os.fsync(file.fileno())


class Files:
    """A checkpoint of `layers` layers, one file each, in a temporary folder that is deleted with
    this.

    method: the method whose format the weights have. source: one of DENSE_TYPES for dense weights.
    """

    def __init__(self, shape: Shape, method: Method, source: str, layers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        (self.path / "config.json").write_text(json.dumps(config(method)))
        tensors: dict[str, torch.Tensor] = {}
        for name, matrix in zip(PROJECTIONS, expert_sources(method, shape), strict=True):
            n, k = (shape.hidden, shape.inter)[:: 1 if name == "down_proj" else -1]
            for suffix, tensor in checkpoint_tensors(method, matrix, n, k).items():
                tensors[f"{name}.{suffix}"] = tensor.to(DENSE_TYPES.get(source, tensor.dtype))
        self._files = [self.path / f"model-{layer:05d}.safetensors" for layer in range(layers)]
        for layer, file in enumerate(self._files):
            write_layer(file, layer, shape.experts, tensors)
        self.bytes = sum(file.stat().st_size for file in self._files)

    def leave_page_cache(self) -> None:
        for file in self._files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class LoadBench:
    """Loads a method's layers from files whose weights are stored as `source`."""

    def __init__(
        self,
        shape: Shape,
        method: Method,
        files: Files,
        source: str,
        threads: int | None,
        layers: int,
    ) -> None:
        self._shape, self._method, self._threads, self._layers = shape, method, threads, layers
        self._files, self._source = files, source
        self.threads = 0
        self._packed = 0
        self._anonymous = 0
        self._load(False)  # fails before the rounds if the method cannot be loaded

    def line(self, limits: int, cold: bool) -> Line:
        """cold: removes the files from the page cache before each load."""
        info: dict[str, Any] = {
            "package": "kt_moe",
            "method": self._method.name,
            "table": "",
            "tokens": 0,
            "threads": self.threads,
            "beside": "",
            "layers": self._layers,
            "source": self._source,
            "cache": "cold" if cold else "warm",
            "source_bytes": self._files.bytes,
            "packed_bytes": self._packed,
            "packed_bytes_per_weight": self._packed
            / (self._layers * self._shape.experts * self._shape.weights),
        }

        def visit(seconds: float) -> list[float]:
            end = time.perf_counter() + seconds
            times = [self._load(cold)]
            while time.perf_counter() < end:
                times.append(self._load(cold))
            info["anonymous_bytes"] = self._anonymous
            return times

        return Line(
            info=info,
            bytes=(self._files.bytes + self._packed) / 2,  # a copy reads and writes its bytes
            operations=0.0,
            visit=visit,
            limits=limits,
            unit=None,
            memory="dram_copy",
        )

    def _load(self, cold: bool) -> float:
        shape, wrappers = self._shape, []
        slots = torch.arange(shape.experts)
        if cold:
            self._files.leave_page_cache()
        with PeakAnonymous() as peak:
            begin = time.perf_counter()
            for layer in range(self._layers):
                wrapper = KTMoEWrapper(
                    layer,
                    shape.experts,
                    shape.top_k,
                    shape.hidden,
                    shape.inter,
                    num_gpu_experts=0,
                    method=self._method.name,
                    weight_path=str(self._files.path),
                    cpuinfer_threads=self._threads,
                )
                wrapper.load_weights(slots)
                wrappers.append(wrapper)
            seconds = time.perf_counter() - begin
        self._anonymous = max(self._anonymous, peak.bytes)
        self._packed = sum(wrapper.packed_bytes for wrapper in wrappers)
        self.threads = sum(wrappers[0]._settings.pools.threads)
        return seconds


class PeakAnonymous:
    """The peak of anonymous memory inside the block, above the amount before it."""

    def __enter__(self) -> PeakAnonymous:
        self.bytes, self._before = 0, anonymous_memory()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        done = False
        while not done:
            done = self._end.wait(0.005)
            self.bytes = max(self.bytes, anonymous_memory() - self._before)
