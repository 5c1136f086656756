"""Server commands of published models, with --kt-num-gpu-experts: both engines' parsers and our
checks before a start accept them, on tiny models with the same configurations."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import test_sglang
import test_vllm
from engines import HERE, TIMEOUT
from published_models import MODELS

from kt_kernel.plugin_entrypoints.common import models_tested_in

ENGINES = {"vllm": (test_vllm, "vLLM"), "sglang": (test_sglang, "SGLang")}
# What vLLM's image processors need, and its tested environment may lack.
LACKS = {("vllm", "Qwen3.5"): "No module named 'torchvision'"}
COMMANDS = [
    (engine, name, number)
    for name, model in MODELS.items()
    for engine, commands in model.flags.items()
    for number in range(len(commands))
]

pytestmark = pytest.mark.timeout(TIMEOUT)


def _arguments(engine: str, name: str, number: int, path: Path) -> list[str]:
    model = MODELS[name]
    flags = model.flags[engine][number]
    found = ["--model" if engine == "vllm" else "--model-path", str(path), *flags]
    if not {*model.classes} <= {*models_tested_in(ENGINES[engine][1])}:
        found.append("--kt-allow-untested")
    return [*found, "--kt-num-gpu-experts", "2"]


@pytest.fixture(scope="module")
def errors(folder: Path) -> Callable[[str], dict[str, str]]:
    """Of an engine's commands, in one process."""

    @functools.cache
    def of(engine: str) -> dict[str, str]:
        module = ENGINES[engine][0]
        if module.PYTHON is None:
            pytest.skip(f"KT_{engine.upper()}_PYTHON is not set (make test sets it)")
        for name, model in MODELS.items():
            if not (folder / name).exists():
                model.write(folder / name)
        job = {
            f"{name} {number}": _arguments(engine, name, number, folder / name)
            for of, name, number in COMMANDS
            if of == engine
        }
        given, result = folder / f"{engine}.json", folder / f"{engine}-result.json"
        given.write_text(json.dumps(job))
        done = subprocess.run(
            [module.PYTHON, HERE / f"{engine}_commands.py", given, result],
            capture_output=True,
            text=True,
            env=module.environment(),
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(result.read_text()) | {"log": done.stdout + done.stderr}

    return of


@pytest.mark.parametrize(("engine", "name", "number"), COMMANDS)
def test_accepted(
    engine: str, name: str, number: int, errors: Callable[[str], dict[str, str]]
) -> None:
    found = errors(engine)
    if (engine, name) in LACKS and LACKS[engine, name] in found["log"]:
        pytest.skip(f"{engine}'s environment has not all that this class needs")
    assert found[f"{name} {number}"] == "", found["log"][-8000:]
