"""What both plugins do alike: registering without silence, choosing options, refusing."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from kt_kernel import _conflict
from kt_kernel.serving.options import (
    ENVIRONMENT_VARIABLE,
    KTOptions,
    OptionError,
    exit_with,
    from_environment,
)

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
QUANTISED_MODELS = ("fp8",)  # what a served model may be quantised with, as the engines name it
# Reasons for a refusal, of configurations and of requests to a running engine.
SINGLE_RANK = "kt-moe supports tensor parallelism only"
NO_EXCHANGE = "the cold experts' weights cannot be exchanged or put aside"
KEEPS_WEIGHTS = (
    "the cold experts' weights cannot be exchanged while the engine runs; restart it with the new "
    "weights"
)
KEEPS_MEMORY = "the cold experts' weights cannot be put aside; stop the engine and start it again"
NO_LORA = (
    "LoRA adapters are not supported together with kt options; merge the adapter into the "
    "checkpoint and restart the engine"
)
NO_SCALING = "the number of ranks cannot change together with kt options; restart the engine"
HOLDS_A_PART = (
    "the engine holds the hot experts only, and would write a checkpoint without the others"
)


class RequestRefused(ValueError):
    """A request to a running engine that the hybrid layer cannot do; the engine serves on."""


def install(engine: str, hooks: Callable[[], None], logger: logging.Logger) -> str:
    """Installs the hooks that a plugin needs before it knows the options.

    Returns why the hybrid layer cannot work, "" if it can; a start with kt options must end with
    that. An engine would log an exception and serve without us, so none is raised. If the hooks
    cannot be installed, nothing of ours sees the options later: when they are visible here, in the
    environment or on the command line, this raises SystemExit.

    engine: its name, for the log. hooks: installs them; any exception counts as a failure.
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


def refuse_quantised(quantisation: str | None) -> None:
    """OptionError for a quantised model whose hot experts need kernels that were not tried.

    quantisation: as the engine names it; None or "" for none.
    """
    if quantisation and quantisation not in QUANTISED_MODELS:
        raise OptionError(
            f"a model quantised with {quantisation}: the hot experts' kernels were not tried; "
            f"accepted: {', '.join(QUANTISED_MODELS)}, or the unquantised model with "
            "--kt-weight-path naming the quantised one"
        )
