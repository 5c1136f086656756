"""Shared by both plugins: registration with errors shown, choice of options, refusals."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from kt_kernel import _conflict
from kt_kernel.runtime.text import shown_size
from kt_kernel.serving.flags import ENVIRONMENT_VARIABLE, exit_with, from_environment
from kt_kernel.serving.option_table import ENGINE, OptionError
from kt_kernel.serving.option_values import check_writable
from kt_kernel.serving.options import KTOptions

from .tested_models import TESTED_LAYERS, TESTED_MODELS

# Load formats that pass weights to our loaders one by one, as tested.
LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "npcache")
# The engines' names of an expert's matrices, by whether it has a gate. Without a gate, the first of
# its two input matrices is up.
MATRIX = {True: {"w1": "gate", "w3": "up", "w2": "down"}, False: {"w1": "up", "w2": "down"}}
# Reasons for a refusal, of configurations and of requests to a running engine.
SINGLE_RANK = "kt-moe supports tensor parallelism only"
ONE_BY_ONE = "cold experts need their weights one by one"
NO_EXCHANGE = "the weights of cold experts cannot be replaced or offloaded"
KEEPS_WEIGHTS = (
    "the weights of cold experts cannot be replaced while the engine runs; restart it with the "
    "new weights"
)
KEEPS_MEMORY = "the weights of cold experts cannot be released; stop the engine and start it again"
NO_LORA = (
    "with kt options, LoRA adapters cannot be loaded while the engine runs; restart it with "
    "--kt-expert-lora-path (adapters of experts), or with the adapter merged into the checkpoint"
)
NO_LORA_OPTION = (
    "not supported with kt options; use --kt-expert-lora-path (adapters of experts), or merge the "
    "adapter into the checkpoint"
)
NO_SCALING = "the number of ranks cannot change with kt options; restart the engine"
HOLDS_A_PART = (
    "the engine holds only the hot experts, and would write a checkpoint without the others"
)


class RequestRefused(ValueError):
    """A request that the hybrid layer does not support; the engine continues to serve."""


def install(engine: str, hooks: Callable[[], None], logger: logging.Logger) -> str:
    """Installs the hooks that a plugin needs before it knows the options.

    Returns the reason why the hybrid layer cannot work, or "" if it can; a start with kt options
    must end with that reason. No exception is raised, because an engine would only log it and serve
    without the plugin. If the hooks cannot be installed, the plugin will not see the options later.
    If they are visible now, in the environment or on the command line, this raises SystemExit.

    engine: the engine's name, for the log. hooks: installs the hooks; any exception is a failure.
    """
    problem = ""
    try:
        _conflict.check()
    except Exception as error:
        problem = _why(error)
    try:
        hooks()
    except Exception as error:
        problem = problem or _why(error)
        if _conflict.options_visible():
            raise exit_with(OptionError(problem)) from None
        logger.warning("kt: %s; %s runs without it", problem, engine)
    return problem


def _why(error: Exception) -> str:
    return (
        f"the plugin cannot be installed ({type(error).__name__}: {error}); remove the kt options, "
        "or install a tested version of the engine"
    )


def choose(given: Mapping[str, Any] | None, logger: logging.Logger) -> KTOptions | None:
    """The options given to the engine, or those in KT_CONFIG; None if there are neither.

    An ignored KT_CONFIG is still checked, and a warning is logged if it differs. So are the files
    that other variables name, if there are options. Raises OptionError.
    """
    environment = from_environment()
    fallback = None if environment is None else KTOptions.from_mapping(environment)
    options = fallback if given is None else KTOptions.from_mapping(given)
    if options is not None:
        _check_files()
    if given is not None and fallback not in (None, options):
        logger.warning(
            "kt: %s is ignored because kt options were given directly", ENVIRONMENT_VARIABLE
        )
    return options


def _check_files() -> None:
    """OptionError if a file that a variable names cannot be written."""
    from kt_kernel.serving.report import STATS_FILE_VARIABLE
    from kt_kernel.trace.writer import TRACE_VARIABLE

    for variable in (STATS_FILE_VARIABLE, TRACE_VARIABLE):
        if path := os.environ.get(variable):
            check_writable(variable, path)


def warn_of_trace(device: str, logger: logging.Logger) -> None:
    """Warns if a trace was requested but the engine's device is the CPU."""
    from kt_kernel.trace.writer import TRACE_VARIABLE

    if os.environ.get(TRACE_VARIABLE) and device == "cpu":
        logger.warning("kt: %s is ignored: traces need a GPU", TRACE_VARIABLE)


