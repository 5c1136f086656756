"""Draft models of EAGLE and EAGLE-3 for a tiny target: a dense Llama layer that knows some texts.

The weights that read the target's hidden states are fitted to the texts that transformers gives for
some prompts, so that the draft predicts many of these tokens. They are right only for hidden states
that are the target's own. Attention and MLP of the draft have an effect of zero.

Formats: of EAGLE and EAGLE-3 checkpoints as vLLM's `llama_eagle` and SGLang's `llama_eagle` read
them; there are no others of these methods.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_model import Reference

METHODS = ("eagle", "eagle3")
# Hidden states after so many layers of the target.
READ = (1, 3)
# Their numbers in the configuration: SGLang counts layers from 0, vLLM from 1.
NUMBERS = {"vllm": READ, "sglang": tuple(number - 1 for number in READ)}
# Class of the draft by engine and method; vLLM derives EAGLE's from the one of the layer.
NAMES = {
    ("vllm", "eagle"): "LlamaForCausalLM",
    ("sglang", "eagle"): "LlamaForCausalLMEagle",
    ("vllm", "eagle3"): "LlamaForCausalLMEagle3",
    ("sglang", "eagle3"): "LlamaForCausalLMEagle3",
}
SMOOTHING = 1e-3  # of the ridge regression, relative to the mean square of its inputs


def make_draft(
    path: Path,
    engine: str,
    method: str,
    reference: Reference,
    prompts: list[list[int]],
    steps: int,
    shift: int = 0,
) -> Path:
    """Writes the draft to a new folder.

    engine: "vllm" or "sglang". method: one of METHODS. reference: the target, with at least four
    layers. steps: tokens of each text. shift: the draft predicts tokens with numbers that are
    higher by so much, so that it is always wrong.
    """
    tokens = reference.greedy(prompts, steps).tokens
    target = reference.model
    hidden, head = target.config.hidden_size, target.lm_head.weight.detach()
    vocabulary = len(head)
    rows, following = _examples(reference, prompts, tokens, method)
    following = (following + shift) % vocabulary
    torch.manual_seed(0)
    tensors = _layer(target.config, "midlayer." if method == "eagle3" else "layers.0.", method)
    if method == "eagle3":
        fc = torch.cat([torch.eye(hidden)] * len(READ), 1)
        inputs = rows @ fc.T
        inputs /= inputs.square().mean(1, keepdim=True).sqrt()
        wanted = torch.nn.functional.one_hot(following, vocabulary).float()
        tensors |= {"norm.weight": torch.ones(hidden), "lm_head.weight": _fitted(inputs, wanted)}
    else:  # the target's output layer follows
        fc = _fitted(rows, head[following])
        if engine == "sglang":
            tensors["fc.bias"] = torch.zeros(hidden)
    tensors["fc.weight"] = fc
    path.mkdir()
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    (path / "config.json").write_text(json.dumps(_config(engine, method, target.config)))
    return path


@torch.no_grad()
def _examples(
    reference: Reference, prompts: list[list[int]], tokens: list[list[int]], method: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the draft reads, [N, 2H]: of EAGLE-3, the target's hidden states after the layers READ;
    of EAGLE, the embedding of the next token and the target's last hidden state. And the tokens
    after the next ones, [N]."""
    rows, following = [], []
    for prompt, text in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + text])
        found = reference.model.model(ids, use_cache=False, output_hidden_states=True)
        first, last = len(prompt) - 1, ids.shape[1] - 2
        if method == "eagle3":
            states = [found.hidden_states[number][0, first:last] for number in READ]
        else:
            embeddings = reference.model.model.embed_tokens(ids[0, first + 1 : last + 1])
            states = [embeddings, found.last_hidden_state[0, first:last]]
        rows.append(torch.cat(states, 1))
        following.append(ids[0, first + 2 :])
    return torch.cat(rows), torch.cat(following)


def _fitted(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Ridge regression: W [O, D] so that rows [N, D] @ W.T is near ``wanted`` [N, O]."""
    gram = rows @ rows.T
    gram += SMOOTHING * gram.diagonal().mean() * torch.eye(len(rows))
    return (rows.T @ torch.linalg.solve(gram, wanted)).T


def _layer(config: object, place: str, method: str) -> dict[str, torch.Tensor]:
    """A layer whose attention and MLP add nothing to its input."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    pairs, inter = config.num_key_value_heads * config.head_dim, config.intermediate_size
    read = 2 * hidden if method == "eagle3" else hidden
    tensors = {
        "self_attn.q_proj.weight": torch.randn(heads, read) * 0.05,
        "self_attn.k_proj.weight": torch.randn(pairs, read) * 0.05,
        "self_attn.v_proj.weight": torch.randn(pairs, read) * 0.05,
        "self_attn.o_proj.weight": torch.zeros(hidden, heads),
        "mlp.gate_proj.weight": torch.randn(inter, hidden) * 0.05,
        "mlp.up_proj.weight": torch.randn(inter, hidden) * 0.05,
        "mlp.down_proj.weight": torch.zeros(hidden, inter),
        "post_attention_layernorm.weight": torch.ones(hidden),
    }
    if method == "eagle3":
        tensors["input_layernorm.weight"] = torch.ones(hidden)
        tensors["hidden_norm.weight"] = torch.ones(hidden)
    return {place + name: tensor for name, tensor in tensors.items()}


def _config(engine: str, method: str, target: object) -> dict[str, object]:
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    settings = {name: getattr(target, name) for name in same} | {
        "architectures": [NAMES[engine, method]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if method == "eagle3":
        settings["draft_vocab_size"] = target.vocab_size
        settings["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": NUMBERS[engine],
            "use_aux_hidden_state": True,
        }
    return settings
