"""The oracle itself, against formulas written another way and against the C++ one."""

import pytest
import torch
from moe_cases import KERNEL_METHODS, Case

from kt_kernel import _C
from kt_kernel.testing import quantise_weights, round_activations, row_error
from kt_kernel.weights import methods


def plain_layer(case, hidden, ids, weights):
    """Token by token, expert by expert, in float64 without roundings."""
    y = torch.zeros(hidden.shape, dtype=torch.float64)
    for t in range(hidden.shape[0]):
        for j in range(case.k):
            slot = int(ids[t, j])
            if not 0 <= slot < case.experts:
                continue
            e, x = int(case.mapping[slot]), hidden[t].double()
            gate = case.gate[e].double() @ x
            up = case.up[e].double() @ x
            y[t] += float(weights[t, j]) * (
                case.down[e].double() @ (torch.nn.functional.silu(gate) * up)
            )
    return y


def test_formula():
    case = Case(mapping=torch.tensor([3, 1, 1, 0, 5, 2]))
    batch = case.batch(7)
    wanted = plain_layer(case, *batch)
    assert torch.allclose(case.reference(*batch, rounded=False), wanted, rtol=1e-12, atol=1e-14)
    for method, most in (("BF16", 0.01), ("AMXINT8", 0.03), ("INT4_G32", 0.2), ("AMXINT4", 0.3)):
        case.method = method
        error = row_error(case.reference(*batch), wanted)
        assert 0 < error.mean() < most, method


@pytest.mark.parametrize("method", KERNEL_METHODS)
@pytest.mark.parametrize(("limit", "alpha"), [(0.0, 0.0), (0.5, 0.0), (0.7, 1.702)])
def test_equals_the_compiled_oracle(method, limit, alpha):
    case = Case(method=method, biases=True, hidden=96, inter=64)
    chosen = methods.get_method(method)
    hidden, ids, weights = case.batch(9)
    mask = torch.arange(case.experts) == 1
    options = {"swiglu_limit": limit, "swiglu_alpha": alpha}
    ours = case.reference(hidden, ids, weights, gpu_experts_mask=mask, **options)
    theirs = _C.reference_forward(
        hidden.double().numpy(),
        ids.numpy(),
        weights.double().numpy(),
        *(quantise_weights(method, m).numpy() for m in (case.gate, case.up, case.down)),
        activation_format=int(chosen.int8_activations),
        skip=mask.tolist(),
        **{name: bias.double().numpy() for name, bias in case.bias.items()},
        **options,
    )
    assert row_error(torch.from_numpy(theirs), ours).max() < 1e-12


def test_quantisation_rules_by_hand():
    w = torch.tensor([[127.0, 2.5, -1.5, 0.5], [0.0, 0.0, 0.0, 0.0]])
    assert quantise_weights("AMXINT8", w).tolist() == [[127, 2, -2, 0], [0] * 4]
    w = torch.tensor([[7.0, 2.5, -1.5, 0.5]])
    assert quantise_weights("AMXINT4", w).tolist() == [[7, 2, -2, 0]]
    w = torch.tensor([[14.0] + [5.0] * 31 + [0.7] * 32])
    q = quantise_weights("INT4_G32", w)
    assert q[0, :2].tolist() == [14, 4]
    assert q[0, 32:].unique().tolist() == [7 * float(torch.tensor(0.1, dtype=torch.half))]
    assert quantise_weights("BF16", torch.tensor([[1.0 + 2**-9]])).item() == 1.0


def test_activation_rounding():
    x = torch.tensor([[127.0, 0.5, 1.5, -126.6], [0, 0, 0, 0], [1, float("inf"), 0, 0]])
    rounded = round_activations(x, int8=True)
    assert rounded[:2].tolist() == [[127, 0, 2, -127], [0, 0, 0, 0]]
    assert rounded[2].isnan().all()


def test_row_error():
    nan, inf = float("nan"), float("inf")
    y = torch.tensor([[3.0, 4.1], [0, 0], [0, 1e-9], [nan, nan], [nan, 1], [nan, 1], [inf, 0]])
    r = torch.tensor([[3.0, 4.0], [0, 0], [0, 0], [nan, nan], [nan, nan], [1, 1], [1, 1]])
    error = row_error(y, r).tolist()
    assert error[0] == pytest.approx(0.02, rel=1e-5)
    assert error[1:] == [0, inf, 0, inf, inf, inf]