def refuse_streaming(device: str, options: KTOptions) -> None:
    """OptionError if experts are to be streamed to a device that is not a GPU."""
    tokens, memory = options.given_threshold, options.gpu_prefill_memory
    if device == "cuda" or not (tokens or memory):
        return
    flag = f"--kt-gpu-prefill-token-threshold {tokens}"
    if memory and not tokens:
        flag = f"--kt-gpu-prefill-memory {shown_size(memory)}"
    raise OptionError(
        f"{flag}: experts can only be streamed to a CUDA device, and the engine's device is "
        f"{device}; remove it"
    )


def instead_of_converting(options: KTOptions) -> str:
    """What is accepted where kt-moe cannot convert hot experts. If the engine delivers them, they
    are those of a 16-bit model, and need not be converted."""
    none = "--kt-num-gpu-experts 0"
    return none if options.reads_hot else f"--kt-hot-format {ENGINE} or {none}"


def slot_weights(layer: Any) -> tuple[Any, ...] | None:
    """An engine's weights of the hot experts of a layer: gate and up [slots, 2 I, H], and down
    [slots, H, I]; then, of FP8 in blocks, the scales of both. None if it has none of these
    names."""
    found = own_parameters(layer)
    weights, scales = (
        [found[name] for name in names if name in found]
        for names in (
            ("w13_weight", "w2_weight"),
            ("w13_weight_scale_inv", "w2_weight_scale_inv"),
        )
    )
    if len(weights) < 2:
        return None
    return (*weights, *scales) if len(scales) == 2 else tuple(weights)


def parameter_name(layer: Any, param: Any) -> str:
    """The name of a parameter in an engine's layer; "" for one that is not the layer's."""
    return next((name for name, one in own_parameters(layer).items() if one is param), "")


def loaded_parameters(layer: Any) -> list[str]:
    """The names of an engine's tensors of experts that its loader has to fill."""
    return [name for name, one in own_parameters(layer).items() if hasattr(one, "weight_loader")]


def own_parameters(layer: Any) -> dict[str, Any]:
    """An engine's tensors of experts, by name."""
    return dict(layer.named_parameters(recurse=False))


def refuse_class(
    classes: list[str], options: KTOptions, engine: str, logger: logging.Logger
) -> None:
    """OptionError if a model class is not tested, unless --kt-allow-untested is given. Warns if its
    MoE layers alone are.

    engine: its name, as its users write it.
    """
    served, layers = models_tested_in(engine), layers_tested_in(engine)
    tested = sorted({*served, *layers})
    if alone := [name for name in classes if name in layers and name not in served]:
        logger.warning(
            "kt: %s was tested in %s by its MoE layers alone; kt model check MODEL compares a "
            "whole small model",
            ", ".join(alone),
            engine,
        )
    if not options.allow_untested and not set(classes) <= set(tested):
        raise OptionError(
            f"model class {', '.join(classes)} was not tested with kt-moe in {engine}; tested: "
            f"{', '.join(tested)}; check it with kt model check MODEL, or add --kt-allow-untested "
            "to serve it anyway"
        )


def models_tested_in(engine: str) -> list[str]:
    """The model classes that were tested in an engine, sorted."""
    return sorted(TESTED_MODELS[engine])


def layers_tested_in(engine: str) -> list[str]:
    """The model classes whose MoE layers alone were tested in an engine, sorted."""
    return sorted(TESTED_LAYERS[engine])
