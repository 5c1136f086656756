"""Engines that start together, and measure their rates one at a time; for prompts_turns.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "STREAM_GATES"  # the folder of an engine's gates
LOADED, MEASURE, MEASURED, SERVE = "loaded", "measure", "measured", "serve"
_LOOK = 0.05  # seconds


def install(folder: Path) -> None:
    """From now on, a model whose weights are loaded writes the file LOADED, and waits for MEASURE.
    When its rates are known, it writes them to MEASURED, and waits for SERVE. Nothing is under way
    while it waits."""
    from prompts_more import rates_of

    from kt_kernel.serving import hybrid_model

    start = hybrid_model.start_streaming

    def between(layers: Sequence[Any], *given: Any) -> str | None:
        import torch

        if not layers:  # another rank computes them
            return start(layers, *given)
        _say(folder / LOADED, {"seconds": time.monotonic()})
        _wait(folder / MEASURE)
        line = start(layers, *given)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        _say(folder / MEASURED, {"line": line, "rates": rates_of(list(layers))})
        _wait(folder / SERVE)
        return line

    hybrid_model.start_streaming = between


def _say(path: Path, what: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what))
    os.rename(part, path)


def _wait(path: Path) -> None:
    while not path.exists():
        time.sleep(_LOOK)
