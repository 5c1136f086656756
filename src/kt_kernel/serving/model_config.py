"""Reads a served model's configuration: any object with the attributes of a Hugging Face
``config.json``."""

import os
from typing import Any

from ..routes.model import RoutedModel
from ..runtime.nested import NUMBERS_OF_EXPERTS
from ..runtime.text import ranges
from .option_table import OptionError

# Model types whose configuration says nothing of dense layers, because they have none.
_EVERY_LAYER = (
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
)
# The experts' hidden size, in models that compute them between two projections: of Nemotron-H and
# Kimi-K3.
_LATENT = ("moe_latent_size", "routed_expert_hidden_size")
# The kinds of Nemotron-H's layers: a list, or a text with a letter for each layer.
_KINDS, KINDS_AS_TEXT = "layers_block_type", "hybrid_override_pattern"
_KIND_OF = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
# Names of the experts' activation, in some configurations beside that of the other layers.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
# Settings that make an activation another one than its name says.
_NOT_PLAIN = (
    "swiglu_limit",
    "swiglu_limits",
    "swiglu_alpha",
    "expert_swiglu_limit_list",
    "moe_apply_router_weight_on_input",
)
# Model types whose router weights multiply the experts' input, without a setting for it.
_ON_INPUT = ("llama4_text",)
_WITH_LIMIT = ("gpt_oss",)  # and biases; they can be streamed


def num_experts(config: Any) -> int:
    """Routed experts per layer; OptionError if the configuration has no such number."""
    for name in NUMBERS_OF_EXPERTS:
        counts = getattr(config, name, None)
        # Ernie 4.5 VL has the numbers of experts for text and for images, which its code compares.
        if isinstance(counts, list) and len({*map(str, counts)}) == 1:
            counts = counts[0]
        if isinstance(counts, int) and counts > 0:
            return counts
    names = ", ".join(NUMBERS_OF_EXPERTS)
    if others := _other_numbers(config):
        raise OptionError(
            f"model class {_class_of(config)} is not supported: kt-moe reads one number of experts "
            f"for the whole model ({names}), and this configuration has {others}"
        )
    raise OptionError(
        f"model class {_class_of(config)}: its configuration has no number of experts ({names}); "
        "kt-moe is for Mixture-of-Experts models"
    )


def has_experts(config: Any) -> bool:
    """Whether a model has routed experts, as far as the configuration tells."""
    try:
        return num_experts(config) > 0
    except OptionError:
        return bool(_other_numbers(config))


def _other_numbers(config: Any) -> str:
    """Numbers of experts, by name, that are not one for the whole model: in a part of the
    configuration, as DBRX's, or one for each block, as those of Puzzle models."""
    found: dict[str, set[int]] = {}
    for part, value in vars(config).items():
        for one in value if isinstance(value, list) else [value]:
            inner = getattr(one, "__dict__", one)
            start, content = (f"{part}.", inner) if isinstance(inner, dict) else ("", {part: one})
            for name in NUMBERS_OF_EXPERTS:
                count = content.get(name)
                if isinstance(count, int) and count > 0:
                    found.setdefault(start + name, set()).add(count)
    return ", ".join(f"{name} {ranges(sorted(counts))}" for name, counts in found.items())


def model_classes(config: Any) -> list[str]:
    """Names of the model's class; none if the configuration does not tell."""
    names = getattr(config, "architectures", None)
    return [str(name) for name in names] if isinstance(names, list) else []


def _class_of(config: Any) -> str:
    """For messages."""
    kind = getattr(config, "model_type", None) or type(config).__name__
    return ", ".join(model_classes(config)) or str(kind)


def moe_layers(config: Any) -> list[int]:
    """Numbers of the layers with experts. If the configuration describes them in an unknown way,
    only the last layer, which has experts in all such models."""
    layers = described_layers(config)
    if layers is not None:
        return layers
    count = number_of_layers(config)
    return [] if count is None else [count - 1]


def number_of_layers(config: Any) -> int | None:
    """Layers of the language model, without those of multi-token prediction; None if the
    configuration does not tell. Where Nemotron-H's layers are listed, transformers and the engines
    count these, and transformers 5 writes no other number."""
    kinds = layer_kinds(config)
    return len(kinds) if kinds else size_of(config, "num_hidden_layers")


