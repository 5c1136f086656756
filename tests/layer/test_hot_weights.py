"""Hot experts whose tensors kt-moe fills in: they hold the checkpoint's values, on each rank.

Packed ones are read as the engines' kernels for 16-bit activations read them: of 4 bits, the even
column of two is in the low half of a byte, and so is the even row of two zero points.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_kernel.moe.placement import Placement
from kt_kernel.serving.hot_packed import GroupedHot, PackedHot, RowHot, packed_hot
from kt_kernel.serving.hot_weights import DenseHot, HotShape, read_hot
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import quantise, values_of
from kt_kernel.weights.expert_tensors import MATRICES, matrix_shapes
from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO, INT8_ROW, WeightForm
from kt_kernel.weights.quantise import quantise_groups, quantise_rows
from kt_kernel.weights.quantised import QuantisedMatrix

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))  # has the makers of weights

import test_awq
import test_gptq
import test_int8
import test_nvfp4
from quantised_files import PROJECTIONS, E, make_experts, save

S, H, I = 2, 128, 256  # noqa: E741
CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
Experts = list[dict[str, Any]]


def random_experts(form: WeightForm | None = None, slots: int = S) -> Experts:
    torch.manual_seed(1)
    made = [
        {name: torch.randn(shape) for name, shape in matrix_shapes(H, I).items()}
        for _ in range(slots)
    ]
    if form is None:
        return [{name: w.bfloat16() for name, w in expert.items()} for expert in made]
    return [{name: quantise(w, form) for name, w in expert.items()} for expert in made]


def part_of(name: str, values: torch.Tensor, shape: HotShape) -> torch.Tensor:
    """The rank's part of a matrix, with its down columns."""
    size = shape.inter // shape.ranks
    own = slice(shape.rank * size, (shape.rank + 1) * size)
    return values[:, own] if name == "down" else values[own]


