"""Shows operators that the CPU kernels are used: log lines, and counters in a file.

Engines run the model in a separate process that is often killed. A thread therefore publishes the
counters twice a second if they have changed.
"""

import json
import logging
import os
import threading
import time
import weakref

from ..runtime.background import start_thread
from ..runtime.files import write_output
from ..runtime.pools import log_crowding
from .hybrid_model import HybridModel

STATS_FILE_VARIABLE = "KT_STATS_FILE"  # counters are written to this file as JSON, atomically
LOOK_SECONDS = 0.5
LOG_SECONDS = 30.0

_models: "weakref.WeakSet[HybridModel]" = weakref.WeakSet()
_started_in: int | None = None
_warned_of: set[str] = set()  # files that could not be written


def watch(model: HybridModel, logger: logging.Logger) -> None:
    """Reports this loaded model's counters from now on, for as long as it exists. If another rank's
    process has the counters, only the description is logged."""
    global _started_in
    logger.info(model.describe())
    for number, line in enumerate(model.describe_loading()):
        logger.log(logging.DEBUG if number else logging.INFO, line)
    if model.elsewhere:
        return
    log_crowding(logger)
    _models.add(model)
    _publish(logger)
    if _started_in != os.getpid():  # threads do not survive a fork
        _started_in = os.getpid()
        ending = threading.Event()
        start_thread("kt-report", lambda: _run(logger, ending), ending.set)


def _run(logger: logging.Logger, ending: threading.Event) -> None:
    seen = logged = _calls()
    logged_at = 0.0
    while not ending.wait(LOOK_SECONDS):
        calls = _calls()
        if calls != seen:
            seen = calls
            _publish(logger)
        if calls != logged and time.monotonic() - logged_at >= LOG_SECONDS:
            logged, logged_at = calls, time.monotonic()
            logger.info("kt: %d expert calls on the CPU so far", calls)


def _calls() -> int:
    return sum(model.stats().get("expert_calls", 0) for model in list(_models))


def _publish(logger: logging.Logger) -> None:
    """Writes the counters. If the file cannot be written, logs a warning and goes on."""
    path = os.environ.get(STATS_FILE_VARIABLE)
    if not path:
        return
    try:
        _write(path)
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        if path not in _warned_of:
            _warned_of.add(path)
            logger.warning(
                "kt: %s %s: cannot write the counters: %s", STATS_FILE_VARIABLE, path, error
            )


def _write(path: str) -> None:
    models = [
        {
            "description": model.describe(),
            "layers": [
                {
                    "layer": layer.layer_idx,
                    "hot_experts": layer.current_placement.hot_experts,
                    "cold_experts": layer.current_placement.cold_experts,
                }
                for layer in model.layers
            ],
            **model.stats(),
        }
        for model in list(_models)
    ]
    write_output(path, json.dumps({"pid": os.getpid(), "models": models}), again=True)
