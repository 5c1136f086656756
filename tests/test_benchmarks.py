"""The benchmarks run, and say what they must. Never how fast: a timing is not a test."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kt_kernel import _C
from kt_kernel.routes.synthetic import NONE, generate
from kt_kernel.serving.hybrid import HybridLayer

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TINY = tuple("--shape 4,256,128,2 --seconds 0.01 --rounds 2 --ceiling-mib 16".split())
ABOUT = set(
    (
        "kt_moe python torch date cpu cpus features last_level_cache"
        " routine shape ceilings notes rows command load_average"
    ).split()
)
ROW = set(
    (
        "package method table tokens threads beside packed_bytes_per_weight"
        " samples rounds median_us p10_us p90_us best_us gb_s tera_ops_s unit"
        " memory memory_ceiling unit_ceiling bound t_min_us share"
    ).split()
)


def run(folder: Path, *args: str) -> tuple[dict[str, Any], str]:
    """The saved result of run.py, and what it printed."""
    out = folder / "result.json"
    done = subprocess.run(
        [sys.executable, FOLDER / "run.py", *TINY, *args, "--json", out],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def check(result: dict[str, Any], without: str = "") -> list[dict[str, Any]]:
    assert result.keys() >= ABOUT
    for found in result["ceilings"].values():
        assert found["dram_read"] > 0 and found["dram_copy"] > 0
        # before, after, and with anything to measure after each round
        assert len(found["samples"]["dram_read"]) >= (4 if result["rows"] else 2)
    for row in result["rows"]:
        assert row.keys() >= ROW - {without}
        assert row["rounds"] == 2 and row["samples"] >= 2
        assert 0 < row["best_us"] <= row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["share"] == pytest.approx(row["t_min_us"] / row["median_us"])
    return result["rows"]


def test_layer_of_every_method(tmp_path: Path, module: Any) -> None:
    best = _C.kernel_tables()[0]
    tables = dict.fromkeys((best, "avx2"))
    result, printed = run(
        tmp_path, "--tables", *tables, "--tokens", "1", "16", "--layers", "2", "--threads", "1"
    )
    rows = check(result)
    methods = module("methods")
    for name in methods.USUAL_METHODS:
        for table in tables:
            found = {r["tokens"]: r for r in rows if (r["method"], r["table"]) == (name, table)}
            assert list(found) == [1, 16]
            # Memory is planned by the bits; heads weigh more in such small tiles.
            packed = found[1]["packed_bytes_per_weight"]
            assert packed == pytest.approx(methods.METHODS[name].bits / 8, rel=0.1)
        assert name in printed
    assert any("less than twice the last-level cache" in note for note in result["notes"])


def test_threads_and_what_runs_beside(tmp_path: Path) -> None:
    result, printed = run(
        tmp_path,
        *"--methods BF16 --tokens 1 --layers 1 --threads 1 2 --foreign 1 --torch-pool".split(),
    )
    rows = check(result)
    assert [(r["threads"], r["beside"]) for r in rows] == [
        (threads, beside) for threads in (1, 2) for beside in ("", "torch", "1 foreign")
    ]
    assert all((r["beside"] == "1 foreign") == ("share_of_fair" in r) for r in rows)
    assert "of the fair share" in printed and "against the best" in printed


@pytest.mark.parametrize("routine", ["gemv", "gemm"])
def test_kernels_alone(tmp_path: Path, module: Any, routine: str) -> None:
    result, _ = run(
        tmp_path,
        "--routine",
        routine,
        *"--tables avx2 --working-set 1 --tokens 3 --threads 1".split(),
    )
    rows = check(result)
    for name in module("methods").USUAL_METHODS:
        assert [row["tokens"] for row in rows if row["method"] == name] == [3]
    assert all(row["reuse_distance"] >= 1 << 20 and row["threads"] == 1 for row in rows)


def test_ggml_formats(tmp_path: Path, module: Any) -> None:
    methods = module("methods").METHODS
    names = [name for name, method in methods.items() if method.ggml]
    result, _ = run(
        tmp_path,
        *"--routine gemm --tables avx2 --working-set 1 --tokens 3 --threads 1 --methods".split(),
        *names,
    )
    rows = check(result)
    assert [row["method"] for row in rows] == names
    for row in rows:
        bits = methods[row["method"]].bits
        assert row["packed_bytes_per_weight"] == pytest.approx(bits / 8, rel=1e-4)


def test_packing(tmp_path: Path, module: Any) -> None:
    result, _ = run(tmp_path, "--routine", "pack", "--experts", "2")
    rows = check(result)
    assert [row["method"] for row in rows] == module("methods").USUAL_METHODS
    assert all(row["first_touch_us"] > 0 and row["source_bytes"] > 0 for row in rows)


def test_loading(tmp_path: Path) -> None:
    result, printed = run(
        tmp_path,
        *(
            "--routine load --methods BF16 AMXINT4 FP8 --layers 2"
            " --sources BF16 FP32 FP8 --page-cache warm cold"
        ).split(),
    )
    rows = check(result)
    weights = 2 * 4 * 3 * 256 * 128
    bytes_of = {"BF16": 2, "FP32": 4, "FP8": 1}
    assert [(row["method"], row["source"], row["cache"]) for row in rows] == [
        (method, source, cache)
        for method, sources in (("BF16", bytes_of), ("AMXINT4", bytes_of), ("FP8", ["FP8"]))
        for source in sources
        for cache in ("warm", "cold")
    ]
    for row in rows:
        assert row["source_bytes"] == pytest.approx(weights * bytes_of[row["source"]], rel=0.05)
        assert row["anonymous_bytes"] >= 0
    assert "anonymous memory" in printed


def test_training(tmp_path: Path, module: Any) -> None:
    """Both sides do the same work, and the figures follow from it."""
    result, printed = run(
        tmp_path,
        *"--routine sft --methods AMXINT8_SFT FP8_SFT --ranks 8 --tokens 8 512".split(),
        *("--peft", "float32", "bfloat16, fused"),
    )
    rows = check(result, without="packed_bytes_per_weight")
    sides = [("kt_moe", "AMXINT8_SFT"), ("kt_moe", "FP8_SFT")]
    sides += [("peft", "float32"), ("peft", "bfloat16, fused")]
    assert [(r["package"], r["method"], r["tokens"], r["part"]) for r in rows] == [
        (*side, tokens, part)
        for side in sides
        for tokens in (8, 512)
        for part in ("step", "forward", "backward")
    ]
    of = {(r["method"], r["tokens"], r["part"]): r for r in rows}
    base, lora = 2 * 512 * 2 * 3 * 256 * 128, 2 * 512 * 2 * 3 * 8 * (256 + 128)
    for method in ("AMXINT8_SFT", "float32"):
        for part, operations in (("forward", base + lora), ("backward", base + 2 * lora)):
            row = of[method, 512, part]
            assert row["tera_ops_s"] * 1e12 == pytest.approx(operations / row["median_us"] * 1e6)
    peft = min((of[name, 512, "step"] for _, name in sides[2:]), key=lambda r: r["median_us"])
    ours = of["AMXINT8_SFT", 512, "step"]
    assert ours["times_faster_than_peft"] == peft["median_us"] / ours["median_us"]
    assert ours["memory_over_peft"] == ours["peak_bytes"] / peft["peak_bytes"]
    assert all(r["errors"]["y"] < 0.1 and r["peak_bytes"] > 0 for r in rows)
    assert "times faster than peft" in printed
    text = module("table").markdown(result)
    assert "| AMXINT8_SFT, T=512 |" in text and "| PEFT, float32, T=8 |" in text


def test_versions_in_training(tmp_path: Path) -> None:
    import kt_kernel

    out, package = tmp_path / "result.json", str(Path(kt_kernel.__file__).parents[1])
    args = "--table avx2 --methods AMXINT8_SFT --shape 4,64,32,2 --tokens 8 16 --rounds 1"
    done = subprocess.run(
        [
            *(sys.executable, FOLDER / "training_versions.py", package, package, "--json", out),
            *args.split(),
            *("--threads", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(r["tokens"], r["version"]) for r in rows] == [
        (tokens, version) for tokens in (8, 16) for version in ("before", "after")
    ]
    assert all(r["ms"]["step"] >= r["ms"]["forward"] + r["ms"]["backward"] * 0.5 for r in rows)
    of = {r["version"]: r["ms"]["step"] for r in rows if r["tokens"] == 16}
    line = next(line for line in done.stdout.splitlines() if "AMXINT8_SFT, T=16" in line)
    assert f"| {of['before']:.1f} | {of['after']:.1f} |" in line


def test_hybrid_training(tmp_path: Path) -> None:
    """On the CPU, where what it says of the GPU is left out."""
    out = tmp_path / "result.json"
    args = "--device cpu --shape 4,64,32,2 --tokens 8 --steps 1 --rank 4 --methods AMXINT8_SFT"
    done = subprocess.run(
        [sys.executable, FOLDER / "training_hybrid.py", *args.split(), "--json", out],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens_s"] == pytest.approx(8 / row["median_us"] * 1e6)
    # Of random weights: about the logarithm of the vocabulary's size.
    assert row["losses"] == pytest.approx([math.log(4096)] * 2, rel=0.1)


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    result, _ = run(
        tmp_path, "--methods", "BF16", "--tokens", "1", "--layers", "1", "--peer", str(tmp_path)
    )
    assert {row["package"] for row in check(result)} == {"kt_moe"}
    assert any("unpack the wheel" in note for note in result["notes"])


def test_the_budget_bounds_a_run(tmp_path: Path) -> None:
    """Asked for ten minutes a line, given none: every line is visited once and that is all."""
    result, _ = run(
        tmp_path,
        *"--methods BF16 --tokens 1 2 --layers 1 --seconds 600 --budget 0".split(),
    )
    assert [(row["rounds"], row["samples"]) for row in result["rows"]] == [(1, 1), (1, 1)]


def test_a_busy_machine_is_named(module: Any) -> None:
    busy_note = module("machine").busy_note
    assert busy_note(0.5, 2) is None and busy_note(4.0, 16) is None
    assert "load 13.0 on 2 CPUs" in busy_note(13.0, 2)


def test_an_expert_comes_back_after_all_others(module: Any) -> None:
    shapes = module("shapes")
    routing = shapes.Routing(shapes.Shape("", 32, 1, 1, 2), layers=3)
    last: dict[tuple[int, int], int] = {}
    visits = 0
    for tokens in (1, 2, 4, 1, 8, 2, 1, 4) * 20:
        layer, ids = routing.draw(tokens)
        assert ids.shape == (tokens, 2) and ids.is_contiguous() and ids.dtype == torch.int64
        for expert in ids.flatten().tolist():
            in_layer = last.setdefault((layer, -1), 0)
            assert (layer, expert) not in last or in_layer - last[layer, expert] == 32
            last[layer, expert] = in_layer
            last[layer, -1] += 1
            visits += 1
    assert visits > 3 * 32 and routing.touched(4) == 8
    _, ids = routing.draw(64)  # a token's experts differ
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert 20 < routing.touched(64) <= 32


def test_units_and_goals(module: Any) -> None:
    methods = module("methods")
    ceilings = {"avx512_fp32": 2.0, "avx512_bf16": 1.0}

    def unit(name: str, table: str) -> str:
        return methods.unit_of(methods.METHODS[name], table, ceilings)

    assert unit("AMXINT4", "amx") == "amx_int8" and unit("INT4_G32", "amx") == "amx_bf16"
    assert unit("AMXINT8", "avx2") == "avx2_int8_maddubs" and unit("NVFP4", "avx2") == "avx2_fp32"
    assert unit("BF16", "avx512_bf16") == "avx512_fp32"
    ceilings["avx512_bf16"] = 4.0
    assert unit("FP8", "avx512_bf16") == "avx512_bf16"
    assert unit("RAWINT4", "avx512_bf16") == "avx512_fp32"
    assert set(_C.kernel_tables()) <= methods.TABLES_BY_UNIT.keys()
    assert methods.goal_of("MXFP8", "amx", 8, 1) == 0.9
    assert methods.goal_of("MXFP8", "avx2", 8, 1) == 0.8
    assert methods.goal_of("AMXINT8", "avx2", 1, 1) == 0.9
    assert methods.goal_of("NVFP4", "avx2", 1, 1) == 0.75
    assert methods.goal_of("GPTQ_INT4", "avx512", 1, 1) == 0.85
    assert methods.goal_of("BF16", "amx", 16, 63) is None
    assert methods.goal_of("AMXINT4", "amx", 1024, 64) == 0.65
    assert methods.goal_of("INT4_G32", "amx", 1024, 64) == 0.5
    assert methods.goal_of("FP8", "avx512_vnni", 1024, 64) == 0.6


def row(**changes: Any) -> dict[str, Any]:
    return {
        "package": "kt_moe",
        "method": "BF16",
        "table": "amx",
        "tokens": 1,
        "threads": 2,
        "best_us": 90.0,
        "beside": "",
        "tokens_per_expert": 1.0,
        "median_us": 100.0,
        "share": 0.93,
        "unit": "amx_bf16",
        "layers": 1,
    } | changes


def test_tables_of_saved_results(module: Any) -> None:
    table, report = module("table"), module("report")
    rows = [
        row(),
        row(tokens=2, median_us=220.0, share=0.86),
        row(package="kt-kernel 0.7.2", share=0.6, median_us=120.0),
        row(beside="2 foreign", median_us=240.0),
    ]
    report.add_ratios(rows)
    report.add_fair_shares(rows, cpus=2)
    assert rows[0]["times_faster_than_peer"] == pytest.approx(1.2)
    assert rows[3]["share_of_fair"] == pytest.approx(100 / 240 / 0.5)
    memory = {"dram_read": [1e11, 1.2e11], "dram_copy": [4e10, 5e10]}
    content = {
        "routine": "layer",
        "date": "2026-01-02T03:04:05",
        "cpu": "A CPU",
        "cpus": 2,
        "notes": ["so"],
        "last_level_cache": 1 << 25,
        "rows": rows,
        "shape": {"name": "s", "experts": 8, "hidden": 4, "inter": 2, "top_k": 2},
        "ceilings": {
            "2": {"dram_read": 1.1e11, "dram_copy": 4.5e10, "amx_bf16": 1e13, "samples": memory}
        },
    }
    text = table.markdown(content)
    assert "| BF16 | 93% / 90% | **86% / 90%** |" in text
    assert "| BF16 | **1.20 / 1.25** |" in text
    assert "read 110 GB/s (samples over the run 100 to 120)" in text
    assert "BF16 T=2 +10% over T=1" in text and "\n- so\n" in text
    assert "| BF16 amx 2 threads T=1 | 2 foreign | 2.40 | 83% |" in text


def test_the_appendix_is_up_to_date(module: Any) -> None:
    page = FOLDER.parent / "docs/performance-tables.md"
    found = page.read_text()
    assert found == module("appendix").page(), f"run python benchmarks/appendix.py > {page}"
    saved = {path.name for path in (FOLDER / "results").glob("*.json")}
    saved = {name for name in saved if "-logprobs-" not in name}  # correctness, not speed
    saved -= {"registry-classes.json"}
    assert {name for name in saved if f"`{name}`" not in found} == set()


def test_the_support_table_is_up_to_date(module: Any) -> None:
    support, page = module("support"), FOLDER.parent / "docs/support-table.md"
    rows, refused = support.read(support.KEPT), support.read(support.REFUSED)
    wanted = support.page(rows, refused, json.loads(support.REGISTRIES.read_text()))
    assert page.read_text() == wanted, f"run python benchmarks/support.py > {page}"
    assert rows == support.add(rows, []), "run python benchmarks/support.py --add"
    assert all(row["control"] > 3 * row["mean"] for row in rows)
    whole = [row for row in rows if row.get("part", support.MODEL) == support.MODEL]
    served, unserved = (
        {(row["class"], row["engine"], row["device"]) for row in some} for some in (whole, refused)
    )
    assert served and not served & unserved


def test_results_of_a_run_replace_those_before(module: Any) -> None:
    support = module("support")
    row = {
        "class": "A",
        "engine": "vLLM 1",
        "device": "CPU",
        "experts": "16 bits",
        "hot": 3,
        "of": 8,
        "hot format": "engine",
        "graphs": False,
        "mean": 0.01,
        "stock": 0.0,
        "control": 1.5,
        "reference": "transformers",
    }
    other = row | {"engine": "SGLang 1", "device": "NVIDIA H200", "graphs": True, "stock": 0.02}
    stock = other | {"class": "B", "reference": "stock", "mean": 0.00001}
    rows = support.add([row, other], [row | {"mean": 0.25}, stock])
    assert len(rows) == 3
    text = support.page(rows, [], {"vLLM 2": ["A", "C"]})
    assert "| vLLM 2 | `C` |" in text
    assert "| class | vLLM 1, CPU | SGLang 1, H200 |" in text
    assert "| `A` | 0.25 (0) / 1.5 | 0.01† (0.02) / 1.5 |" in text
    assert "| `B` |  | 0\\*† (0.02) / 1.5 |" in text


def test_quoted_figures_are_up_to_date(module: Any) -> None:
    tables = module("readme_tables")
    for page in tables.PAGES:
        text = (FOLDER.parent / page).read_text()
        assert text == tables.rewritten(page, text), "run python benchmarks/readme_tables.py"


def test_outdated_figures_are_replaced(module: Any) -> None:
    """In tables and in sentences, whose line breaks stay. A sentence that is gone is an error."""
    tables = module("readme_tables")
    text = (FOLDER.parent / "README.md").read_text()
    changes = [("| 393 | 568 |", "| 393 | 569 |"), ("reaches 7 to 8%", "reaches 12.5 to 8%")]
    for right, wrong in [*changes, ("| Kimi-K2 | 1890 |", "| Kimi-K2 |")]:
        assert text.count(right) == 1
        assert tables.rewritten("README.md", text.replace(right, wrong)) == text
    with pytest.raises(ValueError, match=r"README.md has 'reaches .* 0 times; expected it once"):
        tables.rewritten("README.md", text.replace("reaches 7 to 8%", "has 7 to 8%"))
    with pytest.raises(ValueError, match="no table 'speed'; known: served"):
        tables.rewritten("README.md", text.replace("tables.py: served", "tables.py: speed"))


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "shares.png"
    run(
        tmp_path,
        *"--methods BF16 AMXINT8 --tokens 1 4 --layers 1 --plot".split(),
        str(picture),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_engine_plot(tmp_path: Path, module: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    saved = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("*-engine-*.json"))
    assert saved
    picture = tmp_path / "engines.png"
    module("engine_plot").main([str(picture), *map(str, saved)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "failed.json").write_text('{"rows": [{"name": "stock", "error": "why"}]}')
    with pytest.raises(SystemExit, match="nothing to plot"):
        module("engine_plot").main([str(picture), str(tmp_path / "failed.json")])


def test_engine_configurations(module: Any) -> None:
    """The engine's own offload leaves as many bytes on the GPU as ours."""
    engine = module("engine")
    common = ["--shape", "16,1024,512,4", "--layers", "3", "--hot", "0", "0.75", "--deferral"]
    model = Path("model")
    vllm = engine.configurations(engine.parse(["--engine", "vllm", *common, "0", "2"]), model)
    assert [one["name"] for one in vllm] == [
        "stock",
        "kt 0% hot, d=0",
        "kt 0% hot, d=2",
        "kt 75% hot, d=0",
        "kt 75% hot, d=2",
        "offload of 0.141 GiB",
        "offload of 0.0352 GiB",
    ]
    assert vllm[4]["arguments"] == {
        "kt": {
            "method": "BF16",
            "num_gpu_experts": 12,
            "max_deferred_experts_per_token": 2,
            "gpu_prefill_token_threshold": 0,
        }
    }
    given = [*common[:-2], "0.5:packed", "--deferral", "0"]
    packed = engine.configurations(engine.parse(["--engine", "vllm", "--no-stock", *given]), model)
    assert packed[1]["name"] == "kt 50% hot (packed), d=0" and packed[1]["hot"] == 0.5
    kt = packed[1]["arguments"]["kt"]
    assert (kt["num_gpu_experts"], kt["hot_format"]) == (8, "packed")
    cold = 3 * 4 * 3 * 1024 * 512 * 2  # layers, experts, matrices
    assert vllm[6]["arguments"] == {"cpu_offload_gb": cold / 2**30}
    sglang = engine.configurations(
        engine.parse(
            [
                *("--engine", "sglang", "--cpuinfer", "3", "--weight-path", "--no-stock"),
                *(*common, "1", "--streaming", "0", "512"),
            ]
        ),
        model,
    )
    assert sglang[1]["name"] == "kt 0% hot, d=1, streamed from 512 tokens"
    assert sglang[1]["arguments"] == {
        "kt": {
            "method": "BF16",
            "num_gpu_experts": 0,
            "max_deferred_experts_per_token": 1,
            "gpu_prefill_token_threshold": 512,
            "cpuinfer": 3,
            "weight_path": "model",
        }
    }
    assert sglang[4]["arguments"] == {"cpu_offload_gb": 1}
    for parts, names in (([], []), (["0.5"], ["offload of 0.0703 GiB"])):
        given = ["--engine", "vllm", "--no-stock", *common, "0", "--offload", *parts]
        found = [one["name"] for one in engine.configurations(engine.parse(given), model)]
        assert found == ["kt 0% hot, d=0", "kt 75% hot, d=0", *names]
    for wrong in (["--hot", "2"], ["--offload", "-1"], ["--deferral", "5"]):
        with pytest.raises(SystemExit):
            engine.parse(["--engine", "vllm", "--shape", "16,1024,512,4", *wrong])


