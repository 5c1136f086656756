"""Experts that do not fit into the machine's memory are refused before they are loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kt_kernel
from kt_kernel.runtime.pools import get_team, plan_pools
from kt_kernel.runtime.variant import kernel_table, native
from kt_kernel.serving import memory
from kt_kernel.serving.memory import expert_bytes
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.weights.formats import LayerForm, WeightForm, WeightFormat, all_formats

DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
SERVED = ServedModel(str(DEMO_MODEL))
LAYERS, EXPERTS, WEIGHTS = 8, 16, 3 * 256 * 128  # of the demo model
GB = 1 << 30


@pytest.mark.parametrize("format", all_formats(), ids=lambda one: one.name)
@pytest.mark.parametrize("gated", [True, False])
def test_bytes_of_an_expert(format: WeightFormat, gated: bool) -> None:
    """The formula against the compiled layer, also for sizes that are not multiples of tiles."""
    unit = format.column_unit
    hidden, inter = max(unit, 96), max(unit, 160)
    for scale_type in range(3 if format.grouped else 1):
        form = WeightForm(format, 32 if format.grouped else 0, scale_type)
        layer = native().MoeLayer(
            get_team(plan_pools(1, 1, None)),
            num_experts=3,
            top_k=1,
            hidden_size=hidden,
            intermediate_size=inter,
            forms=[form.core] * 3,
            cpu_slots=[True] * 3,
            max_tokens=1,
            table=kernel_table(),
            kind=0,
            gated=gated,
            swiglu_limit=0.0,
            swiglu_alpha=0.0,
        )
        assert layer.packed_bytes == 3 * expert_bytes(LayerForm.same(form), hidden, inter, gated)


def check(monkeypatch: pytest.MonkeyPatch, most: int, free: int, **options: Any) -> KTOptions:
    monkeypatch.setattr(memory, "most_memory", lambda: most)
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    given = KTOptions.from_mapping(options)
    return prepare(given, SimpleNamespace(**CONFIG), SERVED, logging.getLogger("kt.test"))


@pytest.mark.parametrize("path", [{}, {"weight_path": str(DEMO_MODEL)}])
@pytest.mark.parametrize(
    ("options", "cold"),
    [
        ({}, EXPERTS),
        ({"num_gpu_experts": 4}, EXPERTS - 4),
        ({"num_gpu_experts": 4, "enable_dynamic_expert_update": "on"}, EXPERTS),
    ],
)
def test_too_little(
    options: dict[str, Any],
    cold: int,
    path: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    need = LAYERS * cold * WEIGHTS * 2
    given: dict[str, Any] = {"method": "BF16"} | options | path
    with pytest.raises(OptionError) as error:
        check(monkeypatch, need - 1, need - 1, **given)
    assert str(error.value).startswith(f"{LAYERS * cold} experts on the CPU take {need >> 20}")
    assert "of memory as BF16, and this machine" in str(error.value)
    caplog.clear()
    check(monkeypatch, need, need, **given)
    assert not [line for line in caplog.messages if "memory" in line]
    check(monkeypatch, need, need - 1, **given)
    (line,) = [line for line in caplog.messages if "memory" in line]
    assert line.startswith("kt: ") and "are free now" in line


def test_layers_that_nobody_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last layer was, which has 16 bits where the others have 4: nothing that fits is
    refused."""
    config = SimpleNamespace(**CONFIG)
    monkeypatch.setattr(memory, "described_layers", lambda config: None)
    monkeypatch.setattr(memory, "available_memory", lambda: GB)
    options = KTOptions.from_mapping({"method": "BF16"})

    def checked(in_files: dict[int, int], most: int) -> None:
        monkeypatch.setattr(memory, "most_memory", lambda: most)
        memory.check_memory(options, config, in_files, list(range(LAYERS)), logging.getLogger())

    checked({0: 100, LAYERS - 1: 400}, EXPERTS * (100 * (LAYERS - 1) + 400))
    with pytest.raises(OptionError, match=f"{LAYERS * EXPERTS} experts on the CPU"):
        checked({0: 100, LAYERS - 1: 400}, EXPERTS * (100 * (LAYERS - 1) + 400) - 1)


def test_all_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, 0, 0, num_gpu_experts=EXPERTS)


def test_a_record_of_routes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = {"record_kt_expert_routes": str(tmp_path / "routes")}
    check(monkeypatch, GB, GB, expert_routes_tokens=10**7, **record)
    with pytest.raises(OptionError, match="--kt-expert-routes-tokens 100000000: their routes take"):
        check(monkeypatch, GB, GB, expert_routes_tokens=10**8, **record)
