"""kt bench trace: its table, its JSON, and what it refuses."""

import json

import pytest
from outcome import failed

from kt_kernel.trace.records import Record
from kt_kernel.trace.writer import TraceWriter


@pytest.fixture
def file(tmp_path):
    """Two passes of two layers, a token each, and one of 512 tokens; still being written."""
    path, records = tmp_path / "trace.json", []
    for tokens in (1, 1, 512):
        for position in range(2):
            t, n = 10**6 * (len(records) + 1), len(records)
            records.append(
                Record(
                    slot=position,
                    number=n,
                    position=position,
                    chain=0,
                    tokens=tokens,
                    hand_start=t,
                    hand_end=t + 4000,
                    seen=t + 5000,
                    rung=t + 55_000,
                    begun=t + 5000,
                    ended=t + 55_000,
                    late_begun=0,
                    late_ended=0,
                    back_start=t + 34_000,
                    back_ready=t + 57_000,
                    back_end=t + 60_000,
                )
            )
    TraceWriter(path, "cuda:0").write(records, lambda slot: f"layer {slot}")
    return path


def test_table(kt, file):
    code, stdout, stderr = kt("bench", "trace", file)
    assert (code, stderr) == (0, "")
    assert stdout.splitlines() == [
        "cuda:0, model 0: microseconds per pass, mean of 2 passes of 1 token"
        " (also in this trace: 1 of 512 tokens)",
        "",
        "| layer | passes | CPU | GPU | transfers | exposed |",
        "|---|---|---|---|---|---|",
        "| layer 0 | 2 | 50.0 | 30.0 | 7.0 | 23.0 |",
        "| layer 1 | 2 | 50.0 | 970.0 | 7.0 | 23.0 |",
        "",
        "t_cpu 100.0, t_gpu (with transfers) 1014.0, exposed 46.0, elapsed 1060.0",
        "speedup over no overlap: at most 1.10, reached 1.05 (96%)",
    ]
    assert "mean of 1 pass of 512 tokens" in kt("bench", "trace", file, "--tokens", 512)[1]


def test_json(kt, file):
    code, stdout, stderr = kt("bench", "trace", file, "--json")
    assert (code, stderr) == (0, "")
    (model,) = json.loads(stdout)["models"]
    assert model["counts"] == {"1": 2, "512": 1} and model["tokens"] == 1
    assert (model["t_cpu"], model["t_gpu"], model["exposed"]) == (100, 1014, 46)
    assert [row["layer"] for row in model["layers"]] == ["layer 0", "layer 1"]


def test_refusals(kt, file, tmp_path):
    failed(kt("bench", "trace", tmp_path / "no"), 1, tmp_path / "no", "no such file")
    failed(kt("bench", "trace", tmp_path), 1, tmp_path, "is a directory")
    failed(
        kt("bench", "trace", file, "--tokens", 7),
        1,
        file,
        "no pass of 7 tokens",
        "accepted: 1, 512",
    )
    other = tmp_path / "other"
    for text, words in (
        ("", ["no batch", "KT_TRACE"]),
        ('[{"name": "x", "ph": "X"}]', ["no batch", "KT_TRACE"]),
        ("layer,time\n", ["line 1", "not a trace", 'expected "["']),
    ):
        other.write_text(text)
        failed(kt("bench", "trace", other), 1, other, *words)
