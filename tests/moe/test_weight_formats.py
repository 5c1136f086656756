"""Formats by name: what Python knows of them comes from the compiled core, when it is asked for."""

import copy
import pickle
import subprocess
import sys

import pytest

from kt_kernel import _C
from kt_kernel.checkpoint.gguf.types import BY_NAME
from kt_kernel.weights import formats
from kt_kernel.weights.formats import WeightForm, WeightFormat

NAMED = {name: f for name, f in vars(formats).items() if isinstance(f, WeightFormat)}


def test_names_are_the_cores():
    for name, format in NAMED.items():
        assert format.name == name and formats.all_formats()[format.id] == format
    others = [f for f in formats.all_formats() if f not in NAMED.values() or f.ggml]
    assert others == list(formats.ggml_formats())


def test_scale_types_are_the_cores():
    grouped, last = formats.INT4_GROUP.id, len(formats.SCALE_TYPE_NAMES) - 1
    _C.packed_shape(grouped, 32, last, 64, 64)
    with pytest.raises(ValueError, match=f"unknown scale type {last + 1}; accepted: 0 to {last}"):
        _C.packed_shape(grouped, 32, last + 1, 64, 64)


def test_an_unknown_number_is_refused_by_the_cores_table():
    last = len(_C.weight_formats) - 1
    for number in (-1, last + 1):
        with pytest.raises(
            ValueError, match=f"unknown weight format {number}; accepted: 0 to {last}"
        ):
            _C.packed_shape(number, 0, 0, 64, 256)


def test_blocks_are_those_of_gguf_files():
    for format in formats.ggml_formats():
        kind = BY_NAME[format.name]
        assert (format.block_columns, format.file_bytes) == (kind.columns, kind.size)


def test_copies_are_equal():
    form = WeightForm(WeightFormat("INT4_GROUP"), 32)
    assert form == WeightForm(formats.INT4_GROUP, 32) != WeightForm(formats.INT4_ZERO, 32)
    for other in (pickle.loads(pickle.dumps(form)), copy.deepcopy(form)):
        assert other == form and hash(other) == hash(form) and other.core == form.core


def test_what_is_not_there():
    with pytest.raises(ValueError, match="unknown weight format 'INT5'; known: BF16, INT8_ROW, "):
        _ = WeightFormat("INT5").id
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = formats.BF16.colour


def test_the_core_is_not_loaded_to_name_a_format():
    """Engines import the package in every process, and read the options in some."""
    program = """
import sys
import kt_kernel.checkpoint, kt_kernel.weights.methods, kt_kernel.weights.store
from kt_kernel.serving.options import KTOptions
for method in kt_kernel.weights.methods.METHODS:
    KTOptions.from_mapping({"method": method, "weight_path": "."})
assert "kt_kernel._C" not in sys.modules
assert kt_kernel.weights.methods.get_method("MXFP4").column_unit == 32
assert "kt_kernel._C" in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