def layer_kinds(config: Any) -> list[str] | None:
    """The kind of each layer of a Nemotron-H model, such as "moe"; None for other models."""
    kinds, letters = (getattr(config, name, None) for name in (_KINDS, KINDS_AS_TEXT))
    if isinstance(kinds, list):
        return kinds
    # As published: transformers and the engines make the list of it.
    if isinstance(letters, str):
        return [_KIND_OF.get(letter, letter) for letter in letters]
    return None


def described_layers(config: Any) -> list[int] | None:
    """The same; None if the configuration describes them in an unknown way."""
    count = number_of_layers(config)
    if count is None:
        return None
    kinds = layer_kinds(config) or []
    if "moe" in kinds:
        return [i for i, kind in enumerate(kinds) if kind == "moe"]
    layers = range(count)
    step = size_of(config, "decoder_sparse_step")
    if step is not None:
        dense = getattr(config, "mlp_only_layers", None) or []
        return [i for i in layers if i not in dense and (i + 1) % step == 0]
    dense = getattr(config, "first_k_dense_replace", None)
    if isinstance(dense, int):
        return [i for i in layers[dense:] if i % (size_of(config, "moe_layer_freq") or 1) == 0]
    if getattr(config, "model_type", None) in _EVERY_LAYER:
        return list(layers)
    return None


def size_of(config: Any, name: str) -> int | None:
    """A positive integer of the configuration; None if there is none under that name."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def expert_sizes(config: Any) -> tuple[int | None, int | None]:
    """Hidden and intermediate size of the experts; None if they have unusual names. The hidden size
    is that between two projections, if a model has them around its experts."""
    sizes = (size_of(config, name) for name in (*_LATENT, "hidden_size"))
    hidden = next((size for size in sizes if size), None)
    inter = size_of(config, "moe_intermediate_size")
    if inter is None and hasattr(config, "num_local_experts"):  # such models have one size
        inter = size_of(config, "intermediate_size")
    return hidden, inter


def has_gate(config: Any) -> bool:
    """Whether experts have a gate, as far as the configuration tells. Without one, as in
    Nemotron-H, an expert has two matrices."""
    # Not at the top: plugins are loaded without kt options, too, and this takes torch.
    from ..checkpoint.safetensors.families import FAMILIES

    family = FAMILIES.get(str(getattr(config, "model_type", None)))
    gated = family is None or family.gated
    return gated and getattr(config, "mlp_hidden_act", None) != "relu2"


def may_be_streamed(config: Any) -> bool:
    """Whether an engine may compute streamed experts with this activation: SiLU without a limit,
    or that of gpt-oss.

    True if the configuration does not tell. The start of streaming checks the layers themselves.
    """
    return getattr(config, "model_type", None) in _WITH_LIMIT or plain_swiglu(config)


def plain_swiglu(config: Any) -> bool:
    """Whether experts compute SwiGLU without a limit, an alpha and biases, and router weights
    multiply their output. True if the configuration does not tell."""
    if getattr(config, "model_type", None) in (*_ON_INPUT, *_WITH_LIMIT):
        return False
    names = {getattr(config, name, None) for name in _ACTIVATIONS}
    given = [getattr(config, name, None) for name in _NOT_PLAIN]
    # Of some settings, a list has a value for each layer.
    return names <= {None, "silu", "swish"} and not any(
        any(value) if isinstance(value, list) else value for value in given
    )


def routed_model(config: Any) -> RoutedModel:
    """The identity of the model for statistics and records of its routes."""
    hidden, inter = expert_sizes(config)
    for name in ("intermediate_size", "moe_intermediate_size"):
        # SGLang pads the sizes for its CPU kernels and keeps the original ones.
        if size_of(config, name) == inter:
            inter = size_of(config, f"original_{name}") or inter
    name = str(getattr(config, "_name_or_path", None) or "")
    return RoutedModel(
        model_type=str(getattr(config, "model_type", None) or ""),
        num_hidden_layers=number_of_layers(config) or 0,
        num_experts=num_experts(config),
        num_experts_per_tok=size_of(config, "num_experts_per_tok") or 0,
        hidden_size=hidden or 0,
        moe_intermediate_size=inter or 0,
        name=os.path.basename(name) if os.path.isabs(name) else name,
    )
