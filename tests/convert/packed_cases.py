"""Small checkpoints and helpers for the tests of packed directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kt_kernel import KTMoEWrapper
from kt_kernel.conversion import Progress, Request, convert, make_plan
from kt_kernel.weights.store.quant_methods import QUANT_METHODS

E, H, I, K = 3, 128, 256, 2  # noqa: E741
LAYERS = (1, 2)
METHODS = sorted(set(QUANT_METHODS.values()))
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def save_checkpoint(
    folder: Path,
    layers: tuple[int, ...] = LAYERS,
    dtype: torch.dtype = torch.bfloat16,
    biases: bool = False,
    seed: int = 0,
    hidden: int = H,
    inter: int = I,
) -> Path:
    """Writes a checkpoint of random experts, with one file per layer."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        tensors = {}
        for expert in range(E):
            for name, (rows, columns) in shapes(hidden, inter).items():
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[name]}"
                weight = torch.randn(rows, columns, generator=generator)
                tensors[f"{stem}.weight"] = (weight * columns**-0.5).to(dtype)
                if biases:
                    tensors[f"{stem}.bias"] = torch.randn(rows, generator=generator).to(dtype)
        save_file(tensors, folder / f"model-{layer}.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder


def shapes(hidden: int = H, inter: int = I) -> dict[str, tuple[int, int]]:
    return {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}


def run_convert(
    source: Path,
    output: Path,
    method: str | None = "AMXINT8",
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    convert(make_plan(Request(str(source), str(output), method, **options)), progress)
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def wrapper(layer: int, method: str, path: Path | None, **options: Any) -> Any:
    defaults = dict(
        layer_idx=layer,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=I,
        cpuinfer_threads=1,
        threadpool_count=1,
        method=method,
        weight_path=path,
    )
    return KTMoEWrapper(**defaults | options)


def loaded(
    layer: int, method: str, path: Path, mapping: list[int] | None = None, **options: Any
) -> Any:
    made = wrapper(layer, method, path, **options)
    made.load_weights(torch.tensor(mapping or range(E)))
    return made


def forward(layer: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, H, generator=generator)
    ids = torch.randint(E, (5, K), generator=generator)
    return layer.forward(x, ids, torch.rand(5, K, generator=generator), None)


def same_forward(a: Any, b: Any) -> None:
    first, second = forward(a), forward(b)
    assert first.abs().max() > 0 and torch.equal(first, second)
