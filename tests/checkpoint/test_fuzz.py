"""Damaged files: whatever the bytes, a Python exception of the documented kinds or a result."""

import json
from contextlib import suppress

import pytest
import torch
from grid import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kt_kernel.checkpoint import open_checkpoint

E, H, I = 2, 4, 2  # noqa: E741
TENSORS = {
    f"model.layers.0.mlp.experts.{e}.{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
    for e in range(E)
    for name, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I)))
}
VALID = save(TENSORS)
HEADER = 8 + int.from_bytes(VALID[:8], "little")
PIECES = [
    *(bytes([b]) for b in b'"{}[]:,-.089\\\xff'),
    *(b"1e9", b"null", b"NaN", b"F32", b"BF16", b"\\ud800", b"layers.0.", b"9" * 21),
]

edits = st.lists(
    st.tuples(
        st.integers(0, HEADER + 8),
        st.integers(0, 4),
        st.one_of(st.binary(max_size=4), st.sampled_from(PIECES)),
    ),
    min_size=1,
    max_size=4,
)


def attempt(path):
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            with suppress(ValueError, KeyError, OSError):
                checkpoint.read_tensor(name).reshape(-1)[:1].clone()
        found = checkpoint.read_experts(0, E, H, I)
    except (ValueError, KeyError, OSError) as error:
        assert str(error)
        return
    for tensor in found.gate + found.up + found.down:
        tensor.float().sum()


# A fresh file for each example would cost more than the example.
many = settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@many
@given(edits=edits, length=st.none() | st.integers(0, len(VALID) + 16), keep_length=st.booleans())
@example(edits=[(0, 8, b"\xff" * 8)], length=None, keep_length=False)
def test_edited_bytes(tmp_path, edits, length, keep_length):
    data = bytearray(VALID)
    for position, count, replacement in edits:
        data[position : position + count] = replacement
    if keep_length:  # get past the first check: the header length follows the edit
        change = len(data) - len(VALID)
        data[:8] = max(0, HEADER - 8 + change).to_bytes(8, "little")
    if length is not None:
        data = data[:length].ljust(length, b"\0")
    (tmp_path / "model.safetensors").write_bytes(bytes(data))
    attempt(tmp_path)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["BF16", "F32", "F4", "F6_E2M3", "BOOL", "C64", "I8"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@many
@given(
    name=st.sampled_from(sorted(TENSORS)),
    key=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=values,
    new_name=st.none() | st.text(max_size=8),
)
def test_edited_header(tmp_path, name, key, value, new_name):
    header = json.loads(VALID[8:HEADER])
    header[name][key] = value
    if new_name is not None:
        header[name.replace("up_proj", new_name)] = header.pop(name)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + VALID[HEADER:])
    attempt(path)


files = st.sampled_from(
    [
        "model.safetensors",
        "./model.safetensors",
        "x.safetensors",
        "",
        "..",
        "\0",
        "\ud800.safetensors",
    ]
)


@many
@given(st.dictionaries(st.sampled_from(sorted(TENSORS)) | st.text(max_size=5), files | values))
def test_any_index(tmp_path, weight_map):
    (tmp_path / "model.safetensors").write_bytes(VALID)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    attempt(tmp_path)


@many
@given(values)
def test_any_config(tmp_path, config):
    (tmp_path / "model.safetensors").write_bytes(VALID)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config, "text_config": config}))
    attempt(tmp_path)


def test_the_valid_file_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(VALID)
    found = open_checkpoint(tmp_path).read_experts(0, E, H, I)
    assert found.gate[0].sum() == I * H
    with pytest.raises(KeyError):
        open_checkpoint(tmp_path).read_tensor("x")
