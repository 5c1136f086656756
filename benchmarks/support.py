"""Generates docs/support-table.md from the results of served models.

    python benchmarks/support.py > docs/support-table.md
    python benchmarks/support.py --add NEW.jsonl      adds results, replacing those of the same runs

Tests write NEW.jsonl if KT_RESULTS names it: test_model_classes.py and test_quantised_models.py of
tests/plugin on the CPU, test_gpu_classes.py and test_native.py on a GPU. `REFUSED` lists what a
stock engine said of a model that it does not serve, and `REGISTRIES`, by registry.py, what classes
the engines know.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from registry import DENSE
from saved import RESULTS
from table import grid

KEPT = RESULTS / "served-models.jsonl"
REFUSED = RESULTS / "unserved-models.jsonl"
REGISTRIES = RESULTS / "registry-classes.json"
PLAIN = "16 bits"
MODEL, LAYER = "model", "MoE layer"  # parts that were compared

Row = dict[str, Any]

HEAD = """\
# Support table

`python benchmarks/support.py` generates this page from `benchmarks/results/served-models.jsonl`,
which the tests write; do not edit it. [support.md](support.md) says what is supported.

Each model is tiny and random. It was served with kt options, and its log-probabilities were
compared with those of transformers in float32, on the engine's own text. A cell has the mean
distance, then that of the stock engine in brackets, then the control: the distance with wrong
experts, which must be far larger. The engines computed in float32 on the CPU and in bfloat16 on the
GPU; the cold experts of kt-moe round their inputs to bfloat16 on both. `0` is a distance below
0.00005.
"""

CLASSES = """\
Some experts hot, the rest cold, in 16 bits; or none hot, where the engine's kernels for the CPU
compute no experts of the class. The control lacks the cold experts. Where rounding turns a route,
one of the 24 tokens may be 1 or more away, and the mean 0.05 (Qwen3.5-MoE in vLLM 0.26, Sarvam in
SGLang 0.5.17). \\* compared with
the stock engine, which does not compute what transformers does. † in CUDA graphs. ‡ with routing,
sparse attention, attention with sinks, residual streams, rotary embeddings or descriptions of
batches by the test, because the engine has them on GPUs or on CPUs with AMX only, or in float32
where the engine has bfloat16 only, or without an encoder of images, or with a fault of the engine
mended ([details](support.md#classes)).
"""

LAYERS = """\
The engine does not serve these classes on the CPU. Their MoE layers were computed there alone: the
engine's own modules with gate, routing, shared and routed experts, on random inputs. Distances are
those of a token's output from that of transformers, relative to it. The control lacks the cold
experts. A start logs a warning if no whole model of the class was compared on a GPU either.
"""

QUANTISED = """\
Qwen3-MoE, and gpt-oss or DeepSeek-V4 where it says so, with experts in the named format and all
else in 16 bits. The control has each expert in the place of another one. † in CUDA graphs.
"""

UNSERVED = """\
The stock engine does not serve a tiny model of these classes there, so nothing could be compared.
With `--kt-allow-untested` they may work where the engine serves them, except those of which SGLang
only warns that parameters are not found or not initialized: with kt options, these are refused
([why](support.md#classes)). A message about the
configuration may come from a version of transformers that writes another one than the engine reads.
"""

UNTRIED = """\
Classes of the engines' registries whose code can build fused experts, of which no model was made
here. `kt model check` checks them where the engine serves them. Multimodal classes that build
whatever text model their configuration names are not counted.
"""

WITHOUT = """\
Classes that share files with the above, or name one of them, and build no fused experts in any
configuration.
"""


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(kept: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows, sorted; new ones replace those of the same run."""
    found = {_run(row): row for row in (*kept, *new)}
    return [found[key] for key in sorted(found)]


def _run(row: Row) -> tuple[str, ...]:
    names = ("class", "experts", "engine", "device", "hot", "hot format", "graphs", "part")
    return tuple(str(row.get(name, MODEL if name == "part" else None)) for name in names)


def page(rows: list[Row], refused: list[Row], registries: dict[str, list[str]]) -> str:
    layers = [row for row in rows if row.get("part") == LAYER]
    rows = [row for row in rows if row not in layers]
    classes = _one_a_class([row for row in rows if row["experts"] == PLAIN])
    quantised = [row for row in rows if row not in classes and row["experts"] != PLAIN]
    packed = [row for row in rows if row["hot format"] == "packed" and row["experts"] == PLAIN]
    parts = [
        HEAD,
        "## Model classes\n",
        CLASSES,
        _by_engine("class", classes, lambda row: f"`{row['class']}`", hot=False),
        "\n## MoE layers alone\n",
        LAYERS,
        _by_engine("class", layers, lambda row: f"`{row['class']}`", hot=True),
        "\n## Quantised experts\n",
        QUANTISED,
        _by_engine("experts", [*quantised, *packed], lambda row: row["experts"], hot=True),
        "\n## Classes that the engines do not serve\n",
        UNSERVED,
        grid(
            "class",
            ["engine", "device", "what the engine said"],
            [
                (f"`{row['class']}`", [row["engine"], row["device"], _code(row["said"])])
                for row in refused
            ],
        ),
        "\n## Classes that were not tried\n",
        UNTRIED,
        grid("engine", ["classes"], _untried([*rows, *layers, *refused], registries)),
        "\n## Classes without fused experts\n",
        WITHOUT,
        grid(
            "engine",
            ["classes"],
            [
                (engine.removesuffix(DENSE), [_classes(names)])
                for engine, names in registries.items()
                if engine.endswith(DENSE)
            ],
        ),
    ]
    return "\n".join(parts) + "\n"


def _one_a_class(rows: list[Row]) -> list[Row]:
    """Rows with hot experts in the engine's format, and with none where an engine has no others."""
    hot = [row for row in rows if row["hot format"] == "engine"]
    places = {_place(row) for row in hot}
    return hot + [row for row in rows if not row["hot"] and _place(row) not in places]


def _place(row: Row) -> tuple[str, str, str]:
    return row["class"], row["engine"], row["device"]


def _untried(rows: list[Row], registries: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """For each version of an engine, the classes that were tried with no version of it. Of older
    versions, the classes without experts are those of newer ones."""
    lines = []
    for engine, names in registries.items():
        if engine.endswith(DENSE):
            continue
        of = engine.split()[0]
        known = {row["class"] for row in rows if row["engine"].split()[0] == of}
        for other, dense in registries.items():
            if other.startswith(of) and other.endswith(DENSE):
                known |= {*dense}
        if left := [name for name in names if name not in known]:
            lines.append((engine, [_classes(left)]))
    return lines


def _classes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _by_engine(corner: str, rows: list[Row], name: Any, hot: bool) -> str:
    """One line per name, one column per engine and device."""
    columns = sorted({(row["device"] != "CPU", row["engine"], row["device"]) for row in rows})
    lines = []
    for title in sorted({name(row) for row in rows}):
        cells = []
        for _, engine, device in columns:
            found = [
                row
                for row in rows
                if (name(row), row["engine"], row["device"]) == (title, engine, device)
            ]
            cells.append("<br>".join(_cell(row, hot) for row in found))
        lines.append((title, cells))
    heads = [f"{engine}, {_short(device)}" for _, engine, device in columns]
    return grid(corner, heads, lines)


def _cell(row: Row, hot: bool) -> str:
    title = ""
    if hot or not row["hot"]:
        count = "none" if row["hot"] == 0 else "all" if row["hot"] == row["of"] else "some"
        title = f"{count} hot" + (f" ({row['hot format']})" if row["hot"] else "") + ": "
    marks = ("\\*" if row["reference"] == "stock" else "") + ("†" if row["graphs"] else "")
    marks += "‡" if row.get("stand-in") else ""
    stock = "" if row["stock"] is None else f" ({_figure(row['stock'])})"
    return f"{title}{_figure(row['mean'])}{marks}{stock} / {_figure(row['control'])}"


def _figure(value: float) -> str:
    return "0" if value < 5e-5 else f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ")


def _code(said: str) -> str:
    return "`" + textwrap.shorten(said, 140, placeholder=" …").replace("|", "\\|") + "`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, help="results to add; prints no page")
    given = parser.parse_args()
    if given.add is None:
        print(page(read(KEPT), read(REFUSED), json.loads(REGISTRIES.read_text())), end="")
        return
    rows = add(read(KEPT) if KEPT.exists() else [], read(given.add))
    KEPT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
