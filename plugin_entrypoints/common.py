"""What both plugins do alike: registering without silence, choosing options, refusing."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from kt_kernel import _conflict
from kt_kernel.options import (
    ENVIRONMENT_VARIABLE,
    KTOptions,
    OptionError,
    exit_with,
    from_environment,
)

from .contract import Contract

# Model classes that the tests have seen in both engines: tests/plugin/test_model_classes.py on the
# CPU, or test_gpu_classes.py on a GPU, and Qwen3-MoE in the engines' own tests.
TESTED_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "PhiMoEForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
# Checkpoints whose weights reach our loaders one by one, as the tests have seen them.
LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "npcache")
QUANTISED_MODEL = "fp8"  # what a served model may be quantised with
SINGLE_RANK = "kt-moe supports tensor parallelism only"
NO_EXCHANGE = "the cold experts' weights cannot be exchanged or put aside"


def install(
    contract: Contract,
    layer: Callable[[], None],
    arguments: Callable[[], None],
    arguments_target: str,
    logger: logging.Logger,
) -> str:
    """Installs a plugin's hooks; returns why the hybrid layer cannot work, "" if it can.

    layer and arguments install the hooks on the model code and on the engine's arguments. Of any
    error: an engine would log it and serve without us, or not start although nobody asked for us.
    With the hooks on the arguments in place, a start with kt options is stopped there. Without
    them, it is stopped here, by SystemExit, when options can be seen from here.

    arguments_target: what the targets of the hooks on the engine's arguments begin with.
    """
    problem = ""
    reachable = True
    try:
        _conflict.check()
        absent = contract.lacks()
        if absent:
            reachable = not any(target.startswith(arguments_target) for target in absent)
            raise LookupError(
                f"this {contract.engine} lacks {', '.join(absent)}, which the plugin needs"
            )
        layer()
    except Exception as error:
        problem = _why("layer", error)
    if reachable:
        try:
            arguments()
        except Exception as error:
            problem, reachable = problem or _why("options", error), False
    if not reachable:
        if _conflict.options_visible():
            raise exit_with(OptionError(problem))
        logger.warning("kt: %s; %s runs without it", problem, contract.engine)
    return problem


def _why(what: str, error: Exception) -> str:
    return (
        f"the plugin's {what} cannot be installed ({type(error).__name__}: {error}); start without "
        "kt options, or use a tested version"
    )


def choose(given: Mapping[str, Any] | None, logger: logging.Logger) -> KTOptions | None:
    """The options given to the engine, or those in KT_CONFIG; None when there are neither.

    A KT_CONFIG that does not count is checked all the same, and a warning says if it differs.
    Raises OptionError.
    """
    environment = from_environment()
    fallback = None if environment is None else KTOptions.from_mapping(environment)
    if given is None:
        return fallback
    options = KTOptions.from_mapping(given)
    if fallback not in (None, options):
        logger.warning("kt: %s does not count beside the options given", ENVIRONMENT_VARIABLE)
    return options


def warn_of_trace(device: str, logger: logging.Logger) -> None:
    """Says that a trace that was asked for will not come: the engine's device is the CPU."""
    from kt_kernel.trace.writer import TRACE_VARIABLE

    if os.environ.get(TRACE_VARIABLE) and device == "cpu":
        logger.warning("kt: %s: only a GPU's batches are traced; no file is made", TRACE_VARIABLE)


def refuse_class(classes: list[str], options: KTOptions) -> None:
    """OptionError for a model class that is not tested, unless --kt-allow-untested is given."""
    if not options.allow_untested and not set(classes) <= set(TESTED_MODELS):
        raise OptionError(
            f"model class {', '.join(classes)}: not tested with kt-moe; tested: "
            f"{', '.join(TESTED_MODELS)}; --kt-allow-untested serves it all the same"
        )


def refuse_quantised(quantisation: str | None, options: KTOptions) -> None:
    """OptionError for a quantised model whose cold experts we cannot read: engines hand over single
    tensors, while our readers need the checkpoint."""
    if quantisation is None:
        return
    if quantisation != QUANTISED_MODEL:
        raise OptionError(
            f"a model quantised with {quantisation}: the hot experts' kernels were not tried; "
            f"accepted: {QUANTISED_MODEL}, or the unquantised model with --kt-weight-path naming "
            "the quantised one"
        )
    if options.weight_path is None:
        raise OptionError(
            f"a model quantised with {quantisation}: name its folder with --kt-weight-path too, "
            "from which the cold experts are read"
        )
