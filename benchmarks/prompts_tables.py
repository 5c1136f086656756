"""Tables of saved prompts for appendix.py: of prompts.py and prompts_turns.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from saved import Content
from stream_modes import CPU, NO_COPIES, SHARED, STREAMED
from table import engine_name, grid, sentence

MODES = (CPU, STREAMED, SHARED, NO_COPIES)
COLUMNS = ("CPU alone", "streamed", "shared", "GPU alone", "bound", "bound / shared")


def prompts(content: Content) -> str:
    """Time to the first token by where cold experts are computed, from prompts.py."""
    lines = [line for row in content["rows"] for line in _lines(row)]
    return (
        f"{engine_name(content['engine'])}, {_machine(content)}. Medians of {content['rounds']}, "
        "ms.\n\n" + grid("", COLUMNS, lines)
    )


def in_turns(content: Content) -> str:
    """The same of prompts_turns.py, whose engines may be of both kinds, and others."""
    served = [row for row in content["rows"] if row["prompts"]]
    parts = [f"{sentence(_machine(content))} Medians, ms."]
    for engine in dict.fromkeys(row["engine"] for row in served):
        lines = [
            (name, [_begin(row), *cells])
            for row in served
            if row["engine"] == engine and row["method"] is not None
            for name, cells in _lines(row)
        ]
        parts.append(grid(engine_name(engine), ["streamed from", *COLUMNS], lines))
    for group in dict.fromkeys(row["group"] for row in served if row["method"] is None):
        inside = [row for row in served if row["group"] == group]
        lengths = list(dict.fromkeys(n for row in inside for n in row["prompts"]))
        lines = [(row["name"], [_range(row, n) for n in lengths]) for row in inside]
        parts.append(grid("side by side", [f"{int(n):,} tokens" for n in lengths], lines))
    apart = [
        (f"{row['name']}: {mode}, from {other}", [f"{value:.4f}"])
        for row in content["rows"]
        for other, found in row.get("distances", {}).items()
        for mode, value in found.items()
    ]
    if apart:
        parts.append(grid("log-probabilities", ["mean distance"], apart))
    logged = [
        (
            f"{row['name']}, {int(tokens):,} tokens",
            [" + ".join(f"{ms:.0f}" for ms in one) for one in layers],
        )
        for row in content["rows"]
        for tokens, layers in row.get("layers_ms", {}).items()
    ]
    if logged:
        columns = [f"layer {number}" for number in range(content["layers"])]
        parts.append(
            "By its own log, what kt-kernel's GPU prefill takes for a layer's experts: the "
            "weights, and the products. The first prompts compile kernels in layer 0."
        )
        parts.append(grid("ms", columns, logged))
    failed = [f"- {row['name']}: {_last_line(row)}" for row in content["rows"] if "error" in row]
    return "\n\n".join([*parts, "\n".join(failed)])


def beside_peer(content: Content) -> str:
    """Time to the first token next to kt-kernel, with all rounds."""
    lines = [
        (
            row["name"],
            [
                f"{row['gpu_gb'] * 1e9 / 2**30:.1f} GB",
                *(
                    f"{1e3 * median(times):.0f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
                    for times in row["first_token_seconds"].values()
                ),
            ],
        )
        for row in content["rows"]
    ]
    columns = [f"{int(n):,} tokens, ms" for n in content["rows"][0]["first_token_seconds"]]
    versions = "; ".join(f"{name}: {version}" for name, version in content["versions"].items())
    return (
        f"{sentence(content['model'])} {content['gpu']}, {content['cpus']} virtual CPUs "
        f"({content['cpu']}). {sentence(versions)} {content['date']}. Medians, and ranges.\n\n"
        + grid("engine", ["GPU memory", *columns], lines)
        + f"\n\n- {sentence(content['what'])}"
    )


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The name and the cells of each length of a configuration."""
    bus = row.get("rates", {}).get("bus_seconds")
    for tokens, modes in row["prompts"].items():
        times = {mode: median(found["seconds"]) for mode, found in modes.items()}
        cells = [_milliseconds(times.get(mode)) for mode in MODES]
        if bus is None or NO_COPIES not in times:
            cells += ["", ""]
        else:
            # An engine reads a layer's experts once for each of its chunks.
            bound = max(bus * -(-int(tokens) // 8192), times[NO_COPIES])
            cells += [_milliseconds(bound), f"{bound / times[SHARED]:.0%}"]
        name = (
            row["method"] if row["method"] == "stock" else f"{row['method']}, {row['hot']:.0%} hot"
        )
        yield f"{name}, {int(tokens):,} tokens", cells


def _range(row: dict[str, Any], tokens: str) -> str:
    """Milliseconds of a prompt in the mode that is not chosen by a benchmark."""
    modes = row["prompts"].get(tokens, {})
    if not modes:
        return ""
    times = modes.get(SHARED, next(iter(modes.values())))["seconds"]
    return f"{1e3 * median(times):.0f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"


def _begin(row: dict[str, Any]) -> str:
    return f"{row.get('rates', {}).get('threshold', '')}"


def _machine(content: Content) -> str:
    ranks = [
        row["arguments"].get(name)
        for row in content["rows"]
        for name in ("tensor_parallel_size", "tp_size")
        if "arguments" in row
    ]
    gpus = "Two H200" if 2 in ranks else "One H200"
    return (
        f"{content['layers']} layers of {content['shape']['name']}'s shape. {gpus}, "
        f"{content['cpus']} virtual CPUs ({content['cpu']}). {content['date'][:10]}"
    )


def _last_line(row: dict[str, Any]) -> str:
    """Of an error."""
    return str(row["error"]).strip().splitlines()[-1].strip()


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"
