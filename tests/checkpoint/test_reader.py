"""What is read and how much of it; dtypes, caching, and the loader classes."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel.checkpoint import open_checkpoint, read_experts
from kt_kernel.utils.loader import BF16SafeTensorLoader, SafeTensorLoader

E, H, I = 4, 12, 8  # noqa: E741
MOE = "model.layers.3.mlp.experts"


def mixtral(dtype):
    shapes = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
    return {
        f"model.layers.3.block_sparse_moe.experts.{e}.{name}.weight": torch.randn(shape).to(dtype)
        for e in range(E)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_those_of_the_file(tmp_path, dtype):
    tensors = mixtral(dtype)
    save_file(tensors, tmp_path / "a.safetensors")
    found = read_experts(tmp_path / "a.safetensors", 3, E, H, I)
    assert found.num_experts == E and found.gate_bias is None
    for e in range(E):
        for field, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            expected = tensors[f"model.layers.3.block_sparse_moe.experts.{e}.{name}.weight"]
            assert getattr(found, field)[e].dtype == dtype
            assert torch.equal(getattr(found, field)[e], expected)


def test_per_expert_biases(tmp_path):
    tensors = {}
    for e in range(E):
        for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
            tensors[f"{MOE}.{e}.{name}_proj.weight"] = torch.randn(shape)
            tensors[f"{MOE}.{e}.{name}_proj.bias"] = torch.randn(shape[0]).to(torch.bfloat16)
    save_file(tensors, tmp_path / "a.safetensors")
    found = read_experts(tmp_path, 3, E, H, I)
    assert found.down_bias[2].dtype == torch.float32
    assert torch.equal(found.down_bias[2], tensors[f"{MOE}.2.down_proj.bias"].float())
    assert torch.equal(found.up_bias[1], tensors[f"{MOE}.1.up_proj.bias"].float())
    del tensors[f"{MOE}.2.up_proj.bias"]
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"2\.up_proj\.bias"):
        read_experts(tmp_path, 3, E, H, I)


def test_data_that_is_not_aligned(tmp_path):
    """The format does not promise alignment: three bytes before the first weight."""
    header, data, position = (
        {"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
        b"abc",
        3,
    )
    tensors = mixtral(torch.float32)
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        data, position = data + tensor.numpy().tobytes(), end
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    found = read_experts(tmp_path, 3, E, H, I)
    expected = tensors["model.layers.3.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(found.up[2], expected)
    assert found.up[2].data_ptr() % 4 == 0


def resident_bytes():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":") for line in status)
    return 1024 * sum(int(lines[k].split()[0]) for k in ("RssAnon", "RssFile"))


def sparse_checkpoint(folder, model_type, shapes):
    """A file of zeros that takes no space on the disk."""
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return position


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_5_moe", "llama4_text", "gpt_oss"])
def test_reads_only_the_experts_asked_for(tmp_path, model_type):
    experts, hidden, inter = 64, 2048, 1024  # 12 MiB an expert, 768 MiB in all
    if model_type == "mixtral":
        shapes = {
            f"model.layers.0.block_sparse_moe.experts.{e}.{name}.weight": shape
            for e in range(experts)
            for name, shape in (
                ("w1", [inter, hidden]),
                ("w3", [inter, hidden]),
                ("w2", [hidden, inter]),
            )
        }
    else:
        block = "feed_forward" if model_type == "llama4_text" else "mlp"
        columns = model_type != "qwen3_5_moe"
        base = f"model.layers.0.{block}.experts."
        gate_up, down = [2 * inter, hidden], [hidden, inter]
        shapes = {
            base + "gate_up_proj": [experts, *(gate_up[::-1] if columns else gate_up)],
            base + "down_proj": [experts, *(down[::-1] if columns else down)],
        }
        if model_type == "gpt_oss":
            shapes[base + "gate_up_proj_bias"] = [experts, 2 * inter]
            shapes[base + "down_proj_bias"] = [experts, hidden]
    total = sparse_checkpoint(tmp_path, model_type, shapes)
    checkpoint = open_checkpoint(tmp_path)
    before = resident_bytes()
    found = checkpoint.read_experts(0, experts, hidden, inter, experts=[5, 40])
    for field in ("gate", "up", "down"):
        tensors = getattr(found, field)
        assert [e for e, tensor in enumerate(tensors) if tensor is not None] == [5, 40]
        assert all(tensors[e].sum() == 0 for e in (5, 40))
    grown = resident_bytes() - before
    assert grown < total / 8, f"{grown >> 20} MiB of {total >> 20} MiB became resident"


def test_opened_once_while_nothing_changes(tmp_path):
    save_file(mixtral(torch.bfloat16), tmp_path / "a.safetensors")
    first = open_checkpoint(tmp_path)
    assert open_checkpoint(str(tmp_path)) is first
    save_file({"x": torch.ones(1)}, tmp_path / "b.safetensors")
    assert open_checkpoint(tmp_path) is not first
    assert first.read_experts(3, E, H, I).num_experts == E  # its files are as they were


def test_loader(tmp_path):
    tensors = mixtral(torch.bfloat16) | {"model.norm.weight": torch.arange(3.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    for kind in (SafeTensorLoader, BF16SafeTensorLoader):
        loader = kind(str(tmp_path))
        assert loader.has_tensor("model.norm.weight") and not loader.has_tensor("x")
        assert torch.equal(loader.load_tensor("model.norm.weight", "cpu"), torch.arange(3.0))
        with pytest.raises(KeyError, match="no tensor 'x'"):
            loader.load_tensor("x")
        for key in ("model.layers.3", "model.layers.3.block_sparse_moe"):
            found = loader.load_experts(key, device="cpu")
            assert len(found["gate"]) == len(found["up"]) == len(found["down"]) == E
            assert found["gate_scale"] is found["up_scale"] is found["down_scale"] is None
        expected = tensors["model.layers.3.block_sparse_moe.experts.1.w2.weight"]
        assert torch.equal(found["down"][1], expected)
        for key in ("model.layers.2", "mtp.layers.3", "blk.3", "nonsense"):
            with pytest.raises(ValueError):
                loader.load_experts(key)
        loader.close_all_handles()
        assert torch.equal(found["down"][1], expected)
        with pytest.raises(RuntimeError, match="new loader"):
            loader.has_tensor("x")
    with pytest.raises(FileNotFoundError):
        SafeTensorLoader(tmp_path / "none")


def test_experts_one_by_one(tmp_path):
    tensors = mixtral(torch.bfloat16)
    save_file(tensors, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    whole = checkpoint.read_experts(3, E, H, I)
    with checkpoint.each_expert(3, E, H, I, experts=[3, 1, 1]) as experts:
        found = list(experts)
    assert [expert for expert, _ in found] == [1, 3]
    for expert, parts in found:
        assert sorted(parts) == ["down", "gate", "up"]
        for field, tensor in parts.items():
            assert torch.equal(tensor, getattr(whole, field)[expert])
    with (
        pytest.raises(ValueError, match="expected 5 experts"),
        checkpoint.each_expert(3, 5, H, I),
    ):
        pass
