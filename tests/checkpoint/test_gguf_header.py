"""Headers of GGUF files: read as the gguf package reads them, and everything that can be wrong."""

import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf_bytes import ARRAY, STRING, U32, array, gguf, key, number, tensor, text
from gguf_models import SUPPORTED, Model, write

from kt_kernel.checkpoint.gguf import header as gguf_header
from kt_kernel.checkpoint.gguf.header import (
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    read_gguf_header,
)
from kt_kernel.checkpoint.gguf.types import NOT_STORED, TYPES
from kt_kernel.runtime import files

HUGE = 2**64 - 1


def test_types_are_those_of_the_package():
    package = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    ours = {n: (t.name, t.columns, t.size) for n, t in TYPES.items()}
    assert ours == {n: t for n, t in package.items() if n not in NOT_STORED}


@pytest.mark.parametrize(
    ("kind", "alignment"), [(k, None) for k in SUPPORTED] + [("MXFP4", a) for a in (1, 8, 4096)]
)
def test_as_the_package_reads_it(tmp_path, kind, alignment):
    path = Model((kind, "Q8_0", kind), inter=512).save(tmp_path / "m.gguf", alignment=alignment)
    header, reader = read_gguf_header(str(path)), GGUFReader(path)
    assert header.architecture == "qwen3moe"
    assert header.metadata["qwen3moe.expert_count"] == 3
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for tensor_ in reader.tensors:
        info = header.tensors[tensor_.name]
        assert info.shape == tuple(reversed(tensor_.shape.tolist()))
        assert info.dtype == tensor_.tensor_type.name
        assert (info.begin, info.end - info.begin) == (tensor_.data_offset, tensor_.n_bytes)


def test_only_keys_that_are_used_are_kept(tmp_path):
    metadata = {
        "general.name": "text",
        "c": [1, 2],
        "d": ["x", "y" * 70000, ""],
        "e": "z" * 5000,
        "f": [[1], [2, 3]],
        "general.type": "model",
        "split.count": 1,
        "a.expert_count": 7,
        "qwen3moe.embedding_length": 8,
        "qwen3moe.expert_feed_forward_length": [1, 2],
        "a.b.expert_count": 9,
        "qwen3moe.expert_used_count": 2,
    }
    path = write(tmp_path / "m.gguf", {"t": ("F32", np.ones(4, "f"))}, metadata)
    assert read_gguf_header(str(path)).metadata == {
        "general.architecture": "qwen3moe",
        "general.type": "model",
        "split.count": 1,
        "a.expert_count": 7,
        "qwen3moe.embedding_length": 8,
    }


LAST = number("split.count", 1)


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [
        (0, "B", 255),
        (1, "b", -1),
        (2, "H", 65535),
        (3, "h", -2),
        (4, "I", 2**32 - 1),
        (5, "i", -3),
        (6, "f", 0.5),
        (7, "?", True),
        (10, "Q", HUGE),
        (11, "q", -4),
        (12, "d", 1e300),
    ],
)
def test_every_kind_of_number(tmp_path, kind, code, value):
    path = tmp_path / "m.gguf"
    data = struct.pack("<" + code, value)
    path.write_bytes(gguf([key("a.expert_count", kind, data), key("other", kind, data), LAST]))
    assert read_gguf_header(str(path)).metadata == {"a.expert_count": value, "split.count": 1}


def test_version_2(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([number("k", 1)], [tensor("t")], 128, version=2))
    assert read_gguf_header(str(path)).tensors["t"].shape == (32,)


def test_arrays_in_arrays(tmp_path):
    value = array(U32, 2, bytes(8))
    for _ in range(MAX_DEPTH - 1):
        value = array(ARRAY, 1, value)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([key("k", ARRAY, value), LAST]))
    assert read_gguf_header(str(path)).metadata == {"split.count": 1}


