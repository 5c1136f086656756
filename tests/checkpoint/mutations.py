"""Damages checkpoints in a few places, in every way possible in a file: names, types, shapes,
values, header, length, settings. A change is three numbers: what to do, where, and how. Any three
numbers are a change."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from samples import Sample

Change = tuple[int, int, int]

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "BOOL": torch.bool,
    "U32": torch.uint32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WORDS = (
    *(
        "gate up down gate_up w1 w2 w3 0 1 2 3 01 7 weight scale bias"
        " _inv _2 packed zero_point g_idx shape qweight qzeros scales"
        " blocks input output global proj experts layers model mlp"
        " block_sparse_moe language_model.model"
    ).split(),
    "",
    ".",
    "\ud800",
)
KEYS = tuple(
    (
        "quant_method checkpoint_format bits w_bit sym version format"
        " weight_block_size config_groups group_size desc_act"
    ).split()
)
SETTINGS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    4,
    8,
    -1,
    1e300,
    "",
    *"gptq gptq_v2 awq fp8 mxfp4 gemm pack-quantized compressed-tensors modelopt".split(),
    [],
    [128, 128],
    {},
    {"a": {"weights": 1}},
    {"a": {"weights": {"num_bits": 8}}},
    [[]],
)
MODEL_TYPES: tuple[Any, ...] = (None, 3, [], {}, "", "strange", "qwen3_moe\n", "\ud800")
NUMBERS = (
    float("nan"),
    float("inf"),
    float("-inf"),
    -1.0,
    -0.0,
    0.0,
    1.0,
    6.1e-5,
    5e-8,
    65504.0,
    1e38,
)


@dataclass
class _State:
    """dtype, shape and data of each tensor; config.json; deviations of the header; and the number
    of extra bytes in the file."""

    tensors: dict[str, tuple[str, list[int], bytes]]
    config: dict[str, Any]
    header: dict[str, dict[str, Any]] = field(default_factory=dict)
    longer: int = 0


def _start(sample: Sample) -> _State:
    tensors = {}
    for name, tensor in sample.tensors.items():
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        tensors[name] = (NAMES[tensor.dtype], list(tensor.shape), flat.numpy().tobytes())
    return _State(
        tensors,
        {"model_type": sample.model_type, "quantization_config": deepcopy(sample.quantization)},
    )


def _bytes_of(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def _pick(values: Any, number: int) -> Any:
    values = list(values)
    return values[number % len(values)]


def _renamed(name: str, number: int) -> str:
    """The name with one of its words replaced by another."""
    old = _pick([word for word in WORDS if word and word in name], number)
    return name.replace(old, _pick(WORDS, number // 7), 1)


def _drop(state: _State, a: int, b: int) -> None:
    del state.tensors[_pick(state.tensors, a)]


def _rename(state: _State, a: int, b: int) -> None:
    name = _pick(state.tensors, a)
    state.tensors[_renamed(name, b)] = state.tensors.pop(name)


def _copy(state: _State, a: int, b: int) -> None:
    name = _pick(state.tensors, a)
    state.tensors.setdefault(_renamed(name, b), state.tensors[name])


def _swap(state: _State, a: int, b: int) -> None:
    one, other = _pick(state.tensors, a), _pick(state.tensors, b)
    state.tensors[one], state.tensors[other] = state.tensors[other], state.tensors[one]


def _retype(state: _State, a: int, b: int) -> None:
    name = _pick(state.tensors, a)
    old, shape, data = state.tensors[name]
    new = _pick(DTYPES, b)
    if b % 3:  # one of the same size
        new = _pick([d for d in DTYPES if _bytes_of(d) == _bytes_of(old)], b)
    if _bytes_of(new) != _bytes_of(old):
        if not shape or shape[-1] * _bytes_of(old) % _bytes_of(new):
            return
        shape = [*shape[:-1], shape[-1] * _bytes_of(old) // _bytes_of(new)]
    state.tensors[name] = new, shape, data


def _reshape(state: _State, a: int, b: int) -> None:
    name = _pick(state.tensors, a)
    dtype, shape, data = state.tensors[name]
    count = len(data) // _bytes_of(dtype)
    shapes = [shape[::-1], [count], [1, *shape], [*shape, 1], [n for n in shape if n != 1]]
    if shape and shape[-1] % 2 == 0:
        shapes += [[*shape[:-1], shape[-1] // 2, 2], [2, *shape[:-1], shape[-1] // 2]]
    state.tensors[name] = dtype, _pick(shapes, b), data


def _resize(state: _State, a: int, b: int) -> None:
    """Makes a dimension longer or shorter. Data is cut, or repeated from the start."""
    name = _pick(state.tensors, a)
    dtype, shape, data = state.tensors[name]
    if not shape:
        return
    shape, place = list(shape), b % len(shape)
    shape[place] = max(0, shape[place] + _pick((-1, 1, -shape[place], shape[place]), b // 8))
    size = _bytes_of(dtype)
    for n in shape:
        size *= n
    state.tensors[name] = dtype, shape, (data * (size // max(1, len(data)) + 1))[:size]


def _byte(state: _State, a: int, b: int) -> None:
    name = _pick(state.tensors, a)
    dtype, shape, data = state.tensors[name]
    if data:
        place = b % len(data)
        data = data[:place] + bytes([b // 5 % 256]) + data[place + 1 :]
    state.tensors[name] = dtype, shape, data


def _number(state: _State, a: int, b: int) -> None:
    """Writes a special value, preferably to a tensor of scales."""
    scales = [name for name in state.tensors if "scale" in name]
    name = _pick(scales or state.tensors, a)
    dtype, shape, data = state.tensors[name]
    kind = DTYPES[dtype]
    if not data or not kind.is_floating_point:
        return _byte(state, list(state.tensors).index(name), b)
    value = torch.tensor([_pick(NUMBERS, b)]).to(kind).view(torch.uint8).numpy().tobytes()
    place = b // 16 % (len(data) // len(value)) * len(value)
    state.tensors[name] = dtype, shape, data[:place] + value + data[place + len(value) :]


def _misdescribe(state: _State, a: int, b: int) -> None:
    """Makes the header contradict the data."""
    key = _pick(("shape", "dtype", "data_offsets"), b)
    junk = _pick(([], [0], [1, 2], [2**62, 2**62], [-1], None, "F4", "F32", 7, [0, 2**62]), b // 3)
    state.header.setdefault(_pick(state.tensors, a), {})[key] = junk


def _configure(state: _State, a: int, b: int) -> None:
    setting = deepcopy(_pick(SETTINGS, b))
    if a % 8 == 0:
        state.config["quantization_config"] = setting
    elif a % 8 == 1:
        state.config["model_type"] = _pick(MODEL_TYPES, b)
    elif isinstance(state.config["quantization_config"], dict):
        state.config["quantization_config"][_pick(KEYS, a // 8)] = setting


def _cut(state: _State, a: int, b: int) -> None:
    state.longer = a % 64 - 32 if b % 2 else -a


CHANGES = (
    _drop,
    _rename,
    _copy,
    _swap,
    _retype,
    _reshape,
    _resize,
    _byte,
    _number,
    _number,
    _misdescribe,
    _configure,
    _cut,
)


def write(folder: Path, sample: Sample, changes: list[Change]) -> dict[str, Any]:
    """Writes the changed checkpoint to `folder`; returns its quantization_config."""
    state = _start(sample)
    for kind, a, b in changes:
        if state.tensors:
            CHANGES[kind % len(CHANGES)](state, a, b)
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, data) in state.tensors.items():
        offsets = [position, position + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        header[name] |= state.header.get(name, {})
        position += len(data)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    whole = b"".join(
        (len(text).to_bytes(8, "little"), text, *(d for *_, d in state.tensors.values()))
    )
    whole = whole[: state.longer] if state.longer < 0 else whole + bytes(state.longer)
    _replace(folder / "model.safetensors", whole)
    _replace(folder / "config.json", json.dumps(state.config).encode("utf-8", "surrogatepass"))
    settings = state.config["quantization_config"]
    return settings if isinstance(settings, dict) else {}


def _replace(path: Path, data: bytes) -> None:
    """Replaces a file so that the change is noticed even within a tick of the clock."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)
