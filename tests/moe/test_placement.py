import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kt_kernel import generate_gpu_experts_masks


def test_takes_the_globally_most_frequent_pairs():
    frequency = torch.tensor([[5.0, 1.0, 3.0], [2.0, 9.0, 4.0]])
    mask = generate_gpu_experts_masks(frequency, 3)
    assert mask.dtype == torch.bool and mask.device.type == "cpu"
    assert mask.tolist() == [[True, False, False], [False, True, True]]


def test_equal_frequencies_go_by_layer_then_expert():
    assert generate_gpu_experts_masks(torch.zeros(2, 3), 4).tolist() == [
        [True, True, True],
        [True, False, False],
    ]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(-5, 40), st.randoms())
def test_counts_and_threshold(layers, experts, count, random):
    values = [[random.randrange(5) for _ in range(experts)] for _ in range(layers)]
    frequency = torch.tensor(values)
    mask = generate_gpu_experts_masks(frequency, count)
    assert int(mask.sum()) == min(max(count, 0), layers * experts)
    if mask.any() and not mask.all():
        assert frequency[mask].min() >= frequency[~mask].max()


def test_large_integers_are_compared_exactly():
    frequency = torch.tensor([[2**60, 2**60 + 1]])
    assert generate_gpu_experts_masks(frequency, 1).tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float64])
def test_dtypes_and_no_layers(dtype):
    assert int(generate_gpu_experts_masks(torch.ones(2, 2, dtype=dtype), 3).sum()) == 3
    assert generate_gpu_experts_masks(torch.zeros(0, 4, dtype=dtype), 2).shape == (0, 4)


@pytest.mark.parametrize(
    ("frequency", "count", "error", "text"),
    [
        (torch.zeros(3), 1, ValueError, r"\[3\]"),
        (torch.tensor([[0.0, float("nan")]]), 1, ValueError, r"\[0, 1\] is NaN"),
        (torch.zeros(1, 2, dtype=torch.complex64), 1, ValueError, "complex64"),
        ([[1, 2]], 1, TypeError, "list"),
        (torch.zeros(1, 2), 1.5, TypeError, "float"),
        (torch.zeros(1, 2), True, TypeError, "bool"),
        (torch.zeros(1, 2, device="meta"), 1, ValueError, "must be a dense tensor with data"),
        (torch.zeros(1, 2).to_sparse(), 1, ValueError, "must be a dense tensor with data"),
    ],
)
def test_refuses(frequency, count, error, text):
    with pytest.raises(error, match=text):
        generate_gpu_experts_masks(frequency, count)