TWO = [tensor("a", (32,)), tensor("b", (32,), offset=128)]
BAD = {
    "empty": (b"", "begins with b''"),
    "magic": (gguf(magic=b"GGUX"), "b'GGUX'; expected a GGUF file"),
    "older": (b"tjgg" + bytes(40), "before GGUF"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "version 1": (gguf(version=1), "GGUF version 1; accepted: 2 and 3"),
    "version 4": (gguf(version=4), "GGUF version 4"),
    "big-endian": (gguf(version=0x03000000), "big-endian"),
    "big-endian 1": (gguf(version=0x01000000), "big-endian"),
    "tensors": (gguf(tensor_count=HUGE), f"{HUGE} tensors do not fit"),
    "keys": (gguf(key_count=2**40), f"{2**40} keys do not fit"),
    "no keys": (gguf(key_count=1) + bytes(14), "name of a key after number of keys: 0 bytes"),
    "long key": (gguf([text("k", 70000)], data=100000), "70000 bytes; accepted: 1 to 65535"),
    "lying key": (gguf([text("k", 900)], data=100), "900 bytes from byte"),
    "key that is no text": (gguf([key(b"\xff\xfe", U32, bytes(4))]), "not UTF-8"),
    "same key": (gguf([LAST, LAST]), "key 'split.count' occurs twice"),
    "unknown value": (gguf([key("k", 13, bytes(8))]), "key 'k' has a value of type 13"),
    "lying string": (gguf([key("k", STRING, text("x", HUGE))]), f"key 'k': {HUGE} bytes"),
    "lying long string": (gguf([key("k", STRING, text("x", 9000))]), "key 'k': 9000 bytes"),
    "lying array": (gguf([key("k", ARRAY, array(U32, HUGE))]), "key 'k'", "truncated"),
    "lying strings": (gguf([key("k", ARRAY, array(STRING, 2**60))]), f"{2**60} strings"),
    "lying string in an array": (
        gguf([key("k", ARRAY, array(STRING, 2, text("a") + text("b", HUGE)))], data=64),
        "key 'k'",
        "truncated",
    ),
    "lying arrays": (gguf([key("k", ARRAY, array(ARRAY, 2**60))]), f"{2**60} arrays"),
    "unknown in an array": (gguf([key("k", ARRAY, array(99, 1, bytes(8)))]), "type 99"),
    "alignment 0": (gguf([number("general.alignment", 0)]), "general.alignment", "power of two"),
    "alignment 24": (gguf([number("general.alignment", 24)]), "general.alignment' is 24"),
    "alignment text": (gguf([key("general.alignment", STRING, text("32"))]), "is '32'"),
    "alignment u64": (gguf([key("general.alignment", 10, struct.pack("<Q", 32))]), "uint32"),
    "long name": (gguf(tensors=[tensor("t" * 300)], data=128), "300 bytes; accepted: 1 to 256"),
    "no name": (gguf(tensors=[tensor("")], data=128), "name of a tensor", "0 bytes"),
    "rank 0": (gguf(tensors=[tensor("t", ())], data=128), "'t' has 0 dimensions"),
    "rank 5": (gguf(tensors=[tensor("t", (1,) * 5)], data=128), "'t' has 5 dimensions; accepted"),
    "rank lies": (gguf(tensors=[tensor("t", rank=2**31)]), f"'t' has {2**31} dimensions"),
    "too many values": (gguf(tensors=[tensor("t", (2**32, 2**32))], data=128), "'t'", "2^63"),
    "huge rows": (gguf(tensors=[tensor("t", (2**62, 0))], data=128), "'t'", "2^63 bytes"),
    "huge beside 0": (gguf(tensors=[tensor("t", (2**63, 0))], data=128), "'t'", "2^63"),
    "ragged rows": (gguf(tensors=[tensor("t", (48,), kind=2)], data=128), "'t'", "48", "Q4_0"),
    "unaligned": (gguf(tensors=[tensor("t", offset=8)], data=256), "'t' begins at byte 8", "32"),
    "beyond": (gguf(tensors=TWO, data=255), "'b' ends at byte", "truncated"),
    "far beyond": (gguf(tensors=[tensor("t", offset=2**64 - 32)], data=128), "'t'", "truncated"),
    "overlap": (gguf(tensors=[TWO[0], tensor("b", offset=96)], data=512), "'b' overlaps", "'a'"),
    "same place": (gguf(tensors=[TWO[0], tensor("b")], data=512), "'b' overlaps tensor 'a'"),
    "same name": (gguf(tensors=[TWO[0], tensor("a", offset=128)], data=512), "'a' occurs twice"),
    "ends in a tensor": (gguf(tensors=[tensor("t")[:-12]]), "tensor 't'", "truncated"),
}


@pytest.mark.parametrize(("kind", "name"), [(77, "number 77"), *NOT_STORED.items()])
def test_types_that_are_not_known(tmp_path, kind, name):
    """Only whoever needs such a tensor refuses it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(tensors=[tensor("a", kind=kind), tensor("b", offset=64)], data=256))
    found = read_gguf_header(str(path)).tensors
    assert found["a"].dtype == name and found["b"].dtype == "F32"


@pytest.mark.parametrize("name", BAD)
def test_bad_headers(tmp_path, name):
    data, *words = BAD[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_gguf_header(str(path))
    for word in (str(path), *words):
        assert word in str(caught.value), str(caught.value)


def test_deeper_arrays(tmp_path):
    value = array(U32, 1, bytes(4))
    for _ in range(2000):
        value = array(ARRAY, 1, value)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([key("k", ARRAY, value)]))
    with pytest.raises(ValueError, match=f"key 'k': arrays in arrays; accepted: up to {MAX_DEPTH}"):
        read_gguf_header(str(path))


def test_truncated_at_every_length(tmp_path):
    whole = gguf([number("k", 1), key("s", STRING, text("abc"))], TWO, 256)
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="m.gguf"):
            read_gguf_header(str(path))
    path.write_bytes(whole)
    assert len(read_gguf_header(str(path)).tensors) == 2


@pytest.fixture
def cost(monkeypatch):
    """Reads a header; returns it, or the error, the bytes that were read, and the most memory."""

    def measured(path):
        count = 0

        class Counting:
            def __init__(self, *arguments):
                self._file = open(*arguments)  # noqa: SIM115 - until __exit__
                self.fileno, self.seek = self._file.fileno, self._file.seek

            def read(self, size):
                nonlocal count
                data = self._file.read(size)
                count += len(data)
                return data

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self._file.close()

        monkeypatch.setattr(files, "open", Counting, raising=False)
        tracemalloc.start()
        try:
            result = read_gguf_header(str(path))
        except ValueError as error:
            result = error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return result, count, peak

    return measured


MANY = {
    "number of keys": ("keys", "MAX_KEYS", 14, lambda n: gguf([key(b"k", 0, b"\1")] * n)),
    "number of tensors": (
        "tensors",
        "MAX_TENSORS",
        36,
        lambda n: gguf(tensors=[tensor(f"{i:04x}", (0,)) for i in range(n)]),
    ),
    "key 'k'": (
        "strings in arrays",
        "MAX_STRINGS",
        8,
        lambda n: gguf([key("k", ARRAY, array(STRING, m, bytes(8 * m))) for m in (1, n - 1)]),
    ),
    "key 'a'": (
        "arrays in arrays",
        "MAX_ARRAYS",
        12,
        lambda n: gguf(
            [key("a", ARRAY, array(ARRAY, 1, array(ARRAY, n - 1, array(U32, 0) * (n - 1))))]
        ),
    ),
}


@pytest.mark.parametrize("where", MANY)
def test_more_than_any_model_needs(tmp_path, cost, monkeypatch, where):
    """Is refused before it is read; what is just allowed is read once, and not kept."""
    things, name, size, build = MANY[where]
    most = getattr(gguf_header, name)
    path = tmp_path / "m.gguf"
    for allowed in (most, 2000):
        data = build(allowed + 1)
        path.write_bytes(data)
        monkeypatch.setattr(gguf_header, name, allowed)
        error, read, peak = cost(path)
        assert f"{where}: " in str(error) and f" {things}; accepted: up to " in str(error)
        assert read <= 1 << 16 and peak < 1 << 19
    path.write_bytes(build(2000))
    found, read, peak = cost(path)
    assert len(found.tensors) == (2000 if things == "tensors" else 0) and not found.metadata
    assert size * 2000 <= read <= len(data) + (1 << 16)
    assert peak < len(found.tensors) * 600 + (1 << 19)


def test_a_vocabulary_is_passed_over(tmp_path, cost):
    words = b"".join(text(f"token{n}") for n in range(200_000))
    path = tmp_path / "m.gguf"
    values = array(STRING, 200_000, words), array(6, 3_000_000, bytes(12_000_000))
    path.write_bytes(gguf([key("tokens", ARRAY, v) for v in values] + [LAST]))
    found, read, peak = cost(path)
    assert found.metadata == {"split.count": 1}
    assert read < len(words) + (1 << 18) and peak < 1 << 19


def test_a_lying_header_ends_soon(tmp_path):
    """A sparse file of a terabyte, full of strings of length 0."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([key("k", ARRAY, array(STRING, 2**36))]))
    with open(path, "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=f"'k': {2**36} strings"):
        read_gguf_header(str(path))
    path.write_bytes(gguf([key("k", STRING, text("", MAX_HEADER_BYTES))]))
    with open(path, "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=f"'k'.*the limit of a header is {MAX_HEADER_BYTES}"):
        read_gguf_header(str(path))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="not a file"):
        read_gguf_header(str(tmp_path))
