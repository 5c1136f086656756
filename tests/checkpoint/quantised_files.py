"""Makes quantised checkpoints in tests, and shares the checks of their readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel import KTMoEWrapper
from kt_kernel.checkpoint import read_experts
from kt_kernel.moe.wrapper import BaseMoEWrapper
from kt_kernel.testing import moe_reference, row_error, values_of
from kt_kernel.weights.methods import get_method

E, H, I = 3, 192, 64  # noqa: E741
MOE = "model.layers.0.mlp.experts"
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
Tensors = dict[str, torch.Tensor]
Make = Callable[[int, int], Tensors]  # the parts of a matrix [rows, columns]


def shapes(hidden: int = H, inter: int = I) -> dict[str, tuple[int, int]]:
    return {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}


def make_experts(
    make: Make,
    hidden: int = H,
    inter: int = I,
    where: str = MOE,
    names: dict[str, str] = PROJECTIONS,
) -> Tensors:
    """Tensors of E experts. `make` gives the parts of one matrix [rows, columns]."""
    torch.manual_seed(0)
    return {
        f"{where}.{e}.{names[matrix]}.{part}": tensor
        for e in range(E)
        for matrix, shape in shapes(hidden, inter).items()
        for part, tensor in make(*shape).items()
    }


def save(
    folder: Path,
    tensors: Tensors,
    quantization: dict[str, Any] | None = None,
    model_type: str = "qwen3_moe",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config: dict[str, Any] = {"model_type": model_type}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parts_of(
    tensors: Tensors,
    expert: int,
    matrix: str,
    where: str = MOE,
    names: dict[str, str] = PROJECTIONS,
) -> Tensors:
    start = f"{where}.{expert}.{names[matrix]}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def check_values(
    path: Path,
    tensors: Tensors,
    method: str,
    reference: Callable[[Tensors], torch.Tensor],
    hidden: int = H,
    inter: int = I,
    **named: Any,
) -> Any:
    """Checks that the values read equal `reference` of each matrix's parts, exactly."""
    found = read_experts(path, 0, E, hidden, inter, method=method)
    for expert in range(E):
        for matrix in PROJECTIONS:
            wanted = reference(parts_of(tensors, expert, matrix, **named)).double()
            assert torch.equal(values_of(getattr(found, matrix)[expert]), wanted), (expert, matrix)
    return found


def tensors_of(*layers: Sequence[Make], hidden: int = H, inter: int = 160) -> Tensors:
    """The tensors of layers whose gate, up and down have these makers of parts."""
    torch.manual_seed(0)
    return {
        f"model.layers.{layer}.mlp.experts.{e}.{PROJECTIONS[matrix]}.{part}": tensor
        for layer, makes in enumerate(layers)
        for e in range(E)
        for (matrix, shape), make in zip(shapes(hidden, inter).items(), makes, strict=True)
        for part, tensor in make(*shape).items()
    }


def check_formats(
    path: Path,
    tensors: Tensors,
    references: Sequence[Callable[[Tensors], torch.Tensor]],
    method: str,
    layer: int = 0,
    hidden: int = H,
    inter: int = 160,
) -> Any:
    """Checks the values of a layer against references of the parts of gate, up and down, and its
    output."""
    found = read_experts(path, layer, E, hidden, inter, method=method)
    where = f"model.layers.{layer}.mlp.experts"
    values = {
        matrix: [reference(parts_of(tensors, e, matrix, where)).double() for e in range(E)]
        for matrix, reference in zip(PROJECTIONS, references, strict=True)
    }
    for matrix, each in values.items():
        for e, value in enumerate(each):
            read = getattr(found, matrix)[e]
            plain = read.double() if isinstance(read, torch.Tensor) else values_of(read)
            assert torch.equal(plain, value), (matrix, e)
    check_layer(path, method, list(values.values()), layer)
    return found


def load_layer(
    path: Path, method: str, hidden: int = H, inter: int = I, layer: int = 0
) -> BaseMoEWrapper:
    """A wrapper with all experts of a layer on the CPU."""
    wrapper = KTMoEWrapper(
        layer_idx=layer,
        num_experts=E,
        num_experts_per_tok=1,
        hidden_size=hidden,
        moe_intermediate_size=inter,
        num_gpu_experts=0,
        cpuinfer_threads=1,
        threadpool_count=1,
        weight_path=path,
        method=method,
    )
    wrapper.load_weights(torch.arange(E))
    return wrapper


def check_layer(path: Path, method: str, values: list[list[torch.Tensor]], layer: int = 0) -> None:
    """Checks a layer's output against exact weights, lists of gates, ups and downs by expert."""
    gates = values[0]
    inter, hidden = gates[0].shape
    wrapper = load_layer(path, method, hidden, inter, layer)
    x, ids, weights = torch.randn(E, hidden).bfloat16(), torch.arange(E)[:, None], torch.ones(E, 1)
    matrices = (torch.stack(each).float() for each in values)
    wanted = moe_reference(x, ids, weights, *matrices, method="BF16", rounded=False)
    most = 0.03 if get_method(method).int8_activations else 0.01
    assert row_error(wrapper.forward(x, ids, weights, None), wanted).max() < most


def fails(path: Path, method: str | None, *words: object, hidden: int = H, inter: int = I) -> None:
    """Checks that reading raises a ValueError with all of the words."""
    with pytest.raises(ValueError) as caught:
        read_experts(path, 0, E, hidden, inter, method=method)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def check_bad_parts(
    folder: Path,
    tensors: Tensors,
    method: str,
    quantization: dict[str, Any] | None,
    part: str,
    *,
    bad_values: tuple[Any, ...] = (),
    dtype: torch.dtype = torch.float64,
    hidden: int = H,
    inter: int = I,
) -> None:
    """Checks that a missing part, another shape, another dtype and a bad value are named."""
    name = f"{MOE}.1.up_proj.{part}"
    good = tensors[name]

    def broken(value: torch.Tensor | None, *words: object, number: list[int] = [0]) -> None:  # noqa: B006
        number[0] += 1
        other = {n: t for n, t in tensors.items() if n != name}
        if value is not None:
            other[name] = value
        path = save(folder / str(number[0]), other, quantization)
        fails(path, method, name, *words, hidden=hidden, inter=inter)

    broken(None, "missing")
    grown = torch.cat([good.reshape(-1), good.reshape(-1)[:1]])
    broken(grown, [len(grown)])
    broken(good.reshape(1, 1, 1, *good.shape), [1, 1, 1, *good.shape])
    broken(torch.zeros(good.shape, dtype=dtype), "has dtype", {torch.float64: "F64"}[dtype])
    for value in bad_values:
        changed = good.clone()
        changed.view(-1)[-1] = value
        broken(changed, "accepted")
