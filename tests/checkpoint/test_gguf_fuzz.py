"""Damaged GGUF files: whatever the bytes, an exception of the documented kinds or a result."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from gguf_bytes import ARRAY, STRING, U32, array, gguf, key, number, tensor, text
from grid import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.weights.quantised import QuantisedMatrix

E, H, I = 2, 64, 32  # noqa: E741
KEYS = [
    key("general.architecture", STRING, text("qwen3moe")),
    number("general.alignment", 32),
    number("qwen3moe.expert_count", E),
    key("tokens", ARRAY, array(STRING, 3, text("a") + text("bc") + text(""))),
    key("scores", ARRAY, array(U32, 2, bytes(8))),
]
TYPES = {"gate": (8, 34), "up": (2, 18), "down": (39, 17)}  # Q8_0, Q4_0, MXFP4
TENSORS, SIZE = [], 0
for _name, (_type, _bytes) in TYPES.items():
    _dims = (I, H, E) if _name == "down" else (H, I, E)
    TENSORS.append(tensor(f"blk.0.ffn_{_name}_exps.weight", _dims, _type, SIZE))
    SIZE += E * H * I // 32 * _bytes
VALID = gguf(KEYS, TENSORS, SIZE)
HEADER = len(VALID) - SIZE
PIECES = [
    b"\0",
    b"\1",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"blk.0.",
    b"ffn_up",
    b"_exps",
    b".bias",
    b".1.",
    *(struct.pack("<I", n) for n in (0, 1, 4, 5, 7, 8, 9, 10, 12, 30, 2**31, 2**32 - 1)),
    *(struct.pack("<Q", n) for n in (0, 1, 2, 32, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)),
]

edits = st.lists(
    st.tuples(
        st.integers(0, HEADER + 8),
        st.sampled_from([0, 1, 1, 4, 8]) | st.integers(0, 40),
        st.sampled_from(PIECES) | st.binary(max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
numbers = st.integers(0, 40) | st.sampled_from([2**31, 2**32 - 1])
longs = st.integers(0, 200) | st.sampled_from([2**32, 2**62, 2**63, 2**64 - 1])
names = st.sampled_from(
    [
        f"blk.{n}.ffn_{m}{e}.{p}"
        for n in ("0", "1", "00")
        for m in ("gate", "up", "down", "gate_up")
        for e in ("_exps", ".0", ".1", "")
        for p in ("weight", "bias", "scale")
    ]
) | st.text(max_size=4)
values = st.recursive(
    st.tuples(st.just(STRING), st.binary(max_size=4).map(text))
    | st.tuples(numbers, st.binary(max_size=12)),
    lambda inner: inner.map(lambda v: (ARRAY, array(v[0], 1, v[1]))),
    max_leaves=3,
)
known = ["general.alignment", "general.architecture", "split.count", "qwen3moe.expert_count"]
keys = st.tuples(st.text(max_size=3) | st.sampled_from(known), values)
tensors = st.tuples(
    names,
    st.lists(longs | st.sampled_from([E, H, I]), max_size=5).map(tuple),
    st.sampled_from([0, 1, 2, 8, 30, 39, 12, 16]) | numbers,
    longs.map(lambda n: 32 * (n % 2**58)),
)


def attempt(data, folder):
    path = folder / "m.gguf"
    path.write_bytes(data)
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            with suppress(ValueError, KeyError, OSError):
                checkpoint.read_tensor(name).reshape(-1)[:1].clone()
        for layer in checkpoint.layers():
            with suppress(ValueError):
                checkpoint.read_experts(layer, *checkpoint.sizes(layer))
        found = checkpoint.read_experts(0, E, H, I, method="LLAMAFILE")
    except (ValueError, KeyError, OSError) as error:
        assert str(error)
        return
    for matrix in found.gate + found.up + found.down:
        if isinstance(matrix, QuantisedMatrix):
            matrix.codes.sum()
        else:
            matrix.float().sum()


def edited(edits, length):
    """overwrite: keep the length, so that what follows stays where it is."""
    data = bytearray(VALID)
    for position, count, replacement, overwrite in edits:
        count = len(replacement) if overwrite else count
        data[position : position + count] = replacement
    data = bytes(data)
    return data if length is None else data[:length].ljust(length, b"\0")


# A fresh file for each example would cost more than the example.
many = settings(
    max_examples=examples(400, full=4000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
lengths = st.none() | st.integers(0, len(VALID) + 40)


@many
@given(edits=edits, length=lengths)
@example(edits=[(8, 8, b"\xff" * 8, True)], length=None)
def test_edited_bytes(tmp_path, edits, length):
    attempt(edited(edits, length), tmp_path)


@many
@given(
    keys=st.lists(keys, max_size=3),
    tensors=st.lists(tensors, max_size=4),
    valid=st.sets(st.integers(0, 2)),
    counts=st.tuples(st.none() | longs, st.none() | longs),
    version=st.sampled_from([3, 3, 3, 2, 1]) | numbers,
)
def test_any_keys_and_tensors(tmp_path, keys, tensors, valid, counts, version):
    attempt(built(keys, tensors, valid, counts, version), tmp_path)


def built(keys, tensors, valid, counts, version):
    """A file of these keys, and tensors among some of the valid ones."""
    return gguf(
        [key(name, kind, value) for name, (kind, value) in keys],
        [TENSORS[n] for n in sorted(valid)] + [tensor(*t) for t in tensors],
        SIZE,
        tensor_count=counts[0],
        key_count=counts[1],
        version=version,
    )


def test_the_valid_file_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(VALID)
    found = open_checkpoint(path).read_experts(0, E, H, I)
    assert np.array_equal(found.gate[1].codes.numpy(), np.zeros((I, H // 32 * 34), np.uint8))
    with pytest.raises(KeyError):
        open_checkpoint(path).read_tensor("x")
