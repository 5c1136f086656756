"""The benchmarks of prompts: what they serve in which order, and what they save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kt_kernel.checkpoint import read_experts
from kt_kernel.weights.formats import INT4_GROUP

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"

# In the place of an engine. It notes what it was asked for, and whether the others are stopped.
WORKER = """
import json, os, sys, time
from pathlib import Path

spec = json.loads(Path(sys.argv[1]).read_text())
folder, name = Path(spec["folder"]), spec["model"]
(folder / "pid").write_text(str(os.getpid()))
(folder / "log").write_text("this is its log")
if name == "broken":
    (folder / "log").unlink()
    sys.exit(1)

def note(what):
    states = [
        Path(f"/proc/{path.read_text()}/stat").read_text().rsplit(") ", 1)[1][0]
        for path in folder.parent.glob("*/pid")
        if path.parent != folder and Path(f"/proc/{path.read_text()}").exists()
    ]
    with open(folder.parent / "noted", "a") as noted:
        noted.write(json.dumps([name, what, sorted(set(states))]) + "\\n")

if "STREAM_GATES" in os.environ:
    gates = Path(os.environ["STREAM_GATES"])
    (gates / "loaded").touch()
    while not (gates / "measure").exists():
        time.sleep(0.01)
    note("measure")
    rates = {"line": "kt: ...", "rates": {"threshold": 7}}
    (gates / "part").write_text(json.dumps(rates))
    os.rename(gates / "part", gates / "measured")
    while not (gates / "serve").exists():
        time.sleep(0.01)
print(json.dumps({"ready": 0.5}), flush=True)
asked = 0
for line in sys.stdin:
    job = json.loads(line)
    note(job["do"])
    asked += job["do"] == "prompts"
    if name == "lost" and job["do"] == "prompts":
        sys.exit(1)
    if job["do"] == "logprobs":
        found = {mode: [-1.0, -2.0 - number] for number, mode in enumerate(job["modes"])}
    else:
        found = {
            str(n): {mode: {"seconds": [asked] * job["rounds"]} for mode in job["modes"]}
            for n in job["tokens"]
        } if job["do"] == "prompts" else None
    print(json.dumps({"found": found}), flush=True)
"""


def test_prompts_plot(tmp_path: Path, module: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    saved = sorted((FOLDER / "results").glob("*-prompts-*.json"))
    assert saved
    picture = tmp_path / "prompts.png"
    module("prompts_plot").main([str(picture), *map(str, saved)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prompts_served_in_every_mode(tmp_path: Path, module: Any) -> None:
    """Each length in each mode, in turns; the bound is the slower of bus and GPU."""
    prompts = module("prompts")
    asked: list[tuple[str, int]] = []
    mode = tmp_path / "mode"
    bench = prompts.Bench(
        lambda given, steps: asked.append((mode.read_text(), len(given[0]))), mode
    )
    bench.warm([16, 4096], ["cpu", "shared"])
    found = bench.first_token([16, 4096], ["cpu", "shared"], 2)
    assert asked[:3] == [("cpu", 16), ("shared", 16), ("shared", 4096)]  # warm-up
    assert asked[3:7] == [("cpu", 16), ("shared", 16), ("cpu", 4096), ("shared", 4096)]
    assert [len(row["seconds"]) for modes in found.values() for row in modes.values()] == [2] * 4
    rows = {"10000": {"shared": {"seconds": [0.5]}, "no copies": {"seconds": [0.3]}}}
    [line] = prompts.summary(rows, 0.2)  # two chunks
    assert line == "10000 tokens, ms: shared 500.0, no copies 300.0, bound 400.0, share 80%"


def test_without_copies_nothing_right_lies_there(tmp_path: Path) -> None:
    """Zeros in the place of each copy, once after each change of the mode."""
    code = """
import sys
from pathlib import Path

import stream_modes
import torch

from kt_kernel.device.streaming.lane import CopyLane

done = []
CopyLane.copy = lambda self, to, source, runs: done.append(to.fill_(source))
mode = Path(sys.argv[1])
stream_modes.install(mode)
lane = CopyLane.__new__(CopyLane)  # without a device, and with the default stream
lane._stream = None
one, other = torch.ones(2, 8, dtype=torch.uint8)
for now, to, value in (
    ("no copies", one, 0), ("no copies", other, 0), ("streamed", one, 7), ("no copies", one, 0)
):
    mode.write_text(now)
    lane.copy(to, 7, [])
    assert to.tolist() == [value] * 8, (now, to)
