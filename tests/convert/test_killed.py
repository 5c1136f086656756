"""A conversion killed at any moment is continued to the same bytes."""

import os
import random
import subprocess
import sys
from pathlib import Path

from packed_cases import contents, loaded, run_convert, save_checkpoint

from kt_kernel.checkpoint import open_checkpoint

KILLS = 20


def start(*arguments):
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), *map(str, arguments)]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def test_killed_at_calls(tmp_path):
    source = save_checkpoint(tmp_path / "source", layers=(0, 1, 2), biases=True)
    (calls,) = map(int, start(source, tmp_path / "whole", "AMXINT4", 0).split())
    wanted = contents(tmp_path / "whole" / "0")
    assert len(wanted) == 4 and calls > KILLS
    points = [1, 2, calls, *random.Random(0).sample(range(3, calls), KILLS - 3)]
    start(source, tmp_path / "killed", "AMXINT4", *points)
    for number, point in enumerate(points):
        out = tmp_path / "killed" / str(number)
        check_what_is_there(out, wanted)
        run_convert(source, out, "AMXINT4", resume=True)
        assert contents(out) == wanted, point


def check_what_is_there(out, wanted):
    """Whole layers of the right bytes, and nothing else that could be taken for one."""
    found = contents(out)
    if "kt_manifest.json" not in found:
        return
    for layer in open_checkpoint(out).layers():
        name = f"layer-{layer:05d}.safetensors"
        assert found[name] == wanted[name]
        loaded(layer, "AMXINT4", out)


def test_killed_at_times(tmp_path):
    """Without knowing where, and going on each time."""
    source = save_checkpoint(tmp_path / "source", layers=tuple(range(8)))
    wanted = contents(run_convert(source, tmp_path / "whole"))
    generator = random.Random(1)
    start(source, tmp_path, "AMXINT8", *(f"t{generator.uniform(0, 0.1):.3f}" for _ in range(6)))
    run_convert(source, tmp_path / "times", resume=True)
    assert contents(tmp_path / "times") == wanted


def test_files_that_may_not_grow(tmp_path):
    """What a full disk or a quota comes to: the system's own error in the middle of a file."""
    source = save_checkpoint(tmp_path / "source")
    told = start(source, tmp_path / "limited", "AMXINT8", "f100000", "f100")
    for number, (line, file) in enumerate(
        zip(told.splitlines(), ("layer-00001.safetensors", "kt_manifest.json"), strict=True)
    ):
        out = tmp_path / "limited" / str(number)
        assert "File too large" in line and str(out / file) in line
        assert not list(out.glob("*.partial")) and not list(out.glob("layer*"))
