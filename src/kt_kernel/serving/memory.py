"""Whether the packed experts fit into the machine's memory: told before they are loaded.

Without this, the system ends a process that takes too much, minutes later and without a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..runtime.machine import available_memory, most_memory
from ..runtime.text import shown_size
from ..weights.expert_tensors import matrix_shapes
from ..weights.formats import LayerForm
from ..weights.methods import get_method
from .model_config import described_layers, expert_sizes, has_gate, number_of_layers, size_of
from .option_table import ROUTES_TOKENS, OptionError
from .options import KTOptions
from .placement import plan_placement


def expert_bytes(form: LayerForm, hidden: int, inter: int, gated: bool) -> int:
    """Packed bytes of an expert that is not divided over pools."""
    parts = zip(form, matrix_shapes(hidden, inter).items(), strict=True)
    return sum(one.packed_bytes(*shape) for one, (name, shape) in parts if gated or name != "gate")


def check_memory(
    options: KTOptions,
    config: Any,
    in_files: Mapping[int, int],
    layers_in_files: list[int],
    logger: logging.Logger,
) -> None:
    """Compares what the experts on the CPU need with the memory of the machine, within the limits
    of its control groups.

    Layers that were not looked at count as the smallest one that was. Does nothing if neither the
    configuration nor the files say which layers have experts of which sizes.

    Args:
        options: as the workers get them.
        config: the language model's configuration.
        in_files: packed bytes of an expert, by layer, if kt-moe reads files.
        layers_in_files: the layers with experts there.

    Raises:
        OptionError: they need more than the machine has, swap included. If they need more than is
            free now, only a warning is logged.
    """
    layers = described_layers(config)
    if layers is None:
        last = number_of_layers(config) or 0
        layers = [layer for layer in layers_in_files if layer < last]
    try:
        most, free = most_memory(), available_memory()
    except OSError:  # the system does not tell
        return
    _check_routes(options, config, len(layers), most)
    need, experts = _needed(options, config, layers, in_files)
    taken = f"{experts} experts on the CPU take {shown_size(need)} of memory as {options.method}"
    if need > most:
        raise OptionError(
            f"{taken}, and this machine, or its control group, has "
            f"{shown_size(most, down=True)}, swap included; give fewer bits per weight "
            "(--kt-method), more hot experts (--kt-num-gpu-experts), or more memory"
        )
    if need > free:
        logger.warning(
            "kt: %s, and %s are free now; the system may end this process while it loads",
            taken,
            shown_size(free, down=True),
        )


def _needed(
    options: KTOptions, config: Any, layers: list[int], in_files: Mapping[int, int]
) -> tuple[int, int]:
    """Bytes of the experts on the CPU, and their number."""
    hidden, inter = expert_sizes(config)
    form = get_method(options.method).layer_form
    # Of layers that were not looked at: the smallest, so that nothing that fits is refused.
    other = min(in_files.values(), default=0)
    if not in_files and form is not None and hidden and inter:
        other = expert_bytes(form, hidden, inter, has_gate(config))
    plan = plan_placement(options, config)
    size = count = 0
    for layer in layers:
        placement = plan.of(layer)
        here = placement.num_cold
        if options.moves_experts and not placement.all_hot:
            here = placement.num_experts
        count += here
        size += here * in_files.get(layer, other)
    return size, count


def _check_routes(options: KTOptions, config: Any, layers: int, most: int) -> None:
    """The record of routes has a number of 16 bits per route, and one of 32 per token."""
    if options.record_kt_expert_routes is None:
        return
    tokens = options.expert_routes_tokens or ROUTES_TOKENS
    need = tokens * layers * (2 * (size_of(config, "num_experts_per_tok") or 1) + 4)
    if need > most:
        raise OptionError(
            f"--kt-expert-routes-tokens {tokens}: their routes take {shown_size(need)} of memory, "
            f"and this machine, or its control group, has {shown_size(most, down=True)}, swap "
            "included; give fewer"
        )
