"""Whether experts can move is decided before anything is loaded."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kt_kernel.serving.moving import decide_moving
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions

E = 8
CONFIG = SimpleNamespace(
    num_experts=E,
    num_experts_per_tok=2,
    hidden_size=64,
    moe_intermediate_size=96,
    num_hidden_layers=2,
)
GIVEN = {"method": "INT4_G32", "num_gpu_experts": 2, "hot_format": "engine"}
RATIO = {"num_gpu_experts": None, "gpu_experts_ratio": 1.0}


def decide(switch: str, given: dict[str, Any], **engine: Any) -> KTOptions:
    options = KTOptions.from_mapping(
        GIVEN | given | {"enable_dynamic_expert_update": switch, "expert_update_rate": "8GB"}
    )
    facts = {"device": "cuda", "ranks": 1, "quantisation": None} | engine
    return decide_moving(options, CONFIG, logger=logging.getLogger("kt.test"), **facts)


CASES = [
    ({}, {"ranks": 2}, "tensor parallelism is not supported (2 ranks)"),
    ({}, {"device": "xpu"}, "the engine's device is xpu; accepted: cuda, cpu"),
    ({}, {"quantisation": "fp8"}, "with fp8, and the CPU those of method INT4_G32, which"),
    (
        {"hot_format": "packed", "method": "AWQ_INT4", "weight_path": "org/name"},
        {"quantisation": "awq"},
        "packed hot experts of method AWQ_INT4 have zero points",
    ),
    (RATIO, {}, "no layer has both hot and cold experts with --kt-gpu-experts-ratio 1.0"),
    ({"num_gpu_experts": E}, {}, "no layer has both hot and cold experts"),
]


@pytest.mark.parametrize(("given", "engine", "why"), CASES)
def test_impossible(
    given: dict[str, Any], engine: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`AUTO` becomes off, so that the CPU does not keep hot experts; the log says why."""
    with pytest.raises(OptionError) as error:
        decide("on", given, **engine)
    assert str(error.value).startswith("--kt-enable-dynamic-expert-update on: ")
    assert why in str(error.value)
    _is_off(given, engine, why, caplog)


def _is_off(
    given: dict[str, Any], engine: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kt.test"):
        options = decide("auto", given, **engine)
    assert not options.moves_experts and "experts move" not in options.describe()
    assert KTOptions.from_mapping(options.to_mapping()) == options  # as the workers do
    (line,) = caplog.messages
    assert line.startswith("kt: experts do not move while serving: ") and why in line


def test_kernels_of_one_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KT_KERNEL_KIND", "vector")
    with pytest.raises(OptionError, match="on: with KT_KERNEL_KIND"):
        decide("on", {})
    _is_off({}, {}, "with KT_KERNEL_KIND", caplog)


def test_an_adapter(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match="on and --kt-expert-lora-path org/name: not supported"):
        decide("on", {"expert_lora_path": "org/name"})
    _is_off({"expert_lora_path": "org/name"}, {}, "--kt-expert-lora-path org/name", caplog)


@pytest.mark.parametrize("switch", ["on", "auto"])
def test_possible(switch: str) -> None:
    """Packed hot experts, and those of a quantised model, too, if kt-moe fills them in."""
    assert decide(switch, {}, device="cpu").enable_dynamic_expert_update == switch
    of_blocks = {"method": "FP8", "weight_path": "org/name"}
    assert decide(switch, of_blocks, quantisation="fp8").enable_dynamic_expert_update == switch
    for given in ({"hot_format": "bf16"}, {"hot_format": "packed"}):
        options = decide(switch, given, quantisation="compressed-tensors")
        assert options.enable_dynamic_expert_update == switch


def test_off_stays_off() -> None:
    options = KTOptions.from_mapping(GIVEN)
    facts = {"device": "cuda", "ranks": 8, "quantisation": "fp8"}
    assert decide_moving(options, CONFIG, logger=logging.getLogger(), **facts) is options
