"""The parts of a multimodal model's configuration, for small models of its class.

Only the text model is compared, so the other parts just have to exist: they get as few layers and
as small sizes as their classes allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Parts that produce speech, which text does not need.
_SPEECH = ("talker_config", "code2wav_config")
# Sizes of the other parts, by their names.
_AT_MOST = {
    "depth": 1,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "n_layers": 1,
    "hidden_size": 64,
    "embed_dim": 64,
    "d_model": 64,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "downsample_hidden_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "head_dim": 32,
    "num_position_embeddings": 64,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "projection_hidden_size": 64,
    "projection_intermediate_size": 64,
}
# Their sizes that must be the text model's hidden size.
_AS_TEXT = ("out_hidden_size", "output_dim", "text_hidden_size", "projector_hidden_size")


def around(
    config: dict[str, Any], path: tuple[str, ...], text: dict[str, Any], first_token: int
) -> dict[str, Any]:
    """The whole configuration with a small text model.

    path: that of the text model. text: its small configuration. first_token: of the tokens that
        stand for images and the like; the text's vocabulary includes them.
    """
    tokens = iter(range(first_token, text["vocab_size"]))
    return _outer(config, path, text, tokens)


def _outer(
    config: dict[str, Any], path: tuple[str, ...], text: dict[str, Any], tokens: Iterator[int]
) -> dict[str, Any]:
    if not path:
        return text
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name in _SPEECH:
            continue
        if name == path[0]:
            value = _outer(value, path[1:], text, tokens)
        elif isinstance(value, dict) and name.endswith("_config"):
            value = _other_part(value, text["hidden_size"])
        elif isinstance(value, int) and _stands_for_something(name):
            value = next(tokens)
        elif name in _AT_MOST and isinstance(value, int):
            value = min(value, _AT_MOST[name])
        small[name] = value
    for name in ("quantization_config", "compression_config", "auto_map", "torch_dtype"):
        small.pop(name, None)
    if any(name in config for name in _SPEECH):
        small["enable_audio_output"] = False
    return small | {"tie_word_embeddings": False, "dtype": "bfloat16"}


def _stands_for_something(name: str) -> bool:
    """Whether a setting is the number of a special token, like image_token_id."""
    ends = name.endswith(("_token_id", "_token_index", "_patch_id"))
    return ends and name not in ("pad_token_id", "bos_token_id", "eos_token_id")


def _other_part(config: dict[str, Any], hidden: int) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            if name in _AS_TEXT:
                value = hidden
            elif name in _AT_MOST:
                value = min(value, _AT_MOST[name])
        elif name == "deepstack_visual_indexes":
            value = [0]
        small[name] = value
    return small
