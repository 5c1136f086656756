"""vLLM plugin: where the options are kept, and which configurations are refused.

The options travel in ``additional_config["kt"]``: from the --kt-* flags, from Python (``LLM(...,
additional_config={"kt": {...}})``), or from the environment variable KT_CONFIG. An empty mapping
counts as given: all options have their defaults. Without options, vLLM runs unchanged.
"""

import logging
from typing import Any

from kt_kernel.runtime.gpu import gpu_memory_from_outside
from kt_kernel.serving.model_config import has_experts
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.own_loading import loads_in_its_own_way
from kt_kernel.serving.tuned import Start

from ..common import choose, refuse_class, refuse_streaming
from .contract import CONTRACT
from .settings_contract import REFUSED_DRAFT, REFUSED_SPECULATION, REFUSED_WITH_RANKS

CONFIG_KEY = "kt"

logger = logging.getLogger("vllm.kt")


def options_of(vllm_config: Any) -> KTOptions | None:
    """The options of an engine, checked; None if there are none and vLLM should run unchanged.

    vllm_config: anything with vLLM's ``additional_config``, such as its engine arguments.
    """
    additional = vllm_config.additional_config
    given = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    return None if given is None else KTOptions.from_mapping(given)


def take_environment(engine_args: Any) -> None:
    """Uses the options in KT_CONFIG; if options were given in another way, only logs a warning."""
    additional = engine_args.additional_config
    present = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    options = choose(present, logger)
    if present is None and options is not None:
        merge(engine_args, options.to_mapping())


def merge(engine_args: Any, given: dict[str, Any] | None) -> None:
    """Puts given options, checked, into the engine arguments' additional_config."""
    if given is None:
        return
    additional = engine_args.additional_config
    if not isinstance(additional, dict):
        raise OptionError(
            f"additional_config is a {type(additional).__name__}; kt options need a dict"
        )
    present = additional.get(CONFIG_KEY)
    if present is not None:
        raise OptionError(
            "kt options were given as flags and in additional_config; give them in one place"
        )
    # A copy: additional_config's default is shared between instances.
    options = KTOptions.from_mapping(given)
    engine_args.additional_config = {**additional, CONFIG_KEY: options.to_mapping()}


def prepared(config: Any, options: KTOptions) -> KTOptions:
    """The options as the workers need them: see `kt_kernel.serving.preflight.prepare`.

    Raises OptionError, one line, if the engine's configuration is not supported.
    """
    from kt_kernel.serving.preflight import ServedModel, prepare

    model = config.model_config
    classes = list(model.architectures or [])
    refuse_class(classes, options, CONTRACT.engine, logger)
    CONTRACT.refuse(config)
    ranks = config.parallel_config.tensor_parallel_size
    if ranks > 1:
        CONTRACT.refuse(config, REFUSED_WITH_RANKS)
    speculative = config.speculative_config
    if speculative is not None:
        CONTRACT.refuse(config, REFUSED_SPECULATION)
        # Without a draft model, with n-grams, vLLM has the served one's configuration there.
        if speculative.method != "ngram" and has_experts(
            speculative.draft_model_config.hf_text_config
        ):
            CONTRACT.refuse(config, REFUSED_DRAFT)
    device = config.device_config.device_type
    refuse_streaming(device, options)
    served = ServedModel(
        model.model,
        model.quantization,
        model.revision,
        config.load_config.download_dir,
        device,
        ranks,
        model.dtype.itemsize,
        start=_start(config),
        whole=model.hf_config,
        own_loading=loads_in_its_own_way(CONTRACT.package, classes),
    )
    return prepare(options, model.hf_text_config, served, logger)


def _start(config: Any) -> Start:
    """What decides whether saved hot experts fit."""
    speculative, cache = config.speculative_config, config.cache_config
    beside = ""
    if speculative is not None and speculative.method != "ngram":
        beside = "--speculative-config"
    elif cache.kv_cache_memory_bytes is not None:
        beside = "--kv-cache-memory-bytes"
    return Start(
        "vllm",
        config.model_config.max_model_len,
        cache.gpu_memory_utilization,
        beside,
        gpu_memory_from_outside,
    )