def test_recorded_routes_replace_the_routers(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token in each layer, from the begin again after the last, without the prompts."""
    routes = module("route_table")
    record = generate(replace(NONE, experts=16, per_token=4), 7, 2)
    prompt = replace(record, passes=np.array([0, 0, 1, 2, 3, 4, 5]))
    prompt.save(tmp_path / "routes")
    given: list[torch.Tensor] = []
    monkeypatch.setattr(HybridLayer, "submit", lambda layer, x, ids, *rest: given.append(ids))
    monkeypatch.setenv(routes.VARIABLE, str(tmp_path / "routes"))
    routes.install_from_environment()
    layers = [SimpleNamespace(layer_idx=number, num_experts=16) for number in (3, 5, 6)]
    for tokens in (2, 2, 3):
        ids = torch.zeros(tokens, 4, dtype=torch.int32)
        for layer in layers[:2]:
            HybridLayer.submit(layer, ids, ids, None)  # type: ignore[arg-type]
    want = torch.from_numpy(record.routes[2:]).int()
    for layer in range(2):
        found = torch.cat(given[layer::2])
        assert found.dtype == torch.int32
        assert torch.equal(found, torch.cat([want, want[:2]])[:, layer])
    with pytest.raises(ValueError, match="2 layers"):
        HybridLayer.submit(layers[2], ids, ids)  # type: ignore[arg-type]
    engine = module("engine")
    alone = ["--engine", "vllm", "--no-stock", "--offload", "--layers", "2"]
    alone += ["--routes", str(tmp_path / "routes")]
    assert engine.parse([*alone, "--shape", "16,64,64,4"]).routes == tmp_path / "routes"
    for wrong in ([*alone, "--shape", "16,64,64,2"], [*alone[:2], *alone[-2:]], alone):
        with pytest.raises(SystemExit):
            engine.parse(wrong)


@pytest.mark.parametrize(("shard_bytes", "shards"), [(4 << 30, 3), (1, 9)])
def test_synthetic_checkpoints_are_those_of_transformers(
    shard_bytes: int, shards: int, tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor is the model's, of its shape; a second call writes nothing."""
    from transformers import Qwen3MoeForCausalLM

    monkeypatch.setattr(module("synthetic"), "SHARD_BYTES", shard_bytes)
    shape = module("shapes").parse_shape("4,128,64,2")
    path = module("synthetic").make(tmp_path / "model", shape, 2, 100)
    assert len(list(path.glob("*.safetensors"))) == shards  # one is the rest
    model, info = Qwen3MoeForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    experts = model.model.layers[1].mlp.experts
    assert not torch.equal(experts.down_proj[0], experts.down_proj[3])
    times = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    module("synthetic").make(path, shape, 2, 100)
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == times


def test_results_are_saved_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link stays, and what cannot be written leaves the result that was saved before."""
    monkeypatch.syspath_prepend(str(FOLDER))
    outputs = importlib.import_module("outputs")
    (tmp_path / "link").symlink_to("file")
    outputs.save_result(tmp_path / "link", {"rows": [1]})
    before = (tmp_path / "file").stat().st_ino
    with pytest.raises(TypeError):
        outputs.save_result(tmp_path / "link", {"rows": [object()]})
    assert json.loads((tmp_path / "file").read_text()) == {"rows": [1]}
    outputs.save_result(tmp_path / "link", {"rows": [1, 2]})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").stat().st_ino != before
    assert json.loads((tmp_path / "link").read_text()) == {"rows": [1, 2]}
