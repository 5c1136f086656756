"""Base weights from files: packed directories, quantised on load, GGUF; and what is saved."""

from __future__ import annotations

import gguf
import pytest
import torch

from kt_kernel import KTMoEWrapper

from .layers import INTER, Batch, E, H, K, base_tensors, lora_tensors, make_wrapper

IDENTITY = torch.arange(E)


def step(wrapper):
    batch = Batch(5)
    wrapper.init_lora_weights(**lora_tensors())
    y = wrapper.forward_sft(*batch.forward)
    x, grads, scores = wrapper.backward(batch.grad)
    return [y, x, scores, *grads.values()]


def same(found, wanted) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("method", "inference"),
    [
        ("AMXINT8_SFT", "AMXINT8"),
        ("INT8_SFT", "AMXINT8"),
        ("AMXINT4_SFT", "AMXINT4"),
        ("AMXINT4_KGroup_SFT", "INT4_G32"),
    ],
)
def test_packed_directories(tmp_path, method, inference):
    """Written by inference or by fine-tuning, they serve both, and the map is honoured."""
    mapping = torch.tensor([2, 0, 1, 5, 5, 3])
    wanted = make_wrapper(method, group_size=32)
    wanted.load_weights_from_tensors(*base_tensors(), mapping)
    saving = make_wrapper(method, group_size=32, weight_path=tmp_path / "sft", cpu_save=True)
    saving.load_weights_from_tensors(*base_tensors(), IDENTITY)
    plain = KTMoEWrapper(
        5, E, K, H, INTER, weight_path=tmp_path / "plain", cpu_save=True, method=inference
    )
    plain.load_weights_from_tensors(*base_tensors(), IDENTITY)
    expected = step(wanted)
    for folder in ("sft", "plain"):
        found = make_wrapper(method, group_size=32, weight_path=tmp_path / folder)
        found.load_weights(mapping)
        same(step(found), expected)
    other = make_wrapper("AMXBF16_SFT", weight_path=tmp_path / "sft")
    with pytest.raises(ValueError, match="packed for method .*, but method BF16 was requested"):
        other.load_weights(IDENTITY)
    assert not other.loaded


def test_gguf(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    for key, value in (("block_count", 6), ("embedding_length", H), ("expert_count", E)):
        writer.add_uint32(f"qwen3moe.{key}", value)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in zip(("gate", "up", "down"), base_tensors(), strict=True):
        data = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(f"blk.5.ffn_{name}_exps.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wrapper = make_wrapper("LLAMAFILE_SFT", weight_path=tmp_path / "model.gguf")
    wrapper.load_weights(IDENTITY)
    plain = make_wrapper()
    plain.load_weights_from_tensors(*base_tensors(), IDENTITY)
    for found, wanted in zip(step(wrapper), step(plain), strict=True):
        assert (found.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()


def test_wrong_maps_and_weights_leave_it_unloaded():
    wrapper = make_wrapper()
    for mapping, text in (
        (torch.arange(E - 1), r"physical_to_logical_map_cpu must be \[6\], got \[5\]"),
        (torch.full((E,), E), r"physical_to_logical_map_cpu\[0\] = 6; accepted: 0 to 5"),
        (IDENTITY.float(), "has dtype torch.float32; accepted: integer dtypes"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapper.load_weights_from_tensors(*base_tensors(), mapping)
    fp8 = make_wrapper("FP8_SFT")
    with pytest.raises(TypeError, match="gate_proj must be a sequence of 6 QuantisedMatrix"):
        fp8.load_weights_from_tensors(*base_tensors(), IDENTITY)
    gate, up, down = base_tensors()
    up[3, 1, 40] = float("nan")
    rows = make_wrapper("AMXINT4_1_SFT")
    with pytest.raises(ValueError, match="up of slot 3: the range of row 1 is not finite"):
        rows.load_weights_from_tensors(gate, up, down, IDENTITY)
    assert not (wrapper.loaded or fp8.loaded or rows.loaded)
    wrapper.load_weights_from_tensors(*base_tensors(), IDENTITY)
    wrapper.load_weights_from_tensors(*base_tensors(seed=4), IDENTITY)  # does nothing
    plain = make_wrapper()
    plain.load_weights_from_tensors(*base_tensors(), IDENTITY)
    same(step(wrapper), step(plain))


def test_experts_that_arrive_one_by_one():
    wrapper, plain = make_wrapper("AMXINT8_SFT"), make_wrapper("AMXINT8_SFT")
    for slot, matrices in enumerate(zip(*base_tensors(), strict=True)):
        wrapper.load_expert(slot, *matrices)
    with pytest.raises(RuntimeError, match="forward_sft before loading"):
        wrapper.forward_sft(*Batch(2).forward)
    wrapper.finish_loading()
    plain.load_weights_from_tensors(*base_tensors(), IDENTITY)
    same(step(wrapper), step(plain))
