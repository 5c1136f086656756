"""Quantised experts in stacks, against the definition of each format applied to whole stacks, and
transformers' own FP8 modules."""

import pytest
import torch
from quantised_files import E, fails, save

from kt_kernel.checkpoint import method_of, open_checkpoint, read_experts
from kt_kernel.testing import values_of
from kt_kernel.testing.quantised import E2M1, UE8M0
from kt_kernel.weights.formats import FP8_BLOCK, FP8_ROW, INT8_ROW, MXFP4, MXFP8, NVFP4

H, I = 256, 128  # noqa: E741
MLP = "model.layers.0.mlp.experts."


def e4m3(*shape):
    code = torch.randint(0, 254, shape, dtype=torch.uint8)
    return (code + (code >= 0x7F)).view(torch.float8_e4m3fn)  # all but the two NaNs


def e2m1(codes):
    """float64 values of bytes [..., K/2], the low half first."""
    codes = codes.view(torch.uint8)
    return E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]


def powers(*shape):
    return torch.randint(100, 150, shape, dtype=torch.uint8)


def spread(scale, rows, columns, row_block, column_block):
    """Scales [E, n, k] for each of [E, rows, columns]."""
    scale = scale.repeat_interleave(row_block, 1)[:, :rows]
    return scale.repeat_interleave(column_block, 2)[:, :, :columns]


# What makes a stack: rows, columns, number of matrices in its rows -> parts by the end of the name,
# as a linear layer has them, and their values [E, rows, columns].


