"""The figures that sentences in README.md and docs/performance.md quote, from the saved results.

readme_tables.py writes them to the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from methods import goal_of
from published import MODELS, expert_bytes
from saved import load, rows
from shapes import SHAPES

README, PERFORMANCE = "README.md", "docs/performance.md"

VLLM = "2026-11-28-engine-vllm-h200"
VLLM_DEEPSEEK = "2026-11-28-engine-vllm-deepseek-v3-h200"
PEER = "2026-11-28-peer-served-h200"
PROMPTS = "2026-11-29-prompts-vllm-h200"
BESIDE_PEER = "2026-11-29-beside-peer-sglang-h200"
AMX = "2026-11-28-formats-amx"
STREAMS = ("1", "4", "16")
STOCK_PEER = "stock, all experts on the GPU"
# Methods for which kt-kernel has AMX kernels, too.
BOTH_AMX = ("BF16", "AMXINT8", "AMXINT4")


class Quote(NamedTuple):
    """A part of a sentence that quotes figures.

    page: its path in the repository. text: a format string for the figures. Line breaks in the page
    may differ.
    """

    page: str
    text: str
    figures: Sequence[float | str]


def quotes() -> Iterator[Quote]:
    yield from _served()
    yield from _streamed()
    yield from _accuracy_and_memory()
    yield from _one_layer()
    yield from _packing_and_loading()


def _ratios(name: str, other: str) -> list[float]:
    speed, base = (rows(VLLM)[one]["decode_tokens_s"] for one in (name, other))
    return [speed[n] / base[n] for n in STREAMS]


def _peer(name: str, field: str) -> list[Any]:
    return rows(PEER)[name][field]


def _times_of_peer(*settings: str) -> list[float]:
    """The least and the largest ratio of decode speeds, kt-moe to kt-kernel."""
    found = [
        ours / theirs
        for setting in settings
        for ours, theirs in zip(
            _peer(f"kt-moe, {setting}", "decode_tokens_s"),
            _peer(f"kt-kernel, {setting}", "decode_tokens_s"),
            strict=True,
        )
    ]
    return _range(found)


def _range(values: Iterable[float]) -> list[float]:
    found = list(values)
    return [min(found), max(found)]


def _served() -> Iterator[Quote]:
    vllm, none_hot = rows(VLLM)["stock"], rows(VLLM)["kt 0% hot, d=0"]
    peer_none = "kt-moe, AMXINT8, none hot"
    prompts = _range(
        [
            none_hot["first_token_seconds"]["8192"] / vllm["first_token_seconds"]["8192"],
            _peer(peer_none, "first_token_ms")[2] / _peer(STOCK_PEER, "first_token_ms")[2],
        ]
    )
    on_gpu = "kt-kernel, BF16, none hot, prefill on the GPU from 1,024 tokens"
    gpu_prefill = (
        _peer("kt-moe, BF16, none hot", "first_token_ms")[2] / _peer(on_gpu, "first_token_ms")[2]
    )
    many = _range(
        [
            none_hot["decode_tokens_s"]["16"] / vllm["decode_tokens_s"]["16"],
            _peer(peer_none, "decode_tokens_s")[2] / _peer(STOCK_PEER, "decode_tokens_s")[2],
        ]
    )
    text = "tokens takes {:.0f} to {:.0f} times as long as with all experts on the GPU"
    yield Quote(README, text, prompts)
    text = "reaches {:.0f} to {:.0%} of the speed with all experts on the GPU"
    yield Quote(README, text, [100 * many[0], many[1]])
    text = "8,192 tokens take {:.0f} times (vLLM) to {:.0f} times (SGLang) as long"
    yield Quote(PERFORMANCE, text, prompts)
    yield Quote(
        PERFORMANCE, "then {:.1f} times as fast as kt-moe (BF16) without streaming", [gpu_prefill]
    )

    text = (
        "vLLM 0.26.0 decodes {:.1f}, {:.1f} and {:.1f} times as fast as its own"
        " `--cpu-offload-gb` with the same GPU memory and no hot expert (1, 4 and 16 streams), and"
        " {:.1f}, {:.1f} and {:.1f} times as fast with 75% of the experts hot"
    )
    none, most = (
        _ratios("kt 0% hot, d=0", "offload of 9 GiB"),
        _ratios("kt 75% hot, d=0", "offload of 2.25 GiB"),
    )
    yield Quote(PERFORMANCE, text, none + most)
    text = (
        "SGLang 0.5.17 decodes {:.1f} to {:.1f} times as fast as kt-kernel 0.7.2 in its fork of"
        " SGLang, with the same format and hot experts; {:.1f} to {:.1f} times with AMXINT4,"
        " {:.1f} to {:.1f} times with BF16"
    )
    int8 = _times_of_peer("AMXINT8, none hot", "AMXINT8, 50% hot")
    others = _times_of_peer("AMXINT4, none hot") + _times_of_peer("BF16, none hot")
    yield Quote(PERFORMANCE, text, int8 + others)
    yield from _steady()

    deepseek = rows(VLLM_DEEPSEEK)["kt 0% hot, d=0"]["decode_tokens_s"]["1"]
    layers, shape = load(VLLM_DEEPSEEK)["layers"], SHAPES["deepseek-v3"]
    read = layers * shape.top_k * expert_bytes("AMXINT8", shape)
    text = "read {:.0f} MB of experts per token in {:.1f} ms, which is {:.0f} GB/s"
    yield Quote(PERFORMANCE, text, [read / 1e6, 1e3 / deepseek, read * deepseek / 1e9])

    text = "vLLM takes {:.1f} ms per token with all experts on the GPU and {:.1f} with none"
    milliseconds = [1e3 / row["decode_tokens_s"]["1"] for row in (vllm, none_hot)]
    yield Quote(PERFORMANCE, text, milliseconds)
    # The experts that 16 tokens choose, if every expert is equally likely.
    shape = SHAPES["qwen3-30b-a3b"]
    chosen = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** 16)
    read = chosen * expert_bytes("AMXINT8", shape)
    seconds = 16 / none_hot["decode_tokens_s"]["16"] / load(VLLM)["layers"]
    text = "reads about {:.0f} MB in {:.1f} ms, {:.0f} GB/s"
    yield Quote(PERFORMANCE, text, [read / 1e6, 1e3 * seconds, read / seconds / 1e9])
    yield from _padding_and_deferral()


def _streamed() -> Iterator[Quote]:
    prompts = {row["method"]: row["prompts"]["8192"] for row in load(PROMPTS)["rows"]}
    ours, stock = prompts["INT4_G32"], prompts["stock"]
    vllm = [ours["shared"], ours["cpu"], stock["shared"]]
    figures = [1e3 * median(one["seconds"]) for one in vllm]
    sglang = {row["name"]: row["first_token_seconds"]["8192"] for row in load(BESIDE_PEER)["rows"]}
    figures += [1e3 * median(sglang[f"{name}, BF16"]) for name in ("kt-moe", "kt-kernel")]
    text = (
        "8 layers take {:.0f} in place of {:,.0f} ms (vLLM, INT4_G32, no hot expert; {:.0f} with"
        " all experts on the GPU), and in BF16 {:.0f} ms where kt-kernel's GPU prefill takes {:.0f}"
        " (SGLang)"
    )
    yield Quote(README, text, figures)
    yield Quote(PERFORMANCE, text, figures)


def _steady() -> Iterator[Quote]:
    worst = []
    for engine in ("sglang", "vllm"):
        content = load(f"2026-11-29-steady-reserves-{engine}-h200")
        found = content["tokens_per_second"]["now"]
        worst.append(found["worst_of_median"])
    text = (
        "of {} rounds of {} tokens, the slowest has {:.0%} of the median in SGLang and {:.0%} in"
        " vLLM"
    )
    given = [len(found["rounds"]), content["steps"]]
    yield Quote(PERFORMANCE, text, [*given, *worst])
    text = "of {} rounds, the slowest has {:.0%} of the median in SGLang and {:.0%} in vLLM"
    yield Quote(README, text, [given[0], *worst])


def _padding_and_deferral() -> Iterator[Quote]:
    skipped, computed = (
        rows(f"2026-11-28-engine-vllm-padding-{part}h200")["kt 0% hot, d=0"]
        for part in ("", "computed-")
    )
    text = "leaving them out gave {:.0f} tokens/s instead of {:.0f}"
    speeds = [row["decode_tokens_s"]["9"] for row in (skipped, computed)]
    yield Quote(PERFORMANCE, text, speeds)
    steps = load("2026-11-28-engine-vllm-padding-h200")["steps"]
    overlap = [
        int(n) * steps / seconds
        for n in ("3", "5")
        for row in (skipped, computed)
        for seconds in (max(row["decode"][n]), min(row["decode"][n]))
    ]
    text = (
        "({:.0f} to {:.0f} against {:.0f} to {:.0f}, and {:.0f} to {:.0f} against {:.0f} to {:.0f})"
    )
    yield Quote(PERFORMANCE, text, overlap)

    traced = rows("2026-11-28-engine-vllm-deferral-h200")
    four, none = (traced[f"kt 75% hot, d={d}"]["decode_tokens_s"] for d in (4, 0))
    text = (
        "deferring 4 experts gave {:.0f} instead of {:.0f} tokens/s with one stream, {:.0f}"
        " instead of {:.0f} with 4, and {:.0f} instead of {:.0f} with 16"
    )
    yield Quote(PERFORMANCE, text, [row[n] for n in STREAMS for row in (four, none)])
    shares: dict[int, float] = {}
    for found in load("2026-11-28-trace-vllm-h200")["traces"].values():
        for row in found:
            shares[row["tokens"]] = max(shares.get(row["tokens"], 0), row["share"])
    text = "At most {:.0f}, {:.0f} and {:.0%} of the possible overlap"
    yield Quote(PERFORMANCE, text, [100 * shares[1], 100 * shares[4], shares[16]])


def _accuracy_and_memory() -> Iterator[Quote]:
    change = {
        row["experts"]: row["change"] for row in load("2026-11-28-perplexity-methods")["rows"]
    }
    text = "rises by {:.2%} with AMXINT8, {:.2%} with INT4_G32 and {:.2%} with AMXINT4"
    yield Quote(README, text, [change[m] for m in ("AMXINT8", "INT4_G32", "AMXINT4")])
    measured = {row["method"]: row["packed_bytes_per_weight"] for row in load(AMX)["rows"]}
    smaller = 1 - measured["AMXINT4"] / measured["INT4_G32"]
    yield Quote(README, "`AMXINT4` is {:.0%} smaller than `INT4_G32`", [smaller])
    yield Quote(PERFORMANCE, "AMXINT4 reads {:.0%} less", [smaller])
    hot = [
        model.layers * expert_bytes("BF16", model.shape) / 2**30
        for model in (MODELS["Qwen3-30B-A3B"], MODELS["DeepSeek-V3"])
    ]
    text = "one hot expert per layer is {:.2f} GB for Qwen3-30B-A3B and {:.1f} GB for DeepSeek-V3"
    yield Quote(README, text, hot)


def _one_layer() -> Iterator[Quote]:
    ours = [row for row in load(AMX)["rows"] if row["package"] == "kt_moe"]
    decode = [row for row in ours if row["tokens"] <= 8]
    prefill = [row for row in ours if row["tokens"] >= 512]

    def percent(found: Iterable[dict[str, Any]]) -> list[float]:
        least, most = _range(row["share"] for row in found)
        return [100 * least, most]

    def times(found: Iterable[dict[str, Any]]) -> list[float]:
        return _range(r["times_faster_than_peer"] for r in found if "times_faster_than_peer" in r)

    text = "reach {:.0f} to {:.0%} of the measured read bandwidth at one token per batch"
    yield Quote(PERFORMANCE, text, percent(row for row in ours if row["tokens"] == 1))
    (ceilings,) = load(AMX)["ceilings"].values()
    text = "moved between {:.0f} and {:.0f} GB/s within one run"
    yield Quote(PERFORMANCE, text, [x / 1e9 for x in _range(ceilings["samples"]["dram_read"])])
    text = "with AMX kernels is at {:.0f} to {:.0%} of t_min and meets its goals"
    yield Quote(PERFORMANCE, text, percent(decode))
    missed = [
        (goal - row["share"], row["tokens"])
        for row in decode
        if (goal := goal_of(row["method"], "amx", row["tokens"], 1)) and row["share"] < goal
    ]
    text = "or misses them by up to {:.0f} points at one or two tokens"
    yield Quote(PERFORMANCE, text, [100 * max(missed)[0]])
    assert {tokens for _, tokens in missed} <= {1, 2}
    yield Quote(PERFORMANCE, "It is {:.1f} to {:.1f} times as fast as kt-kernel", times(decode))
    text = "with AMX kernels is at {:.0f} to {:.0%} of t_min and misses its goals"
    yield Quote(PERFORMANCE, text, percent(prefill))
    text = (
        "It is still {:.1f} to {:.1f} times as fast as kt-kernel in BF16, AMXINT8 and AMXINT4, and"
        " {:.0f} to {:.0f} times as fast in the other formats"
    )
    parts = [[r for r in prefill if (r["method"] in BOTH_AMX) == both] for both in (True, False)]
    yield Quote(PERFORMANCE, text, times(parts[0]) + times(parts[1]))

    long = [row for row in ours if row["tokens"] == 2048]
    floats, integers = (
        [row for row in long if row["unit"] == unit] for unit in ("amx_bf16", "amx_int8")
    )
    text = "Prefill reaches {:.0f} to {:.0%} of the unit's measured peak"
    yield Quote(PERFORMANCE, text, percent(floats))
    text = "peak in most float formats, and {:.0f} to {:.0%} in AMXINT8 and AMXINT4"
    yield Quote(PERFORMANCE, text, percent(integers))
    for found, columns, name in (
        (floats, 32, "float formats | {:.0f} to {:.0f} | {:.1f} to {:.1f} (15 threads)"),
        (integers, 64, "(a product is 16 × 16 × 64) | {:.0f} to {:.0f} | {:.1f} to {:.1f} TOP/s"),
    ):
        speeds = _range(row["tera_ops_s"] for row in found)
        operations = 2 * 16 * 16 * columns  # of a product
        times_ns = [operations * found[0]["threads"] / speed / 1e3 for speed in speeds[::-1]]
        yield Quote(PERFORMANCE, name, [*times_ns, *speeds])
    names = ("formats", "ggml", "deepseek-v3", "gpt-oss-120b", "kimi-k2")
    peaks = [one for n in names for one in load(f"2026-11-28-{n}-amx")["ceilings"].values()]
    units = ("amx_bf16", "amx_int8")
    fed = [_range(one[f"{unit}_fed"] / 1e12 for one in peaks) for unit in units]
    shares = _range(one[f"{unit}_fed"] / one[unit] for unit in units for one in peaks)
    text = "{:.0f} to {:.0f} and {:.0f} to {:.0f}, {:.0f} to {:.0%} of the peak that the goals use"
    yield Quote(PERFORMANCE, text, [*fed[0], *fed[1], 100 * shares[0], shares[1]])


def _packing_and_loading() -> Iterator[Quote]:
    packing = load("2026-11-28-pack")["rows"]
    groups = {"INT4_G32", "INT4_G128", "RAWINT4", "GPTQ_INT4", "MXFP4", "NVFP4"}
    figures: list[float] = []
    for chosen in (
        lambda method: method == "BF16",
        lambda method: method != "BF16" and method not in groups,
        lambda method: method in groups,
    ):
        least, most = _range(row["share"] for row in packing if chosen(row["method"]))
        figures += [100 * least, most]
    text = (
        "Packing reaches {:.0f} to {:.0%} of the copy bandwidth in BF16, {:.0f} to {:.0%} for"
        " per-row integers and FP8, and {:.0f} to {:.0%} for 4-bit groups"
    )
    yield Quote(PERFORMANCE, text, figures)
    speeds = [
        _range(
            row["source_bytes"] / row["median_us"] / 1e3
            for row in load("2026-11-28-load-xeon")["rows"]
            if row["cache"] == cache
        )
        for cache in ("warm", "cold")
    ]
    text = (
        "loads at {:.0f} to {:.0f} GB/s of source on the machine with 16 CPUs, and at {:.1f} to"
        " {:.1f} GB/s from its disk"
    )
    yield Quote(PERFORMANCE, text, speeds[0] + speeds[1])
