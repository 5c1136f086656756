"""Damaged checkpoints of every kind: an error that names the file, or what is in the tensors."""

import pytest
import torch
from grid import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import CHANGES, write
from quantised_files import E
from safetensors.torch import load_file
from samples import H, I, samples

from kt_kernel.checkpoint import read_experts
from kt_kernel.testing import values_of

SAMPLES = samples()
numbers = st.integers(0, 2**16)
changes = st.lists(
    st.tuples(st.integers(0, len(CHANGES) - 1), numbers, numbers), min_size=1, max_size=3
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These matrices are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attempt(folder, sample, chosen):
    """Whether it was read. What is in the files, safetensors itself tells."""
    quantization = write(folder, sample, chosen)
    try:
        found = read_experts(folder, 0, E, H, I, method=sample.method)
    except (ValueError, KeyError, OSError) as error:
        assert str(folder) in str(error), str(error)
        return False
    tensors = load_file(folder / "model.safetensors")
    for field, wanted in sample.values(tensors, quantization).items():
        for read, value in zip(getattr(found, field), wanted, strict=True):
            plain = read.double() if isinstance(read, torch.Tensor) else values_of(read)
            assert plain.shape == value.shape, field
            assert torch.equal(plain.nan_to_num(nan=0.125), value.nan_to_num(nan=0.125)), field
    return True


@pytest.mark.parametrize("name", SAMPLES)
@settings(
    max_examples=examples(40, full=400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a new folder costs more
)
@given(chosen=changes)
def test_damaged(tmp_path, name, chosen):
    attempt(tmp_path, SAMPLES[name], chosen)
