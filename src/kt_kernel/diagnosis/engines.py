"""Looks at the installed engines, and whether they find and load the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import NamedTuple

from .finding import Finding, note, ok, problem

PLUGIN = "kt_moe"  # the entry points' name
_CHECK = "kt_kernel.plugin_entrypoints.installed"
_SHOWN = 3  # names that an engine lacks
_PATIENCE = 300  # seconds for the import of an engine, on a slow disk for the first time


class Engine(NamedTuple):
    """name: as users write it. package: its distribution and module. group: of the entry points
    that it loads. allowlist: the variable that names the plugins to load."""

    name: str
    package: str
    group: str
    allowlist: str


ENGINES = (
    Engine("vLLM", "vllm", "vllm.general_plugins", "VLLM_PLUGINS"),
    Engine("SGLang", "sglang", "sglang.srt.plugins", "SGLANG_PLUGINS"),
)


def engines() -> list[Finding]:
    """Of the engines in this environment."""
    installed = [engine for engine in ENGINES if _version(engine) is not None]
    if not installed:
        text = "neither vLLM nor SGLang is installed; install kt-moe where the engine is"
        return [problem("engines", text)]
    return [finding for engine in installed for finding in look_at(engine)]


def look_at(engine: Engine) -> list[Finding]:
    """Of one engine that is installed."""
    if not metadata.entry_points(group=engine.group, name=PLUGIN):
        return [
            problem(
                engine.name,
                f"{_version(engine)}: it finds no entry point of kt-moe, and so does not load the "
                "plugin; install kt-moe with pip into this environment",
            )
        ]
    findings = _differences(engine)
    allowed = os.environ.get(engine.allowlist)
    if allowed and PLUGIN not in (name.strip() for name in allowed.split(",")):
        text = f"{engine.allowlist}={allowed} leaves the plugin out; add {PLUGIN}, or unset it"
        findings.append(problem(engine.name, text))
    return findings


def _version(engine: Engine) -> str | None:
    try:
        return metadata.version(engine.package)
    except metadata.PackageNotFoundError:
        return None


def _differences(engine: Engine) -> list[Finding]:
    """What the plugin's contract says of the installed version."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHECK, engine.package],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        text = f"{_version(engine)}: importing it takes longer than {_PATIENCE} s"
        return [problem(engine.name, text)]
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [problem(engine.name, f"{_version(engine)}: it cannot be imported: {last}")]
    found = json.loads(lines[-1])
    if found["lacks"]:
        first, more = found["lacks"][:_SHOWN], len(found["lacks"]) - _SHOWN
        lacking = ", ".join(first) + (f" and {more} more" if more > 0 else "")
        text = f"{found['version']} lacks {lacking}, which kt-moe needs; install a tested version"
        return [problem(engine.name, text)]
    notes = [note(engine.name, text) for text in found["notes"]]
    text = f"{found['version']}: finds the plugin, and has all that it needs"
    return [ok(engine.name, text), *notes]
