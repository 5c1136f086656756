#!/usr/bin/env python3
"""Write the demo model's configuration and tokenizer (needs transformers).

python3 configs/demo_model/make_files.py src/kt_kernel/demo_model
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS = 256  # ids 0 to 255 are the bytes themselves

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": EOS,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    # Only layers without experts would use it, and there are none.
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "max_window_layers": 8,
    "mlp_only_layers": [],
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": EOS,
    "rms_norm_eps": 1e-06,
    # Twice, under the names of transformers 4 and 5: engines read either.
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    # 256 bytes and one special token, padded to a multiple of 64.
    "vocab_size": 320,
}


def byte_tokenizer():
    """Byte-pair tokenizer without merges: every byte is the token of its own value."""
    # The printable stand-ins for the 256 bytes, in the order that GPT-2 defined.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, extra = {b: chr(b) for b in shown}, 256
    for byte in range(256):
        if byte not in names:
            names[byte] = chr(extra)
            extra += 1
    assert set(names.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == EOS
    return tokenizer


def main(out):
    """Write every small file of the model folder."""
    out.mkdir(parents=True, exist_ok=True)

    def write(name, value):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")

    write("config.json", CONFIG)
    write("generation_config.json", {"eos_token_id": EOS, "pad_token_id": EOS})
    byte_tokenizer().save(str(out / "tokenizer.json"))
    write(
        "tokenizer_config.json",
        {
            # The model only continues text; the template lets chat endpoints answer.
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|endoftext|>",
            "model_max_length": CONFIG["max_position_embeddings"],
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    write("special_tokens_map.json", {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
