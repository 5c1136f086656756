"""kt doctor in the environment of an engine."""

from __future__ import annotations

import os
import subprocess

import pytest
from engines import environment

from kt_kernel.diagnosis.engines import ENGINES, Engine

COMMAND = "import sys; from kt_kernel.cli.main import main; sys.argv[0] = 'kt'; main()"


@pytest.mark.parametrize("engine", ENGINES, ids=[f"{engine.package}-" for engine in ENGINES])
def test_an_engine_that_loads_other_plugins_only(engine: Engine) -> None:
    """It has all that the plugin needs, and a variable keeps it from loading the plugin."""
    python = os.environ.get(f"KT_{engine.name.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"KT_{engine.name.upper()}_PYTHON is not set (make test sets it)")
    done = subprocess.run(
        [python, "-c", COMMAND, "doctor"],
        capture_output=True,
        text=True,
        env=environment(**{engine.allowlist: "another, and_another"}),
        timeout=600,
    )
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    found = [(level, text) for level, subject, text in lines if subject == engine.name]
    assert [level for level, _ in found] == ["ok", "problem"], done.stdout + done.stderr
    assert found[0][1].endswith("finds the plugin, and has all that it needs")
    assert found[1][1].startswith(f"{engine.allowlist}=another, and_another leaves the plugin out")
    assert done.returncode == 1 and lines[-1][1:] == ["1", "problem, see above"]
