"""Checks options against the model's configuration, before an engine loads anything.

What a layer would refuse while it is built in a worker, as a traceback, is refused here in one line
that names the option. Knows no engine; the configuration is any object with the attributes of a
Hugging Face ``config.json``.
"""

import re
from typing import Any

import torch

from .checkpoint import open_checkpoint
from .options import KTOptions, OptionError
from .settings import check_settings

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_ANY_SIZE = 1024  # in place of a size the configuration does not tell: no method refuses it
# What the checks call a value, and the option it came from.
_FLAGS = {
    "threadpool_count": "threadpool_count",
    "cpuinfer_threads": "cpuinfer",
    "max_deferred_experts_per_token": "max_deferred_experts_per_token",
    "method": "method",
    "weight_path": "weight_path",
    "hidden_size": "method",  # a size that does not suit the method's groups
    "moe_intermediate_size": "method",
}


def check_model(options: KTOptions, config: Any) -> None:
    """Raises OptionError, one line, for options that this model or this machine cannot take.

    config: the language model's configuration. Its number of experts has to be there; where the
    name of another size is not a usual one, what depends on it is checked by the layers.
    """
    experts = num_experts(config)
    options.hot_count(experts)
    hidden, inter = _size(config, "hidden_size"), _size(config, "moe_intermediate_size")
    if inter is None and hasattr(config, "num_local_experts"):  # such models have one size
        inter = _size(config, "intermediate_size")
    _check_settings(options, config, experts, hidden or _ANY_SIZE, inter or _ANY_SIZE)
    if options.weight_path is not None:
        _check_weight_path(
            options.weight_path, moe_layers(config), experts, hidden, inter, options.method
        )


def num_experts(config: Any) -> int:
    """Routed experts per layer; OptionError when the configuration has no such number."""
    for name in _EXPERTS:
        if count := _size(config, name):
            return count
    classes = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
    raise OptionError(
        f"model class {classes}: its configuration has no number of experts "
        f"({', '.join(_EXPERTS)}); remove the kt options"
    )


def moe_layers(config: Any) -> list[int]:
    """Numbers of the layers with experts; where the configuration's way to tell is not known, only
    the last layer, which has experts in all such models."""
    count = _size(config, "num_hidden_layers")
    if count is None:
        return []
    layers = range(count)
    step = _size(config, "decoder_sparse_step")
    if step is not None:
        dense = getattr(config, "mlp_only_layers", None) or []
        return [i for i in layers if i not in dense and (i + 1) % step == 0]
    dense = getattr(config, "first_k_dense_replace", None)
    if isinstance(dense, int):
        return [i for i in layers[dense:] if i % (_size(config, "moe_layer_freq") or 1) == 0]
    return [count - 1]


def _size(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _check_settings(options: KTOptions, config: Any, experts: int, hidden: int, inter: int) -> None:
    try:
        check_settings(
            layer_idx=0,
            num_experts=experts,
            num_experts_per_tok=_size(config, "num_experts_per_tok") or 1,
            hidden_size=hidden,
            moe_intermediate_size=inter,
            gpu_experts_mask=torch.arange(experts, device="cpu") < options.hot_count(experts),
            cpuinfer_threads=options.cpuinfer,
            threadpool_count=options.threadpool_count,
            weight_path=options.weight_path,
            max_deferred_experts_per_token=options.max_deferred_experts_per_token,
            method=options.method,
        )
    except (ImportError, OSError, TypeError, ValueError) as error:
        name = re.match(r"\w*", str(error))[0]
        option = _FLAGS.get(name)
        if option is None:  # the message names an environment variable, or the model's number
            raise OptionError(str(error)) from error
        flag = "--kt-" + option.replace("_", "-")
        raise OptionError(f"{flag} {getattr(options, option)}: {error}") from error


def _check_weight_path(
    path: str, layers: list[int], experts: int, hidden: int | None, inter: int | None, method: str
) -> None:
    """Reads headers only: names, shapes and dtypes of all experts of these layers, and whether the
    method takes them."""
    try:
        checkpoint = open_checkpoint(path)
        for layer in layers:
            _, found_hidden, found_inter = checkpoint.sizes(layer)
            checkpoint.read_experts(
                layer, experts, hidden or found_hidden, inter or found_inter, (), method
            )
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"--kt-weight-path {path}: {error}") from error
