"""Checks whether a model class that was not tested is served correctly: ``kt model check``.

A small random model of the class is served by the stock engine and with kt options, and their
log-probabilities are compared. As a control, kt options with the experts in the wrong places must
give others; otherwise the comparison shows nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.files import need_file, parse_object
from ..runtime.nested import text_path
from .hub import Choose, Take, local_path, take_all
from .repository import Repository
from .server_process import process_group
from .small_model import (
    VOCABULARY,
    UnknownToTransformers,
    small_config,
    text_layers,
    write_small_model,
)

ENGINES = ("vllm", "sglang")
_STEPS = 8
# The mean distance of log-probabilities, and how much further those of the control must be.
_NEAR, _CONTROL = {"float32": 0.03, "bfloat16": 0.1}, 5
_PATIENCE = 900  # seconds for all runs of an engine
# Data types and further arguments that are tried on the CPU, in this order, until the stock engine
# serves the model. Some layers of the engines exist in bfloat16 only, like linear attention. Of
# SGLang's kinds of attention, that in torch has no MLA and no sinks; that in Triton has, and is
# interpreted, but not in bfloat16, in which the interpreter gets it wrong.
_IN_TORCH = {"attention_backend": "torch_native"}
_ON_CPU: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "vllm": (("float32", {}), ("bfloat16", {})),
    "sglang": (
        ("float32", _IN_TORCH),
        ("float32", {"attention_backend": "triton"}),
        ("bfloat16", _IN_TORCH),
    ),
}
# Arguments with which an engine needs no processor of images.
_ONLY_TEXT: dict[str, dict[str, Any]] = {
    "vllm": {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}},
    "sglang": {"enable_multimodal": False},
}


@dataclass(frozen=True)
class Verdict:
    """The result for one model class.

    Attributes:
        engine, version, device: what served the small model.
        classes: names of the model class.
        distances: mean distance of log-probabilities to the stock engine's, by run; "control" is
            that with experts in the wrong places.
        problem: why --kt-allow-untested is not safe; "" if it is.
    """

    engine: str
    version: str
    device: str
    classes: str
    distances: dict[str, float]
    problem: str = ""

    @property
    def safe(self) -> bool:
        return not self.problem


def installed_engine(name: str | None = None) -> str:
    """The engine to use: the one named, or the one that is installed for this Python.

    Raises:
        ValueError: it is not installed, or none is.
    """
    if name is not None and name not in ENGINES:
        raise ValueError(f"--engine {name}: unknown engine; accepted: {', '.join(ENGINES)}")
    for engine in ENGINES if name is None else (name,):
        if importlib.util.find_spec(engine) is not None:
            return engine
    missing = "neither vLLM nor SGLang is" if name is None else f"{name} is not"
    raise ValueError(
        f"{missing} installed for {sys.executable}; run kt in the engine's environment"
    )


def read_config(model: str) -> dict[str, Any]:
    """config.json of a folder, or of a repository on the hub (weights are not downloaded).

    Raises:
        ValueError, OSError: there is none, or it is not a JSON object.
    """
    if not model:
        raise ValueError("the model's name is empty; expected a folder or a repository (org/name)")
    path = Path(model)
    if not path.exists():
        path = Path(from_hub(model, lambda repository, files, folder: ["config.json"]))
    file = path / "config.json" if path.is_dir() else path
    need_file(str(file), "the configuration of a model, config.json")
    return parse_object(file.read_bytes(), f"{file}: ")


def from_hub(model: str, choose: Choose | None = None, take: Take = take_all) -> str:
    """`local_path` of a repository by its name.

    Raises ValueError naming the model if there is none.
    """
    repository = Repository.parse(model)
    if repository is None:
        raise ValueError(f"{model}: no such folder, and not a repository name (org/name)")
    try:
        return local_path(repository, None, choose, take)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error


def check_class(
    config: dict[str, Any],
    engine: str,
    *,
    device: str | None = None,
    arguments: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Serves a small model of a configuration's class and compares it with the stock engine.

    Args:
        config: content of the model's config.json.
        engine: ``vllm`` or ``sglang``.
        device: ``cuda`` or ``cpu``; None: a GPU if there is one.
        arguments: further arguments of the engine.
        say: gets a line for each step.

    Raises:
        ValueError: no small model can be made of this configuration.
        RuntimeError: the stock engine does not serve the small model. The message has the end of
            its log.
    """
    import torch

    version = _version_of(engine)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    classes = ", ".join(config.get("architectures") or ["unknown"])
    small = small_config(config)
    with tempfile.TemporaryDirectory(prefix="kt-check-") as name:
        folder = Path(name)
        say(f"making a small random model of {classes}: {text_layers(small)} layers")
        try:
            write_small_model(small, folder)
            runs = _runs(folder)
        except UnknownToTransformers as error:
            say(f"{error}; the engine's own class gets random weights")
            runs = _runs_without_files(folder, small)
        say(f"serving it with {engine} on {device}, stock and with kt options")
        job = {"runs": runs, "prompts": _prompts(), "steps": _STEPS, "device": device}
        every = (_ONLY_TEXT[engine] if text_path(config) else {}) | (arguments or {})
        for dtype, more in _ON_CPU[engine] if device == "cpu" else (("bfloat16", {}),):
            given = {"dtype": dtype, "arguments": more | every}
            answers, log = _serve(engine, job | given, folder)
            if "stock" in answers:
                break
            named = "".join(f", {name} {value}" for name, value in more.items())
            say(f"the stock engine does not serve it in {dtype}{named}")
    if "stock" not in answers:
        raise RuntimeError(
            f"{engine} itself does not serve a small model of {classes} on {device}, so nothing "
            f"can be compared; the end of its log:\n{log}"
        )
    distances, problem = _compare(answers, [run["name"] for run in runs], log, dtype)
    return Verdict(engine, version, device, classes, distances, problem)