one.fill_(3)
lane.copy(one, 7, [])
assert one.tolist() == [3] * 8 and len(done) == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "mode"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
    )
    assert done.returncode == 0, done.stderr


def engine(name: str, method: str | None, **more: Any) -> dict[str, Any]:
    about = {"name": name, "engine": "vllm", "model": name, "arguments": {}, "method": method}
    return about | {"hot": 0, "tokens": [16, 32], "modes": ["cpu", "shared"], "rounds": 2} | more


def test_engines_serve_in_turns(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One is measured or serves at a time, while the others are stopped; those that fail do not
    matter to the others. The second turn is in the other order."""
    turns = module("prompts_turns")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(turns, "WORKER", worker)
    monkeypatch.setattr(turns, "_REST", 0.05)
    engines = [
        engine("stock", None, modes=["shared"], logprobs=True, engine="sglang"),
        engine("ours", "BF16", logprobs=True, beside=["stock", "ours"]),
        engine("more", "INT4_G32"),
        engine("broken", "BF16"),
        engine("lost", None, engine="sglang"),
    ]
    plan = {"layers": 4, "groups": [{"name": "A", "engines": engines, "turns": 2}]}
    (tmp_path / "plan").write_text(json.dumps(plan))
    monkeypatch.setattr(
        sys, "argv", ["", *(str(tmp_path / n) for n in ("plan", "out")), "--logs", str(tmp_path)]
    )
    turns.main()
    result = json.loads((tmp_path / "out").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert result["layers"] == 4 and list(rows) == [one["name"] for one in engines]
    for name, log in (("broken", "it wrote no log"), ("lost", "this is its log")):
        assert log in rows[name]["error"] and not rows[name]["prompts"]
    assert rows["ours"]["prompts"]["32"]["cpu"] == {"seconds": [1, 1, 2, 2]}
    assert rows["more"]["rates"] == {"threshold": 7} and rows["more"]["start_seconds"] == 0.5
    assert rows["ours"]["distances"] == {
        "stock": {"cpu": 0.0, "shared": 0.5},
        "ours": {"shared": 0.5},
    }
    noted = [json.loads(line) for line in (tmp_path / "A" / "noted").read_text().splitlines()]
    assert [row[:2] for row in noted if row[1] in ("measure", "prompts")] == [
        ["ours", "measure"],
        ["more", "measure"],
        *([name, "prompts"] for name in ("stock", "ours", "more", "lost")),
        *([name, "prompts"] for name in ("more", "ours", "stock")),
    ]
    assert all(states == ["T"] for *_, states in noted)
    given = [json.loads(spec.read_text())["arguments"] for spec in (tmp_path / "A").glob("*/spec")]
    ports = [one["nccl_port"] for one in given if one]
    assert len(ports) == 2 and ports[0] != ports[1]  # of SGLang's engines
    assert "from ours: shared 0.5000" in capsys.readouterr().out


def test_a_group_for_which_no_time_is_left(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    groups = [{"name": "A", "engines": [engine("stock", None)], "least": 50}]
    (tmp_path / "plan").write_text(json.dumps({"groups": groups}))
    monkeypatch.setattr(
        sys, "argv", ["", str(tmp_path / "plan"), str(tmp_path / "out"), "--seconds", "40"]
    )
    module("prompts_turns").main()
    assert capsys.readouterr().out == "no time left for A\n"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"rounds": None}, "engine 'ours' of group 'A' lacks rounds"),
        (
            {"modes": ["cpu", "fast"]},
            "engine 'ours' of group 'A': unknown modes fast; accepted: cpu, streamed",
        ),
    ],
)
def test_a_wrong_plan_starts_nothing(
    changed: dict[str, Any],
    line: str,
    tmp_path: Path,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = engine("ours", "BF16", **changed)
    wrong = {key: value for key, value in wrong.items() if value is not None}
    groups = [{"name": "A", "engines": [engine("stock", None), wrong]}]
    (tmp_path / "plan").write_text(json.dumps({"groups": groups}))
    turns = module("prompts_turns")
    monkeypatch.setattr(turns, "Group", None)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "plan"), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=line):
        turns.main()


def test_engines_of_a_group_that_cannot_start(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has started is ended."""
    turns = module("prompts_turns")
    worker, started = tmp_path / "worker.py", []
    worker.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(turns, "WORKER", worker)

    class Kept(turns.Engine):  # type: ignore[name-defined,misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(turns, "Engine", Kept)
    engines = [engine("one", None), engine("other", None, python="/nowhere/python")]
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        turns.Group({"name": "A", "engines": engines}, tmp_path / "A")
    assert [one.process.returncode for one in started] == [-signal.SIGKILL]


def test_a_synthetic_model_with_int4_experts(tmp_path: Path, module: Any) -> None:
    """Our reader, which has tests of its own, finds its experts; they are as large as others."""
    shape = module("shapes").parse_shape("4,128,64,2")
    path = module("synthetic").make(tmp_path / "model", shape, 2, 100, int4=True)
    found = read_experts(path, 1, 4, 128, 64, method="RAWINT4")
    assert found.down[3].format == INT4_GROUP and len(found.gate) == 4
    tensors = load_file(path / "layer-001-0003.safetensors")
    packed, scale, shape = (
        tensors[f"model.layers.1.mlp.experts.2.down_proj.weight_{name}"]
        for name in ("packed", "scale", "shape")
    )
    codes = torch.stack([packed >> 4 * i & 15 for i in range(8)], -1).flatten(1) - 8
    weights = codes * scale.float().repeat_interleave(32, 1)
    assert list(weights.shape) == shape.tolist() == [128, 64]
    assert weights.std() == pytest.approx(module("synthetic").SCALE, rel=0.05)
    other = tensors["model.layers.1.mlp.experts.3.down_proj.weight_packed"]
    assert not torch.equal(packed, other)


def test_a_table_of_engines_in_turns(module: Any) -> None:
    def row(name: str, method: str | None, **more: Any) -> dict[str, Any]:
        about = {"name": name, "engine": "sglang", "method": method, "hot": 0.5, "group": "A"}
        return about | {"prompts": {}} | more

    ours = {"cpu": {"seconds": [0.5, 0.3, 0.4]}, "shared": {"seconds": [0.2]}}
    ours["no copies"] = {"seconds": [0.1]}
    content = {
        "layers": 2,
        "shape": {"name": "narrow"},
        "cpus": 16,
        "cpu": "Xeon",
        "date": "2026-11-30T00",
        "rows": [
            row(
                "ours",
                "BF16",
                prompts={"2048": ours},
                rates={"threshold": 300, "bus_seconds": 0.15},
                distances={"stock": {"cpu": 0.01, "no copies": 0.5}},
            ),
            row(
                "peer",
                None,
                prompts={"8192": {"its own": {"seconds": [0.6, 0.7, 0.9]}}},
                layers_ms={"8192": [[40.4, 2.0], [41.0, 1.6]]},
            ),
            row("broken", "FP8", error="Traceback:\n  cannot load\n"),
        ],
    }
    lines = module("prompts_tables").in_turns(content).splitlines()
    for line in (
        "2 layers of narrow's shape. One H200, 16 virtual CPUs (Xeon). 2026-11-30. Medians, ms.",
        "| BF16, 50% hot, 2,048 tokens | 300 | 400 |  | 200 | 100 | 150 | 75% |",
        "| ours | 200 (200 to 200) |  |",
        "| peer |  | 700 (600 to 900) |",
        "| ours: cpu, from stock | 0.0100 |",
        "| ours: no copies, from stock | 0.5000 |",
        "| peer, 8,192 tokens | 40 + 2 | 41 + 2 |",
        "- broken: cannot load",
    ):
        assert line in lines, lines


def test_a_worker_beside_another_package_of_our_name(tmp_path: Path) -> None:
    """kt-kernel's package is called kt_kernel, too."""
    (tmp_path / "kt_kernel").mkdir()
    (tmp_path / "kt_kernel" / "__init__.py").write_text("")
    code = "import kt_kernel, prompts_worker; assert not hasattr(kt_kernel, '__version__')"
    path = os.pathsep.join([str(tmp_path), str(FOLDER)])
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)
