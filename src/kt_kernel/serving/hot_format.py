"""Decides how the weights of hot experts are stored on the engine's device: --kt-hot-format."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint import Checkpoint
from ..weights.formats import INT4_GROUP, INT4_ZERO
from ..weights.methods import get_method
from .option_table import AUTO, BF16, ENGINE, PACKED, OptionError
from .options import KTOptions

#: Engines' names of quantisations whose own kernels compute hot experts.
ENGINES_OWN = ("fp8",)
# Methods that quantise to groups of 4-bit integers, or to rows of 8-bit ones.
_QUANTISING = ("INT4_G32", "INT4_G128", "AMXINT8", "MOE_INT8")
_INTEGERS = (INT4_GROUP, INT4_ZERO)


def decide_hot_format(
    options: KTOptions,
    quantisation: str | None,
    device: str,
    checkpoint: Checkpoint | None,
    own_loading: bool = False,
    plain: bool = True,
) -> KTOptions:
    """The options with the format of hot experts: the one that was given, or the choice.

    Args:
        options: with the method.
        quantisation: the engine's name of the served model's; None or "" for none.
        device: the engine's type of device, "cpu" or "cuda".
        checkpoint: the files of the experts, if kt-moe reads them.
        own_loading: whether the engine's class writes experts to its tensors by itself, so that
            kt-moe has to read them.
        plain: whether experts compute plain SwiGLU, see `model_config.plain_swiglu`.

    Raises:
        OptionError: the given format does not fit the model, the method, the device or the files.
    """
    if options.hot_option is None:
        return options
    problem = _why_not_packed(options, device, checkpoint, plain)
    decided = _decided(options, quantisation, device, own_loading, problem)
    # The engine delivers the hot experts of a 16-bit model if the files have no readable values.
    if checkpoint is None or decided.hot_format == ENGINE:
        return decided
    if not quantisation and not own_loading:
        return decided
    if form := checkpoint.unconvertible:
        own = quantisation in ENGINES_OWN and device != "cpu" and not own_loading
        model = f"a model quantised with {quantisation}" if quantisation else "this class of models"
        raise OptionError(
            f"{options.hot_option} with --kt-hot-format {options.hot_format}: the engine cannot "
            f"deliver the hot experts of {model}, and those in --kt-weight-path "
            f"{options.weight_path} are stored as {form}, from which hot experts cannot be "
            f"converted; accepted: {f'--kt-hot-format {ENGINE}, ' if own else ''}"
            "--kt-num-gpu-experts 0, or no --kt-weight-path"
        )
    return decided


def _decided(
    options: KTOptions,
    quantisation: str | None,
    device: str,
    own_loading: bool,
    not_packed: str,
) -> KTOptions:
    """not_packed: why hot experts cannot be packed; "" if they can."""
    given = options.hot_format
    own = (not quantisation or quantisation in ENGINES_OWN) and not own_loading
    if given == ENGINE and own_loading:
        raise OptionError(
            f"--kt-hot-format {ENGINE}: the engine loads the experts of this class in its own way, "
            f"which leaves no place for cold ones; accepted: {AUTO}, {BF16}, {PACKED}"
        )
    if given == ENGINE and not own:
        raise OptionError(
            f"--kt-hot-format {ENGINE}: the model is quantised with {quantisation}; the engine's "
            f"own kernels were tested for 16-bit weights and {', '.join(ENGINES_OWN)} only; "
            f"accepted: {AUTO}, {BF16}, {PACKED}"
        )
    if given == PACKED and not_packed:
        raise OptionError(f"--kt-hot-format {PACKED}: {not_packed}; accepted: {AUTO}, {BF16}")
    if given == BF16 and own and not quantisation:
        return replace(options, hot_format=ENGINE)  # which loads 16-bit weights
    if given != AUTO:
        return options
    if own and (device != "cpu" or not quantisation):
        return replace(options, hot_format=ENGINE)
    # Packed rows of 8 bits save less, and must be asked for, as must fewer bits than the model has.
    four_bits = quantisation and get_method(options.method).format in _INTEGERS
    return replace(options, hot_format=PACKED if four_bits and not not_packed else BF16)


def _why_not_packed(
    options: KTOptions, device: str, checkpoint: Checkpoint | None, plain: bool
) -> str:
    """Why hot experts cannot be packed; "" if they can, as far as the configuration and the files'
    headers tell."""
    if device == "cpu":
        return "the engines' kernels for packed weights need a GPU"
    if not plain:
        return (
            "the engines' kernels for packed weights compute SiLU with a gate, without a limit and "
            "without biases, and the model's experts compute something else"
        )
    method = get_method(options.method)
    if not method.quantised:
        if method.name in _QUANTISING:
            return ""
        return (
            f"method {method.name} has no form that the engines' kernels read; RAWINT4, GPTQ_INT4, "
            f"AWQ_INT4, {', '.join(_QUANTISING[:-1])} and {_QUANTISING[-1]} have one"
        )
    if method.mixed or method.format not in _INTEGERS:
        return f"the experts are stored as {method.name}, not as groups of 4-bit integers"
    assert checkpoint is not None  # the method keeps what files hold
    if checkpoint.in_activation_order:
        return "columns of the experts are in the order of their activations (act-order)"
    return ""
