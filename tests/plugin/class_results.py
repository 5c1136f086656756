"""Keeps the results of served models: one line of JSON each, in the file that KT_RESULTS names.

`benchmarks/support.py` makes docs/support-table.md of them.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = os.environ.get("KT_RESULTS")
KEPT = Path(__file__).parents[2] / "benchmarks/results/served-models.jsonl"
PLAIN_EXPERTS = "16 bits"
MODEL, MOE_LAYER = "model", "MoE layer"  # parts that are compared
MISSING, OTHER_PLACES = "without the cold experts", "experts in other places"  # controls
_VERSIONS = """
import importlib.metadata as m, json
found = {}
for name in ("vllm", "sglang", "torch"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
import torch
found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print("FOUND" + json.dumps(found))
"""
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def classes_that_passed(engine: str, part: str) -> list[str]:
    """Those with a kept result of this part, in any version of the engine and on any device."""
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()]
    name = f"{_NAMES[engine]} "
    return sorted(
        {
            row["class"]
            for row in rows
            if row["engine"].startswith(name) and row.get("part", MODEL) == part
        }
    )


@functools.cache
def _versions(python: str) -> dict[str, str]:
    done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND"))


def keep(
    engine: str,
    python: str,
    model: str,
    near: torch.Tensor,
    far: torch.Tensor,
    stock: torch.Tensor | None = None,
    *,
    experts: str = PLAIN_EXPERTS,
    hot: int,
    of: int,
    hot_format: str = "engine",
    graphs: bool = False,
    control: str = MISSING,
    reference: str = "transformers",
    part: str = MODEL,
    stand_in: str | None = None,
) -> None:
    """Writes a line for a run that passed; nothing without KT_RESULTS.

    model: the class. near, far, stock: distances of log-probabilities from the reference's: ours,
    those of the control, and the stock engine's. experts: their format. control: what the control
    changes in the reference. reference: "transformers", in float32, or "stock", the stock engine.
    part: of a layer, distances are those of its outputs, relative to them. stand_in: what the test
    replaces in the engine.
    """
    if RESULTS is None:
        return
    found = _versions(python)
    row: dict[str, Any] = {
        "class": model,
        "engine": f"{_NAMES[engine]} {found[engine].partition('+')[0]}",
        "device": found["device"],
        "experts": experts,
        "hot": hot,
        "of": of,
        "hot format": hot_format if hot else None,
        "graphs": graphs,
        "median": _figure(near.median()),
        "mean": _figure(near.mean()),
        "stock": None if stock is None else _figure(stock.mean()),
        "control": _figure(far.mean()),
        "changed in the control": control,
        "reference": reference,
        "part": part,
        "stand-in": stand_in,
        "torch": found["torch"],
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with open(RESULTS, "a") as file:
        file.write(json.dumps(row) + "\n")


def _figure(value: torch.Tensor) -> float:
    return float(f"{value.item():.3g}")
