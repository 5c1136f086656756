"""kt tune with vLLM on the CPU: its own server confirms what is recommended, and is started by it.

Takes half a minute, so it runs with KT_FULL=1.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import test_vllm
from engines import DEMO_MODEL, TIMEOUT
from grid import only_full

PYTHON = os.environ.get("KT_VLLM_PYTHON")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="KT_VLLM_PYTHON is not set (make test sets it)"),
    only_full,
    pytest.mark.timeout(TIMEOUT),
]


def test_the_recommended_command_is_served_and_timed(tmp_path: Path) -> None:
    command = "import sys; from kt_kernel.cli.main import main; sys.argv[0] = 'kt'; main()"
    given = "--engine vllm --context 512 --prompt 128 --answer 64 --streams 2 --json".split()
    more = "--methods", "AMXINT8", "--engine-args", "--enforce-eager"
    done = subprocess.run(
        [PYTHON, "-c", command, "tune", str(DEMO_MODEL), *given, *more],
        capture_output=True,
        text=True,
        env=test_vllm.environment(TORCHDYNAMO_DISABLE="1", XDG_CONFIG_HOME=str(tmp_path)),
        timeout=TIMEOUT - 300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["options"]["method"] == "AMXINT8", found
    assert "--kt-method AMXINT8" in found["command"]
    assert found["command"].endswith(" --enforce-eager")
    checked = found["checked"]
    assert 0 < checked["decode"] < 10 and 0 < checked["prefill"] < 60
    (saved,) = (tmp_path / "kt-moe" / "tuned").iterdir()
    assert json.loads(saved.read_text())["checked"] == checked
