import pytest
import torch
from grid import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel.moe.routing import hot_routes, select_deferred_experts


def plain_selection(ids, scores, protected_k):
    """The definition, token by token."""
    protected = set()
    for row, score in zip(ids.tolist(), scores.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda j: (-score[j], j))
        protected |= {row[j] for j in order[: max(protected_k, 0)]}
    immediate = [[e if e in protected else -1 for e in row] for row in ids.tolist()]
    deferred = [[-1 if e in protected else e for e in row] for row in ids.tolist()]
    return immediate, deferred


@settings(max_examples=examples(200))
@given(st.integers(0, 5), st.integers(1, 6), st.integers(-1, 7), st.randoms(use_true_random=False))
def test_selection_follows_its_definition(tokens, k, protected_k, random):
    ids = torch.tensor(
        [[random.randrange(-1, 8) for _ in range(k)] for _ in range(tokens)], dtype=torch.int64
    ).reshape(tokens, k)
    scores = torch.tensor(
        [[random.randrange(4) / 4 for _ in range(k)] for _ in range(tokens)]
    ).reshape(tokens, k)
    before = ids.clone(), scores.clone()
    immediate, deferred = select_deferred_experts(ids, scores, protected_k)
    assert (immediate.tolist(), deferred.tolist()) == plain_selection(ids, scores, protected_k)
    assert torch.equal(ids, before[0]) and torch.equal(scores, before[1])


def test_an_expert_protected_anywhere_is_immediate_everywhere():
    ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    scores = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    immediate, deferred = select_deferred_experts(ids, scores, 1)
    assert immediate.tolist() == [[0, 1], [1, -1]]  # 1 is protected by the second token
    assert deferred.tolist() == [[-1, -1], [-1, 2]]
    assert immediate.dtype == torch.int32


def test_results_do_not_share_memory_with_the_inputs():
    ids = torch.tensor([[0, 1]])
    for protected_k in (0, 2):
        for part in select_deferred_experts(ids, torch.ones(1, 2), protected_k):
            part.fill_(7)
    assert ids.tolist() == [[0, 1]]


def test_unsigned_ids_and_refusals():
    immediate, deferred = select_deferred_experts(
        torch.tensor([[3, 4]], dtype=torch.uint8), torch.tensor([[0.1, 0.2]]), 1
    )
    assert immediate.tolist() == [[-1, 4]] and deferred.tolist() == [[3, -1]]
    with pytest.raises(ValueError, match=r"\[1, 2\] and \[1, 3\]"):
        select_deferred_experts(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3), 1)
    with pytest.raises(ValueError, match="float32"):
        select_deferred_experts(torch.zeros(1, 2), torch.zeros(1, 2), 1)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    for arguments, text in (
        (([[0, 1]], torch.zeros(1, 2), 1), "expert_ids must be a tensor, got list"),
        ((ids, None, 1), "expert_scores must be a tensor, got NoneType"),
        ((ids, torch.zeros(1, 2), 1.0), "protected_k must be an integer, got float"),
    ):
        with pytest.raises(TypeError, match=text):
            select_deferred_experts(*arguments)


@pytest.mark.parametrize("cold_slot", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hot_routes(cold_slot, dtype):
    slot_map = torch.tensor([-1, 1, -1, 0])
    ids = torch.tensor([[0, 1], [3, 2], [-1, 4]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.6], [0.7, float("nan")], [0.8, 0.9]])
    slots, hot = hot_routes(ids, weights, slot_map, cold_slot)
    c = cold_slot
    assert slots.dtype == dtype and slots.tolist() == [[c, 1], [0, c], [c, c]]
    assert hot.tolist() == torch.tensor([[0, 0.6], [0.7, 0], [0, 0]]).tolist()