def _version_of(engine: str) -> str:
    """The engine's version. Its CPU builds are distributions of other names."""
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(engine, [])
        return importlib.metadata.version(names[0]) if names else "of unknown version"


def _runs(folder: Path) -> list[dict[str, Any]]:
    model = str(folder / "model")
    options = {"method": "BF16", "allow_untested": True}
    half = options | {"num_gpu_experts": 2}
    return [
        {"name": "stock", "model": model, "kt": None},
        {"name": "no hot experts", "model": model, "kt": options},
        {"name": "2 hot experts", "model": model, "kt": half},
        {"name": "control", "model": model, "kt": half | {"weight_path": str(folder / "control")}},
    ]


def _runs_without_files(folder: Path, small: dict[str, Any]) -> list[dict[str, Any]]:
    """The engine sets the weights (see `random_weights`); "moved": those of experts, by so many
    places."""
    model = folder / "random"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small))
    runs = _runs(folder)
    for run in runs:
        run |= {"model": str(model), "moved": 1 if run["name"] == "control" else 0}
        if run["kt"] is not None:
            run["kt"] = {name: v for name, v in run["kt"].items() if name != "weight_path"}
    return runs


def _prompts() -> list[list[int]]:
    """Four prompts of different lengths from the whole vocabulary."""
    return [
        [3 + (7 * i * j * j + 11 * j + i) % (VOCABULARY - 3) for j in range(12 + 9 * i)]
        for i in range(4)
    ]


def _serve(engine: str, job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """The answers of all runs before the first one that failed, and the end of the log."""
    job_file, result, log = folder / "job.json", folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    job_file.write_text(json.dumps(job))
    module = f"kt_kernel.plugin_entrypoints.{engine}.probe"
    command = [sys.executable, "-m", module, str(job_file), str(result)]
    env = {name: value for name, value in os.environ.items() if name != "KT_CONFIG"}
    if engine == "sglang" and job["device"] == "cpu":
        env["TRITON_INTERPRET"] = "1"  # Triton has no compiler for it
    late = ""
    with process_group(command, log, env) as process:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            late = f"\nError: not finished after {_PATIENCE} seconds"
    answers = json.loads(result.read_text()) if result.exists() else {}
    return answers, log.read_text(errors="replace")[-3000:] + late


def run_job(serve: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]) -> None:
    """Runs a job in an engine's process: ``probe JOB.json RESULT.json``. Answers are written one by
    one, so those before a failure are kept.

    serve: returns the answer of one run of the job: "prompt", the log-probabilities of each
        prompt's tokens but the first; "tokens" and "decoded", those of the tokens that follow.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    answers: dict[str, Any] = {}
    for run in job["runs"]:
        answers[run["name"]] = serve(run, job)
        Path(sys.argv[2]).write_text(json.dumps(answers))


def _compare(
    answers: dict[str, Any], names: list[str], log: str, dtype: str
) -> tuple[dict[str, float], str]:
    """The distances of all runs to the first one, and the problem; "" if there is none."""
    stock, *others = names
    distances = {
        name: _distance(answers[stock], answers[name]) for name in others if name in answers
    }
    for name in others:
        if name not in distances:
            return distances, f"it fails with kt options ({name}): {_last_error(log)}"
    *near, control = distances.values()
    if max(near) > _NEAR[dtype]:
        return distances, "log-probabilities differ from the stock engine's"
    if control <= _CONTROL * max(near):
        return distances, (
            "the comparison shows nothing, because log-probabilities are as close with experts in "
            "the wrong places"
        )
    return distances, ""


def _distance(stock: dict[str, Any], other: dict[str, Any]) -> float:
    """The mean distance of the log-probabilities of the prompts and of the decoded tokens, as long
    as these are the same. NaN counts as infinite."""
    found: list[float] = []
    for a, b in zip(stock["prompt"], other["prompt"], strict=True):
        found += [abs(x - y) for x, y in zip(a, b, strict=True)]
    for i, tokens in enumerate(stock["tokens"]):
        for j, token in enumerate(tokens):
            if other["tokens"][i][j] != token:
                break
            found.append(abs(stock["decoded"][i][j] - other["decoded"][i][j]))
    mean = sum(found) / len(found)
    return math.inf if math.isnan(mean) else mean


def _last_error(log: str) -> str:
    """The last line of a log that names an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "kt: error" in line]
    return lines[-1] if lines else "its process ended without an error in its log"
