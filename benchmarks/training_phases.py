"""Tables of training steps from saved results: where the time goes, and with attention on a GPU.

The share of a phase of products is that of the tile unit's rate with one tile load from the
first-level cache for each product (``amx_bf16_fed`` or ``amx_int8_fed`` of roofline.cpp), scaled to
the layer's threads.
"""

from __future__ import annotations

from typing import Any

from saved import Content
from table import grid, machine_and_layer

# Phases of products: the column, the matrices of H x I that it multiplies with, and the direction.
PRODUCTS = {
    "gate_up": ("gate, up", 2, "forward"),
    "down": ("down", 1, "forward"),
    "inter": ("by columns of I", 1, "backward"),
    "input": ("by columns of H", 2, "backward"),
}


def training_phases(content: Content) -> str:
    """Milliseconds of each part of a step, and shares of the unit's rate in parentheses."""
    shape = content["shape"]
    columns = ["step"]
    for direction in ("forward", "backward"):
        columns += [name for name, _, of in PRODUCTS.values() if of == direction]
        columns.append(f"rest of {direction}")
    columns += ["AdamW", "update"]
    lines = []
    for row in content["rows"]:
        ms = row["ms"]
        cells = [f"{ms['step']:.1f}"]
        for direction in ("forward", "backward"):
            rest = ms[direction]
            for phase, (_, matrices, of) in PRODUCTS.items():
                if of != direction:
                    continue
                rest -= ms[phase]
                work = 2 * row["tokens"] * shape["top_k"] * matrices
                work *= shape["hidden"] * shape["inter"]
                integer = direction == "forward" and row["integer"]
                fed = content["fed"]["int8" if integer else "bf16"]
                share = work / (ms[phase] * 1e-3) / (fed * content["threads"] / content["cpus"])
                cells.append(f"{ms[phase]:.1f} ({share:.0%})")
            cells.append(f"{rest:.1f}")
        cells += [f"{ms['adamw']:.1f}", f"{ms['update']:.1f}"]
        lines.append((f"{row['method']}, T={row['tokens']}, {row['version']}", cells))
    return f"{machine_and_layer(content)}\n\n" + grid("ms", columns, lines)


def training_ablation(content: Content) -> str:
    """What parts of a step take: milliseconds of the usual step, and ratios to it of variants."""
    parts = "step", "forward", "backward", "gate_up", "down", "inter", "input"
    columns = [PRODUCTS[part][0] if part in PRODUCTS else part for part in parts]
    tables = [machine_and_layer(content)]
    for method in dict.fromkeys(row["method"] for row in content["rows"]):
        lines = []
        for row in content["rows"]:
            if row["method"] != method:
                continue
            if "ratio" not in row:
                lines.append(("ms of a step", [f"{row['ms'][part]:.1f}" for part in parts]))
                continue
            what = f"{row['variant']}: {content['variants'][row['variant']]}"
            lines.append((what, [f"{row['ratio'][part]:.2f}" for part in parts]))
        tables.append(grid(method, columns, lines))
    return "\n\n".join(tables)


def training_hybrid(content: Content) -> str:
    """Training steps with attention on a GPU and the experts' LoRA on the CPU."""

    def name(row: dict[str, Any]) -> str:
        hot = f", {row['hot']} experts on the GPU" if row.get("hot") else ""
        return f"{row['method']}{hot}, T={row['tokens']}"

    lines = [
        (
            name(row),
            [
                f"{row['tokens_s']:.0f}",
                f"{row['median_us'] / 1e3:.0f} ms",
                f"{row['gpu_waits']:.0%}",
            ],
        )
        for row in content["rows"]
    ]
    shape = content["shape"]
    return (
        f"{content['gpu']}, {content['cpus']} virtual CPUs ({content['cpu']}), "
        f"{content['layers']} layers with E={shape['experts']} H={shape['hidden']} "
        f"I={shape['inter']} k={shape['top_k']}, rank {content['rank']}. {content['date'][:10]}."
        "\n\n" + grid("step", ["tokens/s", "median", "GPU idle"], lines)
    )
