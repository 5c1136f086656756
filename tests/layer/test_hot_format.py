"""--kt-hot-format: what is chosen for a model, a method and a device, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_kernel.serving.hot_format import decide_hot_format
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions

HOT = {"num_gpu_experts": 2}


def decide(
    given: str,
    quantisation: str | None,
    method: str,
    device: str = "cuda",
    own_loading: bool = False,
    plain: bool = True,
    ordered: bool = False,
) -> str:
    """The format, or the error."""
    options = KTOptions(method=method, num_gpu_experts=2, hot_format=given)
    checkpoint: Any = SimpleNamespace(in_activation_order=ordered, unconvertible="")
    try:
        return decide_hot_format(
            options, quantisation, device, checkpoint, own_loading, plain
        ).hot_format
    except OptionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("quantisation", "method", "on_gpu", "on_cpu"),
    [
        (None, "INT4_G32", "engine", "engine"),
        ("", "BF16", "engine", "engine"),
        ("fp8", "FP8", "engine", "bf16"),
        ("fp8", "INT4_G32", "engine", "bf16"),
        ("compressed-tensors", "RAWINT4", "packed", "bf16"),
        ("gptq_marlin", "GPTQ_INT4", "packed", "bf16"),
        ("awq", "AWQ_INT4", "packed", "bf16"),
        ("compressed-tensors", "FP8_PERCHANNEL", "bf16", "bf16"),
        ("compressed-tensors", "AMXINT8", "bf16", "bf16"),
        ("mxfp4", "MXFP4", "bf16", "bf16"),
        ("modelopt_fp4", "NVFP4", "bf16", "bf16"),
        ("gptq", "MIXED", "bf16", "bf16"),
        ("awq", "INT4_G128", "packed", "bf16"),
    ],
)
def test_choice(quantisation: str | None, method: str, on_gpu: str, on_cpu: str) -> None:
    assert decide("auto", quantisation, method) == on_gpu
    assert decide("auto", quantisation, method, "cpu") == on_cpu
    wanted = "bf16" if quantisation else "engine"  # the engine's unquantised weights have 16 bits
    assert decide("bf16", quantisation, method) == wanted


def test_columns_in_the_order_of_activations_are_not_packed() -> None:
    assert decide("auto", "gptq", "GPTQ_INT4", ordered=True) == "bf16"
    assert "(act-order)" in decide("packed", "gptq", "GPTQ_INT4", ordered=True)
    assert decide("auto", "compressed-tensors", "RAWINT4", ordered=True) == "bf16"


def test_what_the_kernels_for_packed_experts_do_not_compute() -> None:
    """It is not packed by default, and refused if asked for."""
    for quantisation, method in (("awq", "AWQ_INT4"), ("compressed-tensors", "RAWINT4")):
        assert decide("auto", quantisation, method, plain=False) == "bf16"
    for method in ("AWQ_INT4", "INT4_G32"):
        error = decide("packed", "awq", method, plain=False)
        assert error.startswith("--kt-hot-format packed: the engines' kernels for packed weights")
        assert error.endswith("compute something else; accepted: auto, bf16")


@pytest.mark.parametrize(
    ("given", "quantisation", "method", "device", "line"),
    [
        ("engine", "awq", "AWQ_INT4", "cuda", "engine: the model is quantised with awq"),
        ("packed", None, "INT4_G32", "cpu", "packed: the engines' kernels for packed weights"),
        ("packed", None, "AMXINT4", "cuda", "packed: method AMXINT4 has no form that the engines'"),
        ("packed", "mxfp4", "MXFP4", "cuda", "packed: the experts are stored as MXFP4, not"),
    ],
)
def test_refused(given: str, quantisation: str, method: str, device: str, line: str) -> None:
    error = decide(given, quantisation, method, device)
    assert error.startswith(f"--kt-hot-format {line}") and "; accepted: " in error


def test_experts_that_the_engine_loads_in_its_own_way() -> None:
    """They are read by kt-moe, in 16 bits unless the model or the option has fewer."""
    for quantisation, method, on_gpu in (
        (None, "INT4_G32", "bf16"),
        ("fp8", "FP8", "bf16"),
        ("gptq_marlin", "GPTQ_INT4", "packed"),
    ):
        assert decide("auto", quantisation, method, own_loading=True) == on_gpu
        assert decide("auto", quantisation, method, "cpu", own_loading=True) == "bf16"
        assert decide("bf16", quantisation, method, own_loading=True) == "bf16"
    assert decide("packed", None, "INT4_G32", own_loading=True) == "packed"
    error = decide("engine", None, "BF16", own_loading=True)
    assert error.startswith("--kt-hot-format engine: the engine loads the experts of this class")


def test_packed_for_a_method_that_quantises() -> None:
    assert decide("packed", "compressed-tensors", "AMXINT8") == "packed"
    assert decide("packed", None, "INT4_G32") == decide("packed", "fp8", "INT4_G128") == "packed"


def test_without_hot_experts(tmp_path: Path) -> None:
    assert decide_hot_format(KTOptions(method="AWQ_INT4"), "awq", "cuda", None).hot_format == "auto"
    for given in ("bf16", "packed", "engine"):
        with pytest.raises(OptionError, match=f"--kt-hot-format {given}: no expert is hot; add"):
            KTOptions.from_mapping({"hot_format": given})
    with pytest.raises(OptionError, match="--kt-hot-format int4: unknown; accepted: auto, engine"):
        KTOptions.from_mapping(HOT | {"hot_format": "int4"})
    options = KTOptions.from_mapping(HOT | {"hot_format": "packed"})
    assert KTOptions.from_mapping(options.to_mapping()) == options
    assert "hot experts per layer 2, uniform, packed, " in options.describe()
