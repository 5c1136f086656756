"""Checkpoints as they are published: formats that are not read, and tensors beside the experts."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel.checkpoint import method_of, open_checkpoint

E, H, I = 2, 64, 32  # noqa: E741
SHAPES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
MOE = "model.layers.1.mlp.experts"
BYTES = torch.zeros(4, dtype=torch.uint8)


def save(folder, tensors, model_type="qwen3_moe", quantization=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": model_type, "quantization_config": quantization or {}}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def experts(*parts, where=MOE):
    """Single experts with these parts; those of weights have their shape."""
    return {
        f"{where}.{e}.{name}.{part}": torch.randn(shape) if part == "weight" else BYTES.clone()
        for e in range(E)
        for name, shape in SHAPES.items()
        for part in parts
    }


FOREIGN = {
    "bitsandbytes": experts("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"),
    "bitsandbytes, 8 bits": experts("weight", "SCB"),
    "EXL2": experts("q_weight", "q_scale", "q_groups"),
    "EXL3": experts("trellis", "suh", "svh"),
    "HQQ": experts("W_q", "scale"),
    "AQLM": experts("codes", "codebooks", "scales"),
    "QuIP#": experts("Qidxs", "SU", "SV"),
    "ModelOpt's AWQ": experts("weight", "weight_scale", "pre_quant_scale"),
    "sparse": experts("compressed", "bitmask", "row_offsets"),
    "PEFT": experts("base_layer.weight", "lora_A.default.weight"),
    "MLX": {
        f"model.layers.1.mlp.switch_mlp.{name}.{part}": torch.zeros(E, 4, 4)
        for name in SHAPES
        for part in ("weight", "scales", "biases")
    },
    "MLX, gpt-oss": {
        f"{MOE}.{name}.{part}": torch.zeros(E, 4, 4)
        for name in SHAPES
        for part in ("weight", "scales", "bias")
    },
}


@pytest.mark.parametrize("known", FOREIGN)
def test_other_formats_are_named(tmp_path, known):
    model_type = "gpt_oss" if "gpt-oss" in known else "qwen3_moe"
    checkpoint = save(tmp_path, FOREIGN[known], model_type)
    with pytest.raises(ValueError, match="a format that is not read") as caught:
        method_of(checkpoint)
    assert f"({known.partition(',')[0]}" in str(caught.value).replace("compressed-tensors' ", "")
    assert f"{tmp_path}/model.safetensors: tensor 'model.layers.1." in str(caught.value)


def test_unknown_names_in_the_experts_module(tmp_path):
    tensors = {f"{MOE}.w13_weight": torch.zeros(E, 2 * I, H), f"{MOE}.w2_weight": torch.zeros(E, H)}
    with pytest.raises(ValueError, match=r"experts\.w13_weight': not a name of .*gate_up_proj"):
        method_of(save(tmp_path, tensors))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "of_no_known_type"])
@pytest.mark.parametrize(
    "beside",
    [
        experts("weight", where="mtp.layers.0.mlp.experts"),
        experts("weight", where="model.mtp.layers.1.mlp.experts"),
        {"model.layers.0.mlp.shared_experts.up_proj.weight": torch.zeros(I, H)},
    ],
    ids=["MTP of a layer without experts", "MTP of a layer with experts", "only shared experts"],
)
def test_what_lies_beside_the_experts(tmp_path, model_type, beside):
    tensors = experts("weight")
    checkpoint = save(tmp_path, tensors | beside, model_type)
    assert checkpoint.layers() == [1]
    method_of(checkpoint)
    assert torch.equal(
        checkpoint.read_experts(1, E, H, I).up[1], tensors[f"{MOE}.1.up_proj.weight"]
    )


@pytest.mark.parametrize("bias", [0.0, -0.0, 1e-7])
def test_zero_biases_of_gptq(tmp_path, bias):
    """AutoGPTQ added them to every matrix."""
    tensors = {}
    for e in range(E):
        for name, (rows, columns) in SHAPES.items():
            tensors |= {
                f"{MOE}.{e}.{name}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
                f"{MOE}.{e}.{name}.qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
                f"{MOE}.{e}.{name}.scales": torch.ones(1, rows).half(),
                f"{MOE}.{e}.{name}.bias": torch.zeros(rows),
            }
    tensors[f"{MOE}.1.down_proj.bias"][-1] = bias
    settings = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}
    checkpoint = save(tmp_path, tensors, quantization=settings)
    found = checkpoint.read_experts(1, E, H, I, method="GPTQ_INT4")
    with checkpoint.each_expert(1, E, H, I, (), "GPTQ_INT4") as stream:
        assert ("down_bias" in stream.fields) == bool(bias)
    if bias:
        assert found.down_bias[1][-1] == torch.tensor(bias)
    else:
        assert found.down_bias is None


@pytest.mark.parametrize("first", [0, 1])
def test_a_download_that_lacks_a_shard(tmp_path, first):
    """Without an index. A conversion would otherwise leave out layers without a word."""
    for layer in range(3):
        tensors = experts("weight", where=f"model.layers.{layer}.mlp.experts")
        save_file(tensors, tmp_path / f"model-{layer + first:05}-of-00003.safetensors")
    assert open_checkpoint(tmp_path).layers() == [0, 1, 2]
    os.unlink(tmp_path / f"model-{1 + first:05}-of-00003.safetensors")
    with pytest.raises(ValueError, match=rf"2 are there and number {1 + first} is missing"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / f"model-{first:05}-of-00003.safetensors").layers() == [0]


@pytest.mark.parametrize("symmetric", [[True], [False], [False, True]])
def test_asymmetric_weights_without_zero_points(tmp_path, symmetric):
    """With several groups of settings, nothing says which one is of the experts."""
    tensors = {}
    for e in range(E):
        for name, (rows, columns) in SHAPES.items():
            tensors |= {
                f"{MOE}.{e}.{name}.weight_packed": torch.zeros(
                    rows, columns // 8, dtype=torch.int32
                ),
                f"{MOE}.{e}.{name}.weight_scale": torch.ones(rows, columns // 32).half(),
            }
    groups = {
        f"group_{i}": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": value}}
        for i, value in enumerate(symmetric)
    }
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    checkpoint = save(tmp_path, tensors, quantization=settings)
    if symmetric == [False]:
        with pytest.raises(ValueError, match="no weight_zero_point .* has symmetric false"):
            checkpoint.stored(1)
    else:
        assert checkpoint.stored(1).method == "RAWINT4"
