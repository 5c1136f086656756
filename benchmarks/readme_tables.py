"""Writes the figures in README.md and docs/performance.md, from the saved results.

    python benchmarks/readme_tables.py

A table is generated between the comments `<!-- readme_tables.py: NAME -->` and `<!-- end -->`. In
sentences, only the figures are replaced; quoted.py lists the sentences. All other figures in these
pages are not from the saved results.
"""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

from published import MODELS, expert_bytes
from quoted import PEER, PERFORMANCE, README, STOCK_PEER, VLLM, Quote, quotes
from saved import rows
from table import grid

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = (README, PERFORMANCE)
FIGURE = r"(\d+(?:[.,]\d+)*%?)"

PEERS = (  # engine, experts, row of the result
    ("SGLang 0.5.17", "all on the GPU", STOCK_PEER),
    ("+ kt-moe", "AMXINT8, 50% hot", "kt-moe, AMXINT8, 50% hot"),
    ("kt-kernel 0.7.2", "AMXINT8, 50% hot", "kt-kernel, AMXINT8, 50% hot"),
    ("+ kt-moe", "AMXINT8, none hot", "kt-moe, AMXINT8, none hot"),
    ("kt-kernel 0.7.2", "AMXINT8, none hot", "kt-kernel, AMXINT8, none hot"),
    ("+ kt-moe", "BF16, none hot", "kt-moe, BF16, none hot"),
    ("kt-kernel 0.7.2", "BF16, none hot", "kt-kernel, BF16, none hot"),
    (
        "kt-kernel 0.7.2",
        "the same, prefill on the GPU",
        "kt-kernel, BF16, none hot, prefill on the GPU from 1,024 tokens",
    ),
)
VLLMS = (
    ("vLLM 0.26.0", "all on the GPU", "stock"),
    ("+ kt-moe", "AMXINT8, 75% hot", "kt 75% hot, d=0"),
    ("its `--cpu-offload-gb 2.25`", "BF16, in equal memory", "offload of 2.25 GiB"),
    ("+ kt-moe", "AMXINT8, none hot", "kt 0% hot, d=0"),
    ("its `--cpu-offload-gb 9`", "BF16, in equal memory", "offload of 9 GiB"),
)
PROMPTS = ("128", "2048", "8192")


def served() -> str:
    """Speed and GPU memory of the engines, with and without kt-moe, and of kt-kernel."""
    lines = []
    for engine, experts, name in PEERS:
        row = rows(PEER)[name]
        times = [f"{time} ms".replace("at most", "≤") for time in row["first_token_ms"]]
        rates = [f"{row['decode_tokens_s'][i]:.0f}" for i in (0, 2)]
        lines.append((engine, [experts, f"{row['gpu_gb'] * 1e9 / 2**30:.1f} GB", *rates, *times]))
    for engine, experts, name in VLLMS:
        row = rows(VLLM)[name]
        seconds = row["first_token_seconds"]
        times = [f"{1e3 * seconds[n]:.0f} ms" if n in seconds else "" for n in PROMPTS]
        rates = [f"{row['decode_tokens_s'][n]:.0f}" for n in ("1", "16")]
        lines.append((engine, [experts, f"{row['gpu_bytes'] / 2**30:.1f} GB", *rates, *times]))
    columns = ["experts", "GPU memory", "decode, 1", "decode, 16"]
    return grid("engine", [*columns, "prompt of 128", "2,048", "8,192"], lines)


def memory() -> str:
    """CPU memory of all routed experts."""
    columns = {
        "BF16": "BF16",
        "FP8, AMXINT8": "AMXINT8",
        "INT4_G32, RAWINT4 (g32)": "INT4_G32",
        "AMXINT4": "AMXINT4",
    }
    lines = []
    for name, (layers, shape) in MODELS.items():
        experts = layers * shape.experts
        sizes = [experts * expert_bytes(method, shape) / 2**30 for method in columns.values()]
        lines.append((name, [f"{size:.0f}" for size in sizes]))
    return grid("model", list(columns), lines)


def limits() -> str:
    """What memory bandwidth allows in decode."""
    lines = []
    for name, method, title in (
        ("Qwen3-30B-A3B", "INT4_G32", "INT4_G32"),
        ("Qwen3-235B-A22B", "INT4_G32", "INT4_G32"),
        ("DeepSeek-V3", "FP8", "FP8"),
        ("DeepSeek-V3", "INT4_G32", "INT4_G32"),
        ("Kimi-K2", "RAWINT4", "RAWINT4 (groups of 32)"),
    ):
        layers, shape = MODELS[name]
        read = layers * shape.top_k * expert_bytes(method, shape)
        rates = [bandwidth / read for bandwidth in (100e9, 400e9)]
        cells = [f"{rate:.1f} tokens/s" if rate < 10 else f"{rate:.0f} tokens/s" for rate in rates]
        lines.append((f"{name}, {title}", [f"{read / 1e9:.1f} GB", *cells]))
    columns = ["CPU reads per token", "limit at 100 GB/s", "limit at 400 GB/s"]
    return grid("no expert hot, one stream", columns, lines)


TABLES = {"served": served, "memory": memory, "limits": limits}
_TABLE = re.compile(r"(<!-- readme_tables\.py: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def rewritten(page: str, text: str) -> str:
    """The text of a page with the figures of the saved results.

    Raises ValueError if a quoted sentence is not in the page exactly once, or a table is unknown.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"{page}: no table {match[2]!r}; known: {', '.join(TABLES)}")
        return match[1] + TABLES[match[2]]() + match[3]

    text = _TABLE.sub(table, text)
    for quote in quotes():
        if quote.page == page:
            text = _with_figures(text, quote)
    return text


def _with_figures(text: str, quote: Quote) -> str:
    pattern, specs = "", []
    for literal, field, spec, _ in Formatter().parse(quote.text):
        pattern += re.sub(r"(?:\\ )+", lambda _: r"\s+", re.escape(literal))
        if field is not None:
            pattern += FIGURE
            specs.append(spec or "")
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ValueError(f"{quote.page} has {quote.text!r} {len(found)} times; expected it once")
    match = found[0]
    for number in range(len(specs), 0, -1):
        figure = format(quote.figures[number - 1], specs[number - 1])
        text = text[: match.start(number)] + figure + text[match.end(number) :]
    return text


def main() -> None:
    for page in PAGES:
        path = REPOSITORY / page
        path.write_text(rewritten(page, path.read_text()))


if __name__ == "__main__":
    main()