def kernel_values(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> torch.Tensor:
    """W [N, K] in float64, element by element as the kernels address it."""
    n, k = torch.arange(codes.shape[0])[:, None], torch.arange(2 * codes.shape[1])
    code = codes[n, k // 2] >> (k % 2 * 4).to(torch.uint8) & 15
    offset = torch.tensor(8.0)
    if zero is not None:
        offset = (zero[n // 2, k // group] >> (n % 2 * 4).to(torch.uint8) & 15).double()
    return (code.double() - offset) * scale[n, k // group].double()


def packed_values(hot: PackedHot, slot: int, name: str) -> torch.Tensor:
    if hot.bits == 8:
        w, scale = (hot.w2, hot.s2) if name == "down" else (hot.w13, hot.s13)
        values = w[slot].double() * scale[slot].double()[:, None]
        return values if name == "down" else values.chunk(2)[name == "up"]
    zero = lambda z: None if z is None else z[slot]  # noqa: E731
    if name == "down":
        return kernel_values(hot.w2[slot], hot.s2[slot], zero(hot.z2), hot.group)
    both = kernel_values(hot.w13[slot], hot.s13[slot], zero(hot.z13), hot.group)
    return both.chunk(2)[name == "up"]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("format", [INT4_GROUP, INT4_ZERO])
@pytest.mark.parametrize("group", [32, 128])
def test_stored_codes_are_kept(format: Any, group: int, rank: int, ranks: int) -> None:
    shape = HotShape(S, H, I, rank, ranks)
    experts = random_experts(WeightForm(format, group, scale_type=1))
    hot = GroupedHot("layer 0", shape, group, format == INT4_ZERO, BF16, CPU)
    for slot, expert in enumerate(experts):
        for name, matrix in expert.items():
            hot.put(slot, name, matrix)
    hot.check_complete(Placement.first(S, S))
    for slot, expert in enumerate(experts):
        for name, matrix in expert.items():
            wanted = part_of(name, values_of(matrix), shape)
            assert torch.equal(packed_values(hot, slot, name), wanted), (slot, name)
    assert not torch.equal(packed_values(hot, 0, "gate"), packed_values(hot, 0, "up"))
    share = 4.5 if format == INT4_GROUP and group == 32 else 5
    assert hot.nbytes * 8 <= S * 3 * H * I / ranks * share


@pytest.mark.parametrize("rank", [0, 1])
def test_stored_rows_of_8_bits_are_kept(rank: int) -> None:
    shape = HotShape(S, H, I, rank, 2)
    hot = RowHot("layer 0", shape, CPU)
    for slot, expert in enumerate(random_experts(WeightForm(INT8_ROW))):
        for name, matrix in expert.items():
            hot.put(slot, name, matrix)
            found, wanted = packed_values(hot, slot, name), values_of(matrix)
            assert torch.equal(found, part_of(name, wanted, shape))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_delivered_weights_are_quantised(bits: int, rank: int) -> None:
    """As an independent formula does, and so within half a step."""
    shape = HotShape(S, H, I, rank, 2)
    form = WeightForm(INT4_GROUP, 32, scale_type=1) if bits == 4 else WeightForm(INT8_ROW)
    hot: PackedHot = GroupedHot("layer 0", shape, 32, False, BF16, CPU)
    if bits == 8:
        hot = RowHot("layer 0", shape, CPU)
    for slot, expert in enumerate(random_experts()):
        for name, weights in expert.items():
            hot.put(slot, name, weights)
            found = packed_values(hot, slot, name)
            wanted = part_of(name, values_of(quantise(weights, form)), shape)
            assert torch.equal(found, wanted)
            own = part_of(name, weights.double(), shape)
            assert (found - own).norm() < (0.12 if bits == 4 else 0.01) * own.norm()


def test_weights_that_cannot_be_quantised() -> None:
    zeros = quantise_groups(torch.zeros(2, 64), 32, FP16)
    assert not values_of(zeros).any()
    for wrong in (torch.nan, torch.inf):
        weights = torch.ones(3, 64, dtype=BF16)
        weights[1, 40] = wrong
        with pytest.raises(ValueError, match="gate: row 1 has a weight that is not finite"):
            quantise_groups(weights, 32, FP16, "gate")
        with pytest.raises(ValueError, match="up: row 1 has a weight that is not finite"):
            quantise_rows(weights, "up")
    assert not values_of(quantise_rows(torch.zeros(2, 64))).any()
    with pytest.raises(ValueError, match="too large"):
        quantise_groups(torch.full((1, 32), 1e6), 32, FP16)


def _zero_16(matrix: QuantisedMatrix) -> QuantisedMatrix:
    assert matrix.zero is not None
    return QuantisedMatrix(INT4_ZERO, matrix.codes, matrix.scale, torch.full_like(matrix.zero, 16))


def _reordered(matrix: QuantisedMatrix) -> QuantisedMatrix:
    order = torch.arange(2 * matrix.codes.shape[1]).flip(0).int()
    return QuantisedMatrix(INT4_GROUP, matrix.codes, matrix.scale, order=order)


@pytest.mark.parametrize(
    ("form", "change", "line"),
    [
        (WeightForm(INT4_ZERO, 32, 1), _zero_16, "has a zero point of 16"),
        (WeightForm(INT4_GROUP, 32, 1), _reordered, r".* order of its own \(act-order\)"),
        (WeightForm(INT4_GROUP, 64, 1), lambda m: m, "has groups of another size than 32"),
    ],
)
def test_codes_that_kernels_cannot_hold(form: WeightForm, change: Any, line: str) -> None:
    hot = GroupedHot("layer 3", HotShape(S, H, I), 32, True, BF16, CPU)
    matrix = change(random_experts(form)[0]["gate"])
    with pytest.raises(ValueError, match=f"layer 3, slot 0, gate {line}.*accepted: bf16"):
        hot.put(0, "gate", matrix)


def test_deliveries_are_checked() -> None:
    hot = GroupedHot("layer 3", HotShape(1, H, I), 32, False, BF16, CPU)
    expert = random_experts()[0]
    hot.put(0, "gate", expert["gate"])
    with pytest.raises(ValueError, match="layer 3, slot 0, gate: arrived twice"):
        hot.put(0, "gate", expert["gate"])
    with pytest.raises(ValueError, match=r"layer 3: .* did not arrive: 4 \(up, down\)$"):
        hot.check_complete(Placement((*[-1] * 4, 0), 1))
    with pytest.raises(ValueError, match="down_bias is not supported"):
        hot.put_bias(0, "down_bias", torch.zeros(H))
    with pytest.raises(ValueError, match="256 on 16 ranks are not multiples of the group size 32"):
        GroupedHot("layer 3", HotShape(1, H, I, 0, 16), 32, False, BF16, CPU)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pad", [0, 64])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_dense_tensors(rank: int, ranks: int, pad: int, interleaved: bool) -> None:
    shape = HotShape(S, H, I, rank, ranks)
    size = I // ranks
    padded = size + pad
    w13 = torch.full((S, 2 * padded, H), torch.nan, dtype=BF16)
    w2 = torch.full((S, H, padded), torch.nan, dtype=BF16)
    b13, b2 = torch.zeros(S, 2 * padded, dtype=BF16), torch.zeros(S, H, dtype=BF16)
    hot = DenseHot("layer 0", shape, w13, w2, b13=b13, b2=b2, interleaved=interleaved)
    experts = random_experts()
    for slot, expert in enumerate(experts):
        for name, weights in expert.items():
            hot.put(slot, name, weights.float())
            hot.put_bias(slot, f"{name}_bias", weights[:, 0].float())
    hot.check_complete(Placement.first(S, S))
    for slot, expert in enumerate(experts):
        rows = torch.arange(2 * padded)
        gate, up = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
        for name, of in (("gate", gate), ("up", up)):
            wanted = part_of(name, expert[name], shape)
            assert torch.equal(w13[slot, of[:size]], wanted)
            assert torch.equal(b13[slot, of[:size]], wanted[:, 0])
            assert not w13[slot, of[size:]].any()
        assert torch.equal(w2[slot, :, :size], part_of("down", expert["down"], shape))
        assert not w2[slot, :, size:].any()
        assert torch.equal(b2[slot], expert["down"][:, 0] * (rank == 0))


def test_missing_biases_are_named() -> None:
    """An engine's tensors of biases would keep their zeros."""
    shape = HotShape(1, H, I)
    biases = {"b13": torch.zeros(1, 2 * I), "b2": torch.zeros(1, H)}
    hot = DenseHot("layer 5", shape, torch.zeros(1, 2 * I, H), torch.zeros(1, H, I), **biases)
    for name, weights in random_experts()[0].items():
        hot.put(0, name, weights)
    hot.put_bias(0, "up_bias", torch.ones(I))
    with pytest.raises(ValueError, match=r"did not arrive: 3 \(gate_bias, down_bias\)$"):
        hot.check_complete(Placement((*[-1] * 3, 0), 1))


def test_other_layouts_are_refused() -> None:
    shape = HotShape(S, H, I)
    w13, w2 = torch.zeros(S, H, 2 * I), torch.zeros(S, I, H)
    with pytest.raises(ValueError, match=r"layer 7: the engine holds hot experts as \[2, 128, 512"):
        DenseHot("layer 7", shape, w13, w2)


@pytest.mark.parametrize(
    ("method", "make", "values", "settings"),
    [
        ("AWQ_INT4", test_awq.make_with(), test_awq.reference, test_awq.config()),
        ("GPTQ_INT4", test_gptq.make_with(zero=7), test_gptq.reference(1), test_gptq.config()),
        ("AMXINT8", test_int8.w8a8(), test_int8.scaled, {"quant_method": "compressed-tensors"}),
        ("NVFP4", test_nvfp4.MODELOPT, test_nvfp4.modelopt_values, {"quant_method": "modelopt"}),
    ],
)
def test_read_from_the_served_model(
    tmp_path: Path, method: str, make: Any, values: Any, settings: dict[str, Any]
) -> None:
    """Each hot expert in its slot; in 16 bits with any format, packed with integers."""
    tensors = make_experts(make, H, I)
    path = save(tmp_path, tensors, settings)
    placement = Placement((1, -1, 0), 2)
    assert len(placement.slots) == E

    def wanted(slot: int, name: str) -> torch.Tensor:
        expert = placement.slots.index(slot)
        start = f"model.layers.0.mlp.experts.{expert}.{PROJECTIONS[name]}."
        parts = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        return values(parts)

    options = KTOptions(
        method=method, weight_path=str(path), num_gpu_experts=2, hot_format="packed"
    )
    shape = HotShape(2, H, I)
    for change in (None, lambda expert, which, w: w + expert):
        w13, w2 = torch.zeros(2, 2 * I, H, dtype=BF16), torch.zeros(2, H, I, dtype=BF16)
        dense = DenseHot("layer 0", shape, w13, w2)
        read_hot(options, 0, placement, dense, change)
        dense.check_complete(placement)
        for slot in range(2):
            found = dict(zip(MATRICES, (*w13[slot].chunk(2), w2[slot]), strict=True))
            more = 0 if change is None else placement.slots.index(slot)
            for name in MATRICES:
                exact = wanted(slot, name).float() + more
                assert torch.equal(found[name], exact.bfloat16()), (slot, name)
    if method == "NVFP4":
        with pytest.raises(ValueError, match="layer 0: the experts are stored as .*accepted: bf16"):
            packed_hot(options, 0, placement, shape, BF16, CPU)
        return
    hot = packed_hot(options, 0, placement, shape, FP16, CPU)  # the type of the stored scales
    assert (hot.z13 is None) == (method != "AWQ_INT4") and hot.bits == (
        8 if method == "AMXINT8" else 4
    )
    read_hot(options, 0, placement, hot)
    hot.check_complete(placement)
    for slot in range(2):
        for name in MATRICES:
            assert torch.equal(packed_values(hot, slot, name), wanted(slot, name)), (slot, name)