def fp8_blocks(rows, columns, both, experts=E):
    weight, one = e4m3(experts, rows, columns), rows // both
    scale = torch.rand(experts, both * -(-one // 128), -(-columns // 128)) * 1e-2
    halves = [spread(s, one, columns, 128, 128) for s in scale.chunk(both, 1)]
    return {"": weight, "_scale_inv": scale}, weight.double() * torch.cat(halves, 1).double()


def fp8_row(rows, columns, both):
    weight, scale = e4m3(E, rows, columns), torch.rand(E, rows, 1) * 1e-2
    return {"": weight, "_weight_scale": scale}, weight.double() * scale.double()


def fp8_number(*shape, suffix="_weight_scale"):
    """One scale: for all, or for each expert."""

    def make(rows, columns, both):
        weight, scale = e4m3(E, rows, columns), torch.rand(shape) * 1e-2
        values = weight.double() * scale.double().reshape(-1, 1, 1)
        return {"": weight, suffix: scale, "_input_scale": torch.rand(1)}, values

    return make


def fp8_two_numbers(*shape):
    def make(rows, columns, both):
        if both == 1:
            return fp8_number(E, 1, 1, suffix="_scale_inv")(rows, columns, both)
        weight, scale = e4m3(E, rows, columns), torch.rand(E, 2, *shape) * 1e-2
        values = weight.double() * scale.double().reshape(E, 2, 1).repeat_interleave(rows // 2, 1)
        return {"": weight, "_scale_inv": scale, "_activation_scale": torch.rand(E)}, values

    return make


def mxfp4(rows, columns, both):
    weight = torch.randint(-128, 128, (E, rows, columns // 2), dtype=torch.int8)
    scale = powers(E, rows, columns // 32)
    values = e2m1(weight) * UE8M0[scale.long()].repeat_interleave(32, 2)
    return {"": weight, "_scale_inv": scale.view(torch.float8_e8m0fnu)}, values


def mxfp8(rows, columns, both):
    weight, scale = e4m3(E, rows, columns), powers(E, rows, columns // 32)
    values = weight.double() * UE8M0[scale.long()].repeat_interleave(32, 2)
    return {"": weight, "_scale_inv": scale}, values


def nvfp4(*shape, per_matrix=False):
    def make(rows, columns, both):
        weight = torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8)
        scale = torch.rand(E, rows, columns // 16).to(torch.float8_e4m3fn)
        whole = torch.rand(*shape, both) if per_matrix and both == 2 else torch.rand(shape)
        numbers = whole.double()
        if per_matrix and both == 2:
            numbers = numbers[..., None].repeat_interleave(rows // 2, 1)
        else:
            numbers = numbers.reshape(-1, 1, 1)
        values = e2m1(weight) * scale.double().repeat_interleave(16, 2) * numbers
        return {"": weight, "_weight_scale": scale, "_weight_scale_2": whole}, values

    return make


# model_type, names of the stacks, whether they are transposed, method, format, what makes them.
ONE, LINEAR = ("gate_up_proj", "down_proj"), ("input_linear", "output_linear")
CASES = {
    "fine-grained FP8": ("qwen3_5_moe", ONE, False, "FP8", FP8_BLOCK, fp8_blocks),
    "fine-grained FP8, transposed": ("qwen3_vl_moe", ONE, True, "FP8", FP8_BLOCK, fp8_blocks),
    "FP8, a number for all": ("llama4", ONE, True, "FP8", FP8_BLOCK, fp8_number()),
    "FP8, a number for each": ("mistral4", ONE, False, "FP8", FP8_BLOCK, fp8_number(E)),
    "FP8, two numbers": ("mistral4", ONE, False, "FP8", FP8_BLOCK, fp8_two_numbers()),
    "FP8, two numbers, as blocks": ("mistral4", ONE, False, "FP8", FP8_BLOCK, fp8_two_numbers(1)),
    "FP8 rows": ("qwen3_5_moe", ONE, False, "FP8_PERCHANNEL", FP8_ROW, fp8_row),
    "FP8 rows, transposed": ("llama4", ONE, True, "FP8_PERCHANNEL", FP8_ROW, fp8_row),
    "FP8 rows, granite": ("granitemoe", LINEAR, False, "FP8_PERCHANNEL", FP8_ROW, fp8_row),
    "MXFP4": ("deepseek_v4", ONE, False, "MXFP4", MXFP4, mxfp4),
    "MXFP8": ("minimax_m3_vl", ONE, False, "MXFP8", MXFP8, mxfp8),
    "NVFP4, transposed": ("llama4", ONE, True, "NVFP4", NVFP4, nvfp4()),
    "NVFP4, a number for each": ("qwen3_5_moe", ONE, False, "NVFP4", NVFP4, nvfp4(E)),
    "NVFP4, two numbers": ("qwen3_5_moe", ONE, False, "NVFP4", NVFP4, nvfp4(E, per_matrix=True)),
}


def where(model_type):
    block = {"llama4": "feed_forward.experts", "granitemoe": "block_sparse_moe"}
    return f"model.layers.0.{block.get(model_type, 'mlp.experts')}."


def make_stacks(case, hidden=H, inter=I):
    """Tensors of a checkpoint, and the values of gate, up and down, each [E, rows, columns]."""
    model_type, names, transposed, _, _, make = CASES[case]
    torch.manual_seed(0)
    tensors, values = {}, []
    for name, rows, columns, both in (
        (names[0], 2 * inter, hidden, 2),
        (names[1], hidden, inter, 1),
    ):
        parts, found = make(rows, columns, both)
        values += found.chunk(both, 1)
        for end, tensor in parts.items():
            if transposed and tensor.dim() == 3:
                tensor = tensor.transpose(1, 2)
            if names is LINEAR:
                end = ".weight" + end.removeprefix("_weight")
            tensors[where(model_type) + name + end] = tensor
    return tensors, dict(zip(("gate", "up", "down"), values, strict=True))


def check(path, values, method, format, hidden=H, inter=I):
    assert open_checkpoint(path).sizes(0) == (E, hidden, inter)
    found = read_experts(path, 0, E, hidden, inter, method=method)
    for matrix, wanted in values.items():
        for e in range(E):
            read = getattr(found, matrix)[e]
            assert read.format == format and read.codes.is_contiguous()
            assert torch.equal(values_of(read), wanted[e]), (matrix, e)


@pytest.mark.parametrize("case", CASES)
def test_values(tmp_path, case):
    model_type, _, _, method, format, _ = CASES[case]
    tensors, values = make_stacks(case)
    check(save(tmp_path, tensors, model_type=model_type), values, method, format)


@pytest.mark.parametrize(("hidden", "inter"), [(128, 256), (512, 64), (64, 32), (200, 192)])
def test_blocks_of_other_sizes(tmp_path, hidden, inter):
    """Also sizes that are no multiples of the blocks, where the count tells that each half has its
    own."""
    tensors, values = make_stacks("fine-grained FP8", hidden, inter)
    path = save(tmp_path, tensors, model_type="qwen3_5_moe")
    check(path, values, "FP8", FP8_BLOCK, hidden, inter)


@pytest.mark.parametrize(("inter", "blocks"), [(96, 2), (224, 4), (192, 3)])
def test_blocks_across_gate_and_up(tmp_path, inter, blocks):
    """Their rows are of both, or may be: then the count of the blocks does not tell."""
    tensors, _ = make_stacks("fine-grained FP8", H, inter)
    name = MLP + "gate_up_proj_scale_inv"
    tensors[name] = torch.ones(E, blocks, 2)
    path = save(tmp_path, tensors, model_type="qwen3_5_moe")
    fails(path, "FP8", name, "multiple of 128", inter, hidden=H, inter=inter)


@pytest.mark.parametrize("kind", ["step3p5", "step3p7"])
def test_gate_and_up_apart(tmp_path, kind):
    """As Step-3.5 and Step-3.7 have them."""
    tensors, values = {}, {}
    for name, rows, columns in (("gate", I, H), ("up", I, H), ("down", H, I)):
        parts, values[name] = fp8_blocks(rows, columns, 1)
        for end, tensor in parts.items():
            tensors[f"model.layers.0.moe.{name}_proj.weight{end}"] = tensor
    path = save(tmp_path / "a", tensors, model_type=kind)
    check(path, values, "FP8", FP8_BLOCK)
    del tensors["model.layers.0.moe.up_proj.weight_scale_inv"]
    path = save(tmp_path / "b", tensors, model_type=kind)
    fails(path, "FP8", "moe.up_proj.weight_scale_inv' is missing", hidden=H, inter=I)


def test_methods_that_quantise(tmp_path):
    tensors, values = make_stacks("fine-grained FP8")
    path = save(tmp_path, tensors, model_type="qwen3_5_moe")
    found = read_experts(path, 0, E, H, I, [1], method="INT4_G32")
    assert found.gate[0] is None
    assert torch.equal(found.up[1], values["up"][1].float())
    fails(path, "MXFP8", "which method FP8 reads", hidden=H, inter=I)


def test_bias(tmp_path):
    tensors, values = make_stacks("MXFP8")
    tensors |= {
        f"{MLP}gate_up_proj_bias": torch.randn(E, 2 * I),
        f"{MLP}down_proj_bias": torch.randn(E, H),
    }
    path = save(tmp_path, tensors, model_type="minimax_m3_vl")
    fails(path, "MXFP8", "proj_bias", "unexpected tensor", hidden=H, inter=I)


# --- what can be wrong


@pytest.mark.parametrize("case", CASES)
def test_bad_stacks(tmp_path, case):
    """Every tensor missing, of another shape, of another dtype; every scale NaN or negative."""
    model_type, _, _, method, _, _ = CASES[case]
    hidden = 384
    tensors, _ = make_stacks(case, hidden)

    def broken(name, value, *words):
        other = {n: t for n, t in tensors.items() if n != name}
        if value is not None:
            other[name] = value
        path = save(tmp_path / str(len(list(tmp_path.iterdir()))), other, model_type=model_type)
        fails(path, method, *words, hidden=hidden, inter=I)

    for name, tensor in tensors.items():
        if name.endswith(("input_scale", "activation_scale")):
            continue
        broken(name, None, name, "missing")
        # A shorter weight may be what shows a wrong scale, or the other weight.
        # So may a scale of another shape, which makes another format of it.
        words = [name] if "scale" in name else [where(model_type)]
        broken(name, torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]]), *words)
        if tensor.dim() > 1:
            broken(name, tensor[:-1], *words)
        if tensor.dim() > 1 and tensor.numel() > 2 * E:  # fewer are one number for each
            broken(name, tensor[:, :-1], where(model_type))
        broken(name, torch.zeros(tensor.shape, dtype=torch.float64), *words, "F64")
        if "scale" not in name:
            continue
        for value in (float("nan"), -1.0):
            changed = tensor.contiguous().clone()
            if tensor.element_size() == 1:
                code = {torch.float8_e4m3fn: 0x7F if value != value else 0x80 + 1}
                byte = code.get(tensor.dtype, 255)
                changed.view(torch.uint8).view(-1)[-1] = byte
            else:
                changed.view(-1)[-1] = value
            broken(name, changed, name, "accepted")


@pytest.mark.parametrize("end", ["_packed", "_weight_packed", "_zero_point", "_scale"])
def test_companions_of_no_known_format(tmp_path, end):
    tensors, _ = make_stacks("fine-grained FP8")
    name = f"{MLP}gate_up_proj{end}"
    path = save(tmp_path, tensors | {name: torch.ones(1)}, model_type="qwen3_5_moe")
    fails(path, "FP8", name, "unexpected tensor", hidden=H, inter=I)


def test_int8_rows(tmp_path):
    tensors, _ = make_stacks("FP8 rows")
    for name in ("gate_up_proj", "down_proj"):
        tensors[MLP + name] = tensors[MLP + name].view(torch.int8)
    path = save(tmp_path, tensors, model_type="qwen3_5_moe")
    found = read_experts(path, 0, E, H, I, method="AMXINT8")
    gate, up = tensors[f"{MLP}gate_up_proj"][1].chunk(2)
    scales = tensors[f"{MLP}gate_up_proj_weight_scale"][1].reshape(-1).chunk(2)
    for matrix, codes, scale in ((found.gate[1], gate, scales[0]), (found.up[1], up, scales[1])):
        assert matrix.format == INT8_ROW
        assert torch.equal(matrix.codes, codes) and torch.equal(matrix.scale, scale.float())
    fails(path, "FP8", f"{MLP}", "8-bit integers", "method AMXINT8 reads", hidden=H, inter=I)


def test_stacks_of_two_formats(tmp_path):
    """ModelOpt's NVFP4 in gate and up, FP8 in down."""
    tensors, _ = make_stacks("NVFP4, a number for each")
    model_type = CASES["NVFP4, a number for each"][0]
    start = next(n for n in tensors if n.endswith("gate_up_proj")).removesuffix("gate_up_proj")
    tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{start}down_proj")}
    codes = e4m3(E, H, I)
    tensors |= {f"{start}down_proj": codes, f"{start}down_proj_weight_scale": torch.rand(E)}
    path = save(tmp_path, tensors, model_type=model_type)
    assert method_of(open_checkpoint(path)).method == "MIXED"
    found = read_experts(path, 0, E, H, I, method="MIXED")
    assert found.up[0].format == NVFP4 and found.down[2].format == FP8_BLOCK
    scale = tensors[f"{start}down_proj_weight_scale"][2].double()
    assert torch.equal(values_of(found.down[2]), codes[2].double() * scale)


def test_other_sizes(tmp_path):
    tensors, _ = make_stacks("NVFP4, transposed")
    path = save(tmp_path, tensors, model_type="llama4")
    expected = f"has {E} experts of hidden size {H} and intermediate size {I}; expected"
    fails(
        path,
        "NVFP4",
        "gate_up_proj",
        expected,
        [E, H // 2, 2 * I],
        [E, H, 2 * I],
        hidden=2 * H,
        inter=I,
    )


# --- what transformers itself writes


@pytest.mark.parametrize("published_names", [True, False])
def test_fine_grained_fp8_of_transformers(tmp_path, published_names):
    """Both as a stack and taken apart into single experts, whose scales lose a dimension of 1."""
    transformers = pytest.importorskip("transformers", minversion="5.19")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=8,
            hidden_size=H,
            intermediate_size=I,
            moe_intermediate_size=I,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=E,
            num_local_experts=E,
            num_experts_per_tok=2,
        )
    )
    quantization = transformers.FineGrainedFP8Config()
    fp8.replace_with_fp8_linear(model, quantization_config=quantization)
    model.to_empty(device="cpu").config.quantization_config = quantization
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape).to(parameter.dtype))
    model.save_pretrained(tmp_path, save_original_format=published_names)
    experts = model.model.layers[0].mlp.experts
    values = {
        name: fp8.Fp8Dequantize(None)
        ._dequantize_one(
            getattr(experts, name), getattr(experts, f"{name}_scale_inv"), torch.float32
        )
        .double()
        for name in ("gate_up_proj", "down_proj")
    }
    gate, up = values["gate_up_proj"].chunk(2, 1)
    found = read_experts(tmp_path, 0, E, H, I, method="INT4_G32")  # float32, as theirs are
    for matrix, wanted in (("gate", gate), ("up", up), ("down", values["down_proj"])):
        assert torch.equal(torch.stack(getattr(found, matrix)).double(), wanted), matrix
