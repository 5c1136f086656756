"""What an engine's loader did not deliver of hot experts is named, in each format's tensors."""

from __future__ import annotations

import pytest

from kt_kernel.serving.hot_delivery import HotDelivery

GATED, UNGATED = ("gate", "up", "down"), ("up", "down")
DENSE = ("w13_weight", "w2_weight")
FORMATS = {
    "16 bits": DENSE,
    "16 bits with biases": (*DENSE, "w13_bias", "w2_bias"),
    "biases of SGLang": (*DENSE, "w13_weight_bias", "w2_weight_bias"),
    "FP8": (*DENSE, "w13_weight_scale", "w2_weight_scale"),
    "FP8 in blocks": (*DENSE, "w13_weight_scale_inv", "w2_weight_scale_inv"),
    "GPTQ": ("w13_qweight", "w2_qweight", "w13_scales", "w2_scales"),
    "pack-quantized": ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale"),
    "NVFP4": (*DENSE, "w13_weight_scale", "w2_weight_scale", "w13_weight_scale_2"),
}
# What checkpoints of a format need not have, and what is not of experts.
OPTIONAL = ("w13_input_scale", "w2_input_global_scale", "w13_g_idx", "w2_qzeros", "w2_weight_shape")
OTHERS = ("e_score_correction_bias", "expert_map")


@pytest.mark.parametrize("matrices", [GATED, UNGATED])
@pytest.mark.parametrize("format", FORMATS)
def test_every_part_is_needed(format: str, matrices: tuple[str, ...]) -> None:
    tensors, experts = FORMATS[format], (1, 4)
    parts = [
        (tensor, expert, which)
        for expert in experts
        for tensor in tensors
        for which in (("down",) if tensor.startswith("w2_") else matrices[:-1])
    ]
    asked = (*tensors, *OPTIONAL, *OTHERS)
    for left_out in (None, *parts):
        delivery = HotDelivery("layer 3", "vLLM", matrices)
        for tensor, expert, which in parts:
            if (tensor, expert, which) != left_out:
                delivery.add(tensor, [expert], which)
        if left_out is None:
            delivery.check_complete(asked, experts)
            continue
        tensor, expert, which = left_out
        with pytest.raises(ValueError) as caught:
            delivery.check_complete(asked, experts)
        begin = "layer 3: vLLM did not load weights of hot experts: "
        assert str(caught.value).startswith(f"{begin}{expert} ({which} of {tensor}). The")


@pytest.mark.parametrize("tensor", OPTIONAL)
def test_what_is_optional_is_whole_or_absent(tensor: str) -> None:
    delivery = HotDelivery("layer 0", "SGLang", GATED)
    delivery.check_complete([tensor], range(2))
    parts = ["down"] if tensor.startswith("w2_") else ["gate", "up"]
    delivery.add(tensor, range(1), parts[0])
    with pytest.raises(ValueError, match=f"{parts[-1]} of {tensor}"):
        delivery.check_complete([tensor], range(2))
    for which in parts:
        delivery.add(tensor, range(2), which)
    delivery.check_complete([tensor], range(2))


def test_shared_experts_in_the_same_tensors() -> None:
    delivery = HotDelivery("layer 0", "SGLang", GATED)
    parts = ("w13_weight", "gate"), ("w13_weight", "up"), ("w2_weight", "down")
    for tensor, which in parts:
        delivery.add(tensor, range(4), which)
    for tensor, which in parts:
        delivery.check_complete(DENSE, range(4))
        with pytest.raises(ValueError) as caught:
            delivery.check_complete(DENSE, range(4), [4])
        begin = "layer 0: SGLang did not load weights of hot experts (from 4 on, shared ones): 4 ("
        assert str(caught.value).startswith(begin) and f"{which} of {tensor}" in str(caught.value)
        delivery.add(tensor, [4], which)
    delivery.check_complete(DENSE, range(4), [4])


def test_experts_that_lack_the_same_stand_together() -> None:
    """None was delivered, as by a loader that knows no experts."""
    delivery = HotDelivery("layer 0", "SGLang", GATED)
    all_of_it = r": 0-127 \(gate of w13_weight, up of w13_weight, down of w2_weight\)\. The check"
    with pytest.raises(ValueError, match=all_of_it):
        delivery.check_complete(DENSE, range(128))
    delivery.check_complete(DENSE, ())
