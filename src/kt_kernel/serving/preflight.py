"""Fills in options that were not given, and checks all of them before an engine loads anything.

Checks that would otherwise fail in a worker, with a traceback, are made here, and fail with one
line that names the option. Independent of the engines: the configuration is any object with the
attributes of a Hugging Face ``config.json``.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint import Checkpoint, method_of, open_checkpoint
from ..checkpoint.method import QUANTISE, Choice
from ..moe.settings import check_settings, check_sizes
from ..moe.weight_checks import DENSE_FORM
from ..weights.formats import LayerForm
from ..weights.methods import get_method
from .adapter import FLAG as ADAPTER_FLAG
from .adapter import MERGING_METHODS, open_adapter
from .budget import with_ratio
from .hot_format import decide_hot_format
from .hub import Choose, choose_adapter, local_path
from .memory import check_memory, expert_bytes
from .model_config import (
    described_layers,
    expert_sizes,
    has_gate,
    moe_layers,
    num_experts,
    number_of_layers,
    plain_swiglu,
    size_of,
)
from .moving import decide_moving
from .option_table import AUTO, OptionError
from .options import KTOptions
from .placement import plan_placement
from .repository import Repository
from .tuned import Start, with_tuned, without_tuned

_logger = logging.getLogger(__name__)
_ANY_SIZE = 1024  # stands for a size that the configuration lacks: every method accepts it
_ANY_METHOD = "BF16"  # stands for an undecided method: it accepts any size
# The checks' name of a value, and the option that it came from.
_FLAGS = {
    "threadpool_count": "threadpool_count",
    "cpuinfer_threads": "cpuinfer",
    "max_deferred_experts_per_token": "max_deferred_experts_per_token",
    "method": "method",
    "weight_path": "weight_path",
    "hidden_size": "method",  # a size that does not fit the method's groups
    "moe_intermediate_size": "method",
}


@dataclass(frozen=True)
class ServedModel:
    """The model that an engine serves.

    Attributes:
        path: folder or repository, as given to the engine.
        quantisation: the engine's name of the model's quantisation; None or "" for 16- and 32-bit
            weights.
        revision: of a repository; None: its main branch.
        cache_dir: where the engine keeps repositories; None: the hub's cache.
        device: the engine's type of device, "cuda" or "cpu".
        ranks: of tensor parallelism; each holds a part of every hot expert.
        value_bytes: of a value of the engine's dtype.
        fixed_results: whether the user asked the engine for results that do not depend on batches.
        start: what decides whether hot experts that `kt tune` saved fit; None: unknown.
        whole: a multimodal model's configuration, of which the language model's is a part; None: it
            is no part.
        own_loading: whether the engine's class writes experts to its tensors by itself, so that
            kt-moe has to read all of them.
    """

    path: str
    quantisation: str | None = None
    revision: str | None = None
    cache_dir: str | None = None
    device: str = "cuda"
    ranks: int = 1
    value_bytes: int = 2
    fixed_results: bool = False
    start: Start | None = None
    whole: Any = None
    own_loading: bool = False


def prepare(
    options: KTOptions, config: Any, served: ServedModel, logger: logging.Logger = _logger
) -> KTOptions:
    """Returns the options as the workers need them: with a method, with a format of hot experts,
    with local files or folders as paths, and as `moving.decide_moving` and `memory.check_memory`
    accept them.

    Options that were not given may come from what `kt tune` saved, see `tuned`. If they do not suit
    the model and the given ones, they are left out.

    Without a weight path, the cold experts of a quantised model are read from the served model's
    files, because our readers cannot use the single tensors that engines deliver. So are all
    experts of a class that the engine loads in its own way. Only file headers are read. A
    repository that is not in the cache is downloaded after everything else was checked.

    Args:
        config: the language model's configuration. It must have the number of experts. If it has
            another size under an unusual name, the layers check what depends on that size.
        logger: gets what the user should know, such as that memory is scarce.

    Raises:
        OptionError: one line, if this model, its weights or this machine do not support the
            options.
    """
    options = _absolute(options)
    tuned = with_tuned(
        options, config, served.device, served.fixed_results, served.start, served.whole
    )
    try:
        return _checked(tuned, config, served, logger)
    except OptionError as problem:
        if tuned == options:  # nothing was taken
            raise
        return _checked(without_tuned(options, problem), config, served, logger)


def _checked(
    options: KTOptions, config: Any, served: ServedModel, logger: logging.Logger
) -> KTOptions:
    """See `prepare`."""
    options, checkpoint, sizes = _with_weights(options, config, served)
    options = decide_hot_format(
        options,
        served.quantisation,
        served.device,
        checkpoint,
        served.own_loading,
        plain_swiglu(config),
    )
    options = with_ratio(options, config, checkpoint, served.ranks, served.value_bytes)
    options = decide_moving(
        options,
        config,
        device=served.device,
        ranks=served.ranks,
        quantisation=served.quantisation,
        logger=logger,
    )
    layers = [] if checkpoint is None else checkpoint.layers()
    check_memory(options, config, sizes, layers, logger)
    return options


def _with_weights(
    options: KTOptions, config: Any, served: ServedModel
) -> tuple[KTOptions, Checkpoint | None, dict[int, int]]:
    """The options with a method and local paths; the files that kt-moe reads, if it does; and the
    packed bytes of an expert of each layer that was checked there."""
    plan_placement(options, config)
    _check_settings(options, config)
    if options.expert_lora_path is not None:
        options = _with_adapter(options, config, served)
    given = options.weight_path
    if given is None and not served.quantisation and not served.own_loading:
        return _prepared(options, config, QUANTISE), None, {}
    place = f"--kt-weight-path {given}"
    if given is None:
        place = f"served model {served.path}"
        place += f", quantised with {served.quantisation}" if served.quantisation else ""
    with _naming(place):
        path = _local(given or served.path, served)
        checkpoint = open_checkpoint(path)
        if given is None and served.quantisation:
            _refuse_quantising_engine(checkpoint)
        # The model's own layers may be followed by layers that predict several tokens.
        count = number_of_layers(config)
        choice = QUANTISE
        if options.method == AUTO:
            choice = method_of(checkpoint, None if count is None else range(count))
    options = _prepared(replace(options, weight_path=path), config, choice)
    _refuse_kept_values(options)
    with _naming(place):
        return options, checkpoint, _check_weights(checkpoint, config, options)


def _absolute(options: KTOptions) -> KTOptions:
    """The options with absolute paths of files, because workers may have another folder."""
    names = (
        "gpu_experts_mask",
        "expert_stats",
        "record_kt_gpu_expert_distribution",
        "record_kt_expert_routes",
    )
    given = {name: getattr(options, name) for name in names}
    return replace(
        options, **{name: os.path.abspath(path) for name, path in given.items() if path is not None}
    )


def _refuse_quantising_engine(checkpoint: Checkpoint) -> None:
    """Raises ValueError if the engine quantises a model whose files are not quantised.

    Settings may also be in a file of the quantiser (hf_quant_config.json), so the tensors count,
    too.
    """
    layers = checkpoint.layers()
    if not checkpoint.quantization.settings and (
        not layers or all(checkpoint.stored(layer).dense for layer in layers)
    ):
        raise ValueError(
            f"{checkpoint.path} is not quantised, and kt-moe does not support experts that the "
            "engine quantises while loading; remove --quantization, or serve a quantised model"
        )


def _with_adapter(options: KTOptions, config: Any, served: ServedModel) -> KTOptions:
    """The options with the local folder of the adapter, which was checked against the model."""
    assert options.expert_lora_path is not None
    if not has_gate(config):
        raise OptionError(
            f"{ADAPTER_FLAG} {options.expert_lora_path}: an adapter cannot be merged into experts "
            "without a gate; remove it, and merge it into the checkpoint"
        )
    if served.quantisation and plan_placement(options, config).some_hot:
        raise OptionError(
            f"{ADAPTER_FLAG} with {options.hot_option}: the served model is quantised with "
            f"{served.quantisation}, and an adapter cannot be merged into the engine's quantised "
            "experts; accepted: --kt-num-gpu-experts 0, or the 16-bit model"
        )
    _refuse_kept_values(options)
    with _naming(f"{ADAPTER_FLAG} {options.expert_lora_path}"):
        path = _local(options.expert_lora_path, served, choose_adapter)
        adapter = open_adapter(path)
        adapter.check_sizes(num_experts(config), *expert_sizes(config))
        count, layers = number_of_layers(config), described_layers(config)
        if layers is not None:
            adapter.check_layers(layers)
        elif count is not None and max(adapter.layers) >= count:
            raise ValueError(
                f"it changes experts of layer {max(adapter.layers)}; the model has {count} layers; "
                "the adapter belongs to another model"
            )
        adapter.check_values()
    return replace(options, expert_lora_path=path)


def _refuse_kept_values(options: KTOptions) -> None:
    """Raises OptionError for an adapter with a method that keeps quantised weights as they are."""
    if options.expert_lora_path is None or options.method == AUTO:
        return
    if get_method(options.method).quantised:
        selected = f", selected for {options.reason}," if options.reason else ""
        raise OptionError(
            f"{ADAPTER_FLAG}: method {options.method}{selected} keeps the checkpoint's quantised "
            "values, and rounding to them again would lose the adapter; accepted: --kt-method "
            + ", ".join(MERGING_METHODS)
        )


def _prepared(options: KTOptions, config: Any, choice: Choice) -> KTOptions:
    """The options with a method: the one that was given, or the choice."""
    if options.method != AUTO:
        if get_method(options.method).quantised and options.weight_path is None:
            raise OptionError(
                f"--kt-method {options.method} needs quantised weights, but the served model is "
                "not quantised; name a quantised checkpoint with --kt-weight-path"
            )
        return options
    hidden, inter = expert_sizes(config)
    try:
        check_sizes(
            get_method(choice.method), choice.method, hidden or _ANY_SIZE, inter or _ANY_SIZE
        )
    except ValueError as error:
        raise OptionError(
            f"--kt-method {choice.method} (selected for {choice.reason}): {error}"
        ) from error
    return replace(options, method=choice.method, reason=choice.reason)


def _local(text: str, served: ServedModel, choose: Choose | None = None) -> str:
    """The file or folder that a user or an engine named. ValueError if there is none."""
    if os.path.exists(text):
        return os.path.abspath(text)
    repository = Repository.parse(text)
    if repository is None:
        raise ValueError("no such file or folder, and not a repository name (org/name)")
    if repository.name == served.path and repository.revision is None:
        repository = replace(repository, revision=served.revision)
    return local_path(repository, served.cache_dir, choose)


def _check_settings(options: KTOptions, config: Any) -> None:
    """Raises OptionError, one line, for values that this model or this machine does not support.
    Checks that depend on the method are skipped for `AUTO`."""
    from ..device.engine import watchdog_seconds  # the first batch on a GPU reads it

    experts = num_experts(config)
    hidden, inter = expert_sizes(config)
    try:
        watchdog_seconds()
        check_settings(
            layer_idx=0,
            num_experts=experts,
            num_experts_per_tok=size_of(config, "num_experts_per_tok") or 1,
            hidden_size=hidden or _ANY_SIZE,
            moe_intermediate_size=inter or _ANY_SIZE,
            cpuinfer_threads=options.cpuinfer,
            threadpool_count=options.threadpool_count,
            weight_path=options.weight_path,
            max_deferred_experts_per_token=options.max_deferred_experts_per_token,
            method=_ANY_METHOD if options.method == AUTO else options.method,
        )
    except (ImportError, OSError, TypeError, ValueError) as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        option = _FLAGS.get(name)
        if option is None:  # the message names an environment variable or the model's number
            raise OptionError(str(error)) from error
        flag = "--kt-" + option.replace("_", "-")
        raise OptionError(f"{flag} {getattr(options, option)}: {error}") from error


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Turns errors of readers inside the block into OptionErrors that begin with `place`."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"{place}: {error}") from error


def _check_weights(checkpoint: Checkpoint, config: Any, options: KTOptions) -> dict[int, int]:
    """Checks names, shapes and dtypes of all experts of the model's layers, whether the method
    reads them, and whether an adapter can be merged. Raises what the readers raise.

    Returns the packed bytes of an expert, by layer.
    """
    experts = num_experts(config)
    hidden, inter = expert_sizes(config)
    packed = {}
    for layer in moe_layers(config):
        _, found_hidden, found_inter = checkpoint.sizes(layer)
        sizes = experts, hidden or found_hidden, inter or found_inter
        with checkpoint.each_expert(layer, *sizes, (), options.method) as stream:
            if options.expert_lora_path is not None and stream.form is not None:
                raise ValueError(
                    f"layer {layer} is stored in {stream.form}, and an adapter can be merged into "
                    "16-bit, 32-bit and FP8 weights only; merge it before they are converted, with "
                    "kt_kernel.sft.merge_adapter"
                )
            form = stream.form or get_method(options.method).layer_form
            packed[layer] = expert_bytes(
                form or LayerForm.same(DENSE_FORM), *sizes[1:], "gate" in stream.fields
            )
    return packed
