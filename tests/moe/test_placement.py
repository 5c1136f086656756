import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kt_kernel import generate_gpu_experts_masks
from kt_kernel.moe.placement import COLD, Placement


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


def test_a_placement():
    mask = torch.tensor([False, True, True, False, True])
    placement = Placement.from_mask(mask)
    assert placement.slots == (COLD, 0, 1, COLD, 2) and placement.num_slots == 3
    assert placement.hot_experts == (1, 2, 4) and placement.cold_experts == (0, 3)
    assert (placement.num_experts, placement.num_hot, placement.num_cold) == (5, 3, 2)
    assert torch.equal(placement.mask, mask) and not placement.all_hot
    found = placement.slot_map("cpu")
    assert found.dtype == torch.int32 and found.tolist() == [-1, 0, 1, -1, 2]
    found.fill_(0)
    placement.mask.fill_(True)
    assert placement == Placement.from_mask(mask.tolist()) == Placement([-1, 0, 1, -1, 2], 3)
    assert len({placement, Placement.from_mask(mask), Placement.first(5, 3)}) == 2
    with pytest.raises(AttributeError):
        placement.num_slots = 4


def test_placements_with_none_all_and_unused_slots():
    none, whole = Placement.first(3, 0), Placement.first(3, 3)
    assert none.cold_experts == whole.hot_experts == (0, 1, 2)
    assert whole.all_hot and not none.all_hot and not none.num_hot and not whole.num_cold
    assert Placement.from_mask([True] * 3) == whole and Placement.from_mask([False] * 3) == none
    some = Placement((COLD, 1, COLD), 2)
    assert some.num_hot == 1 and some.num_slots == 2


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Placement((), 0), ValueError, "no experts"),
        (
            lambda: Placement((0, 2), 1),
            ValueError,
            "expert 1 is in slot 2; accepted: -1 .* 1 slots",
        ),
        (lambda: Placement((0, -2), 1), ValueError, "expert 1 is in slot -2"),
        (lambda: Placement((0, 0, -1), 2), ValueError, "experts 0 and 1 are both in slot 0"),
        (lambda: Placement((0, -1), 3), ValueError, "num_slots=3; accepted: 0 to 2"),
        (lambda: Placement((0, -1), -1), ValueError, "num_slots=-1; accepted: 0 to 2"),
        (lambda: Placement((1, 0), 2), ValueError, "expert e must be in slot e"),
        (lambda: Placement((0, -1), 2), ValueError, "needs fewer slots"),
        (
            lambda: Placement((0.5, -1), 1),
            TypeError,
            "slot of expert 0 must be an integer, .* float",
        ),
        (lambda: Placement((True, -1), 1), TypeError, "slot of expert 0 .* got bool"),
        (lambda: Placement((0, -1), None), TypeError, "num_slots must be an integer, got NoneType"),
        (lambda: Placement.first(3, 4), ValueError, "4 hot experts of 3; accepted: 0 to 3"),
        (lambda: Placement.first(3, -1), ValueError, "-1 hot experts of 3; accepted"),
        (lambda: Placement.from_mask(torch.ones(3)), ValueError, r"mask must be bool \[E\], got"),
        (lambda: Placement.from_mask(torch.ones(2, 2) > 0), ValueError, r"got torch.bool \[2, 2\]"),
        (lambda: Placement.from_mask(torch.ones(0) > 0), ValueError, r"got torch.bool \[0\]"),
        (lambda: Placement.from_mask(object(), "m"), TypeError, "m must be a bool tensor"),
    ],
)
def test_what_is_no_placement(make, error, text):
    with pytest.raises(error, match=text):
        make()
