"""The reader against the experts of transformers' own modules, for every family in the table.

Tiny random models are saved both as the family's published checkpoints are named and as
transformers' modules are. What is read must reproduce the module's output, so orientation, order of
gate and up, interleave and biases are all seen. Of multimodal models only the layer that is read
gets memory: their other parts are large even at their smallest.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.checkpoint.safetensors.families import FAMILIES

transformers = pytest.importorskip("transformers", minversion="5.0")

E, TOKENS, TOP_K, LAYER = 4, 9, 2, 1
H, I = 32, 16  # noqa: E741
# H = 2I hides a wrong orientation of gate_up, H = I one of down.

COMMON = dict(
    vocab_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    num_experts=E,
    num_local_experts=E,
    n_routed_experts=E,
    num_experts_per_tok=TOP_K,
    first_k_dense_replace=0,
    decoder_sparse_step=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MLA = dict(
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
)
GROUPS = dict(n_group=1, topk_group=1, n_shared_experts=1)
LINEAR_ATTENTION = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    shared_expert_intermediate_size=24,
)
FULL = dict(layer_types=["full_attention"] * 2)
SPARSE = dict(mlp_layer_types=["sparse"] * 2)
NO_ROPE = dict(qk_rope_head_dim=0)
INDEXER = dict(index_n_heads=2, index_head_dim=8)
GEMMA4 = dict(
    enable_moe_block=True,
    top_k_experts=TOP_K,
    hidden_size_per_layer_input=0,
    per_layer_config={},
    global_head_dim=8,
    **FULL,
)

# model_type: (class prefix, config arguments beyond COMMON)
MODELS = {
    "afmoe": ("Afmoe", dict(num_dense_layers=0, num_shared_experts=1, **FULL)),
    "aria_text": ("Aria", dict(moe_num_experts=E, moe_topk=TOP_K, moe_num_shared_experts=1)),
    "axk1": ("AXK1", MLA | GROUPS),
    "axk2": ("AXK2", MLA | GROUPS | SPARSE),
    "cohere2_moe": ("Cohere2Moe", FULL),
    "deepseek_v2": ("DeepseekV2", MLA | GROUPS),
    "deepseek_v3": ("DeepseekV3", MLA | GROUPS),
    "deepseek_v32": ("DeepseekV32", MLA | GROUPS | INDEXER),
    "deepseek_v4": ("DeepseekV4", GROUPS),
    "dots1": ("Dots1", GROUPS),
    "ernie4_5_moe": ("Ernie4_5_Moe", dict(moe_num_experts=E, moe_k=2, moe_layer_start_index=0)),
    "exaone_moe": ("ExaoneMoe", dict(is_moe_layer=[True] * 2, **FULL, **SPARSE)),
    "flex_olmo": ("FlexOlmo", {}),
    "gemma4_text": ("Gemma4", GEMMA4),
    "gemma4_unified_text": ("Gemma4", GEMMA4),
    "glm4_moe": ("Glm4Moe", GROUPS),
    "glm4_moe_lite": ("Glm4MoeLite", MLA | GROUPS | SPARSE),
    "glm4v_moe_text": ("Glm4vMoe", GROUPS),
    "glm5_next_text": ("Glm5Next", MLA | GROUPS | SPARSE | NO_ROPE),
    "glm_moe_dsa": ("GlmMoeDsa", MLA | GROUPS | INDEXER | SPARSE),
    "gpt_oss": ("GptOss", {}),
    "granitemoe": ("GraniteMoe", {}),
    "granitemoe_swa": ("GraniteMoeSWA", {}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        dict(shared_intermediate_size=24, layer_types=["attention"] * 2, mamba_n_heads=4),
    ),
    "granitemoeshared": ("GraniteMoeShared", dict(shared_intermediate_size=24)),
    "hunyuan_v1_moe": ("HunYuanMoEV1", dict(moe_topk=TOP_K)),
    "hy_v3": ("HYV3", {}),
    "hy_v4": ("HYV4", SPARSE),
    "inkling_model": ("Inkling", {}),
    "inkling_text": ("Inkling", {}),
    "jamba": (
        "Jamba",
        dict(
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
            expert_layer_period=1,
            expert_layer_offset=0,
            attn_layer_period=1,
            attn_layer_offset=0,
        ),
    ),
    "kimi_linear": ("KimiLinear", MLA | GROUPS),
    "kimi_k2": ("DeepseekV3", MLA | GROUPS),
    "laguna": ("Laguna", {}),
    "lfm2_moe": ("Lfm2Moe", dict(num_dense_layers=0, **FULL)),
    "llama4_text": ("Llama4", dict(intermediate_size_mlp=40)),
    "mellum": ("Mellum", {}),
    "mimo_v2_flash": ("MiMoV2Flash", {}),
    "minimax": ("MiniMax", {}),
    "minimax_m2": ("MiniMaxM2", dict(rotary_dim=8)),
    "minimax_m3_vl_text": ("MiniMaxM3VL", {}),
    "mistral4": ("Mistral4", MLA | GROUPS),
    "mixtral": ("Mixtral", {}),
    "nemotron_h": (
        "NemotronH",
        dict(layers_block_type=["attention", "moe"], n_group=1, topk_group=1, n_shared_experts=1),
    ),
    "olmoe": ("Olmoe", {}),
    "phimoe": ("Phimoe", {}),
    "qwen2_moe": ("Qwen2Moe", dict(shared_expert_intermediate_size=24)),
    "qwen3_5_moe_text": ("Qwen3_5Moe", LINEAR_ATTENTION),
    "qwen3_moe": ("Qwen3Moe", {}),
    "qwen3_next": ("Qwen3Next", LINEAR_ATTENTION),
    "qwen3_vl_moe_text": ("Qwen3VLMoe", {}),
    "qwen4_exp_text": ("Qwen4Exp", LINEAR_ATTENTION),
    "solar_open": ("SolarOpen", GROUPS),
    "step3_text": ("Step3p7", dict(moe_layers_enum="0,1")),
    "step3p5": ("Step3p7", dict(moe_layers_enum="0,1")),
    "zaya": (
        "Zaya",
        dict(layer_types=["hybrid"] * 2, router_hidden_size=8, num_experts_per_tok=1),
    ),
}
# Inside a multimodal model: class prefix and arguments of the text part.
MULTIMODAL = {
    "aria": ("Aria", dict(moe_num_experts=E, moe_topk=TOP_K, moe_num_shared_experts=1)),
    "deepseek_ocr2": ("DeepseekOcr2", dict(n_shared_experts=1) | SPARSE),
    "diffusion_gemma": ("DiffusionGemma", GEMMA4 | dict(tie_word_embeddings=True)),
    "gemma4": ("Gemma4", GEMMA4),
    "glm4v_moe": ("Glm4vMoe", GROUPS),
    "glm5_next": ("Glm5Next", MLA | GROUPS | SPARSE | NO_ROPE),
    "inkling_mm_model": ("Inkling", {}),
    "kimi_k25": ("Kimi_K25", dict(model_type="deepseek_v3") | MLA | GROUPS),
    "llama4": ("Llama4", dict(intermediate_size_mlp=40)),
    "minimax_m3_vl": ("MiniMaxM3VL", {}),
    "qwen3_5_moe": ("Qwen3_5Moe", LINEAR_ATTENTION),
    "qwen3_omni_moe": ("Qwen3OmniMoe", {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {}),
    "qwen4_exp": ("Qwen4Exp", LINEAR_ATTENTION),
    "step3p7": ("Step3p7", dict(moe_layers_enum="0,1")),
}
# Not in transformers: tests/plugin/test_family_checkpoints.py has their models.
OF_ENGINES = {"iquest_q1"}
OF_TRANSFORMERS = {kind: family for kind, family in FAMILIES.items() if kind not in OF_ENGINES}
# Experts as in the class above; transformers has none of this type, or none with experts.
ANOTHER_TYPE = ("kimi_k2", "gemma4_unified_text", "inkling_model", "step3_text")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These matrices are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sizes(inter):
    return dict(intermediate_size=inter, moe_intermediate_size=inter)


def make_text(kind, hidden, inter, bare=False):
    name, extra = MODELS[kind]
    config_class = getattr(transformers, name + "TextConfig", None)
    config_class = config_class or getattr(transformers, name + "Config")
    config = config_class(**COMMON | sizes(inter) | dict(hidden_size=hidden) | extra)
    config._experts_implementation = "eager"
    whole = getattr(transformers, name + "ForCausalLM", None)
    if kind in ("step3p5", "step3_text"):
        return transformers.Step3p7TextModel(config)
    if whole is None or bare or kind == "aria_text":
        return transformers.AutoModel.from_config(config)
    return whole(config)


def make_multimodal(kind, hidden, inter):
    """On the meta device."""
    name, extra = MULTIMODAL[kind]
    text = COMMON | sizes(inter) | dict(hidden_size=hidden) | extra
    more = {}
    if kind == "qwen3_omni_moe":
        more = dict(
            thinker_config=dict(text_config=text),
            talker_config=dict(
                text_config=dict(shared_expert_intermediate_size=24, num_hidden_layers=1),
                spatial_merge_size=2,
            ),
        )
    elif kind == "aria":
        more = dict(text_config=transformers.AriaTextConfig(**text))
    else:
        more = dict(text_config=text)
        if kind == "diffusion_gemma":
            more |= dict(vision_config=transformers.Gemma4VisionConfig(num_hidden_layers=1))
    config = getattr(transformers, name + "Config")(**more)
    whole = name + "ForConditionalGeneration"
    if kind == "minimax_m3_vl":
        whole = "MiniMaxM3SparseForConditionalGeneration"
    elif kind == "diffusion_gemma":
        whole = "DiffusionGemmaForBlockDiffusion"
    with torch.device("meta"):
        return getattr(transformers, whole)(config)


def is_experts(module):
    stacks = {
        name
        for name in ("gate_proj", "gate_up_proj", "up_proj", "down_proj")
        if isinstance(getattr(module, name, None), torch.nn.Parameter)
    }
    return stacks in ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})


def randomise(model):
    """The experts of the layer that is read, all of whose parameters are made random."""
    names = [n for n, m in model.named_modules() if is_experts(m) and f"layers.{LAYER}." in n]
    # DiffusionGemma's encoder has the weights of its decoder, whose names files have.
    (name,) = [n for n in names if "talker" not in n and "encoder" not in n]
    experts = model.get_submodule(name)
    if experts.down_proj.is_meta:
        layer = model.get_submodule(layer_of(name))
        layer.to_empty(device="cpu")
        for tensor in layer.state_dict().values():
            tensor.zero_()
    if hasattr(experts, "config"):
        experts.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.5)
    return experts


def layer_of(name):
    return name[: name.index(f"layers.{LAYER}.") + len(f"layers.{LAYER}")]


def save_model(kind, model, path, published_names):
    """As save_pretrained writes it."""
    state = {n: t for n, t in model.state_dict().items() if not t.is_meta}
    model.save_pretrained(path, save_original_format=published_names, state_dict=state)
    if kind in ANOTHER_TYPE:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    if (
        kind == "kimi_k25" and published_names
    ):  # transformers writes the language part's as "blocks"
        file = path / "model.safetensors"
        tensors = load_file(file)
        save_file({n.replace(".blocks.", ".layers."): t for n, t in tensors.items()}, file)


def routed():
    x_ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(TOKENS)])
    return x_ids, torch.rand(TOKENS, TOP_K)


@torch.no_grad()
def module_output(experts, x, ids, weights):
    if type(experts).__name__ == "Llama4TextExperts":  # wants x repeated for every expert
        every = experts(x.repeat(E, 1)).view(E, len(x), -1)
        return (every[ids.T, torch.arange(len(x))] * weights.T[..., None]).sum(0)
    return experts(x, ids, weights)


def our_output(experts, read, x, ids, weights):
    result = torch.zeros_like(x)
    for token, k in [(t, k) for t in range(len(x)) for k in range(TOP_K)]:
        e = int(ids[token, k])
        up = read.up[e] @ x[token]
        gate = up if read.gate[e] is None else read.gate[e] @ x[token]
        if read.gate[e] is None:
            h = experts.act_fn(up)
        elif read.gate_bias:
            gate, up = gate + read.gate_bias[e], up + read.up_bias[e]
            gate = gate.clamp(max=experts.limit)
            up = up.clamp(-experts.limit, experts.limit)
            h = gate * torch.sigmoid(experts.alpha * gate) * (up + 1)
        elif hasattr(experts, "_apply_gate"):
            h = experts._apply_gate(torch.cat([gate, up]))
        else:
            h = experts.act_fn(gate) * up
        y = read.down[e] @ h
        if read.down_bias:
            y = y + read.down_bias[e]
        result[token] += weights[token, k] * y
    return result


def compare(experts, path, hidden, inter):
    checkpoint = open_checkpoint(path)
    assert LAYER in checkpoint.layers()
    assert checkpoint.sizes(LAYER) == (E, hidden, inter)
    read = checkpoint.read_experts(LAYER, E, hidden, inter)
    assert (read.gate[0] is None) == (hasattr(experts, "up_proj"))
    for tensors, shape in (
        (read.gate, (inter, hidden)),
        (read.up, (inter, hidden)),
        (read.down, (hidden, inter)),
    ):
        for tensor in filter(lambda each: each is not None, tensors):
            assert tensor.shape == shape and tensor.is_contiguous()
            assert tensor.dtype == torch.float32
    x = torch.randn(TOKENS, hidden)
    ids, weights = routed()
    expected = module_output(experts, x, ids, weights)
    torch.testing.assert_close(
        our_output(experts, read, x, ids, weights), expected, rtol=1e-4, atol=1e-4
    )
    assert expected.std() > 0.1  # the comparison can fail


def test_every_family_has_a_model():
    assert set(MODELS) | set(MULTIMODAL) | OF_ENGINES == set(FAMILIES)


def make(kind, hidden, inter, whole=False):
    """The model, on the meta device unless a whole one is wanted and it is not multimodal."""
    if kind in MULTIMODAL:
        return make_multimodal(kind, hidden, inter)
    with torch.device("cpu" if whole else "meta"):
        return make_text(kind, hidden, inter)


@pytest.mark.parametrize("published_names", [True, False])
@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_family(kind, published_names, tmp_path):
    torch.manual_seed(0)
    model = make(kind, H, I, whole=published_names)
    experts = randomise(model)
    save_model(kind, model, tmp_path, published_names)
    assert open_checkpoint(tmp_path).model_type == kind
    compare(experts, tmp_path, H, I)


# One of each different entry of the table.
@pytest.mark.parametrize("published_names", [True, False])
@pytest.mark.parametrize("inter", [24, 32])
@pytest.mark.parametrize("kind", {f: kind for kind, f in OF_TRANSFORMERS.items()}.values())
def test_other_shapes(kind, inter, published_names, tmp_path):
    torch.manual_seed(0)
    model = make(kind, H, inter)
    experts = randomise(model)
    save_model(kind, model, tmp_path, published_names)
    compare(experts, tmp_path, H, inter)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss"])
def test_bare_model_has_no_prefix(kind, tmp_path):
    torch.manual_seed(0)
    model = make_text(kind, H, I, bare=True)
    experts = randomise(model)
    model.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).where(LAYER).startswith("layers.")
    compare(experts, tmp_path, H, I)


@pytest.mark.parametrize("inside", [("llm_config",), ("thinker_config", "text_config")])
def test_the_type_of_a_text_model_inside(inside, tmp_path):
    """As Nemotron-H's multimodal models are published."""
    torch.manual_seed(0)
    model = make("nemotron_h", H, I, whole=True)
    experts = randomise(model)
    save_model("nemotron_h", model, tmp_path, True)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in reversed(inside):
        config = {"model_type": "another", name: config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, file)
    compare(experts, tmp_path, H, I)


def test_shards(tmp_path):
    torch.manual_seed(0)
    model = make_text("qwen3_moe", H, I)
    experts = randomise(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare(experts, tmp_path, H, I)
    compare(experts, tmp_path / "model.safetensors.index.json", H, I)
