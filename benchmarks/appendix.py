"""Generates docs/performance-tables.md, the tables of all saved results.

python benchmarks/appendix.py > docs/performance-tables.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from early_table import early
from prompts_tables import beside_peer, in_turns, prompts
from saved import Content, load
from table import engine_name, grid, markdown, sentence
from training_phases import training_ablation, training_hybrid, training_phases
from training_versions import versions_table

HEAD = """\
# Performance tables

`python benchmarks/appendix.py` generates this page from `benchmarks/results`; do not edit it.
[performance.md](performance.md) explains the columns and how the figures were measured.

All results are from shared virtual machines. Compare lines of one table only, and treat differences
under 5% as noise.
"""


class Part(NamedTuple):
    """A section of the page: its heading and introduction, and the results that it shows."""

    title: str
    text: str
    files: Sequence[str]
    render: Callable[[Content], str]


def served(content: Content, first_round: int = 0) -> str:
    """Speed and GPU memory of engine.py's configurations: medians from ``first_round`` on."""
    rows = [row for row in content["rows"] if "error" not in row]
    streams = list(rows[0]["decode"])
    prompts = list(dict.fromkeys(n for row in rows for n in row["prefill"]))
    lines = []
    for row in rows:
        steps = row.get("steps", content["steps"])
        rates = [int(n) * steps / median(row["decode"][n][first_round:]) for n in streams]
        times = [
            f"{1e3 * median(row['prefill'][n][first_round:]):.0f} ms" if n in row["prefill"] else ""
            for n in prompts
        ]
        gigabytes = f"{row['gpu_bytes'] / 2**30:.1f} GB"
        lines.append((row["name"], [gigabytes, *(f"{rate:.0f}" for rate in rates), *times]))
    columns = ["GPU memory", *_streams(streams), *(f"{n} tokens" for n in prompts)]
    shape = content["shape"]
    version = content.get("engine_version", "")
    head = (
        f"{engine_name(content['engine'])} {version}".strip()
        + f", {content['layers']} layers of {shape['name']}'s shape (E={shape['experts']} "
        f"H={shape['hidden']} I={shape['inter']} k={shape['top_k']}), {content['method']}. "
        f"One H200, {content['cpus']} virtual CPUs ({content['cpu']}). {content['date'][:10]}."
    )
    note = f" {sentence(content['note'])}" if "note" in content else ""
    return f"{head}{note}\n\n{grid('configuration', columns, lines)}"


def served_when_warm(content: Content) -> str:
    """`served` without the first three rounds, in which SGLang was not yet at its speed."""
    return served(content, first_round=3)


def peer(content: Content) -> str:
    """Served engines, kt-moe next to kt-kernel."""
    lines = [
        (
            row["name"],
            [
                f"{row['gpu_gb'] * 1e9 / 2**30:.1f} GB",
                *map(str, row["decode_tokens_s"]),
                *(f"{time} ms" for time in row["first_token_ms"]),
            ],
        )
        for row in content["rows"]
    ]
    prompts = ["128 tokens", "2048 tokens", "8192 tokens"]
    table = grid("engine", ["GPU memory", *_streams(["1", "4", "16"]), *prompts], lines)
    versions = "; ".join(f"{name}: {version}" for name, version in content["versions"].items())
    return (
        f"{sentence(content['model'])} {content['gpu']}, {content['cpu']}. {sentence(versions)} "
        f"{content['date']}.\n\n{table}\n\n- {sentence(content['what'])}\n"
        f"- {sentence(content['unsteady'])}"
    )


def speculation(content: Content) -> str:
    """Tokens per second with and without drafted tokens, by the share of hot experts."""

    def name(row: dict[str, Any]) -> str:
        hot = "all" if row["hot"] is None else f"{row['hot']:.0%}"
        return f"{hot} hot, {row['drafted']} tokens drafted"

    lines = [
        (
            name(row),
            [f"{row['accepted']:.0f}", f"{row['rejected']:.0f}", f"{row.get('break_even', 1):.2f}"],
        )
        for row in content["rows"]
    ]
    shape, method = content["shape"]["name"], content["rows"][0]["method"]
    return (
        f"{content['engine']} {content['engine_version']}, {content['layers']} layers of {shape}, "
        f"{method}; {content['gpu']}, {content['cpu']}. {content['date'][:10]}.\n\n"
        + grid("tokens/s", ["all accepted", "all rejected", "break-even"], lines)
    )


def trace(content: Content) -> str:
    """Overlap of CPU and GPU, from traces of a served model."""
    columns = ["CPU", "GPU", "exposed", "elapsed", "bound", "reached", "share"]
    lines = []
    for name, rows in content["traces"].items():
        for row in rows:
            times = [f"{row[key]:.0f}" for key in ("t_cpu", "t_gpu", "exposed", "elapsed")]
            ratios = [f"{row['bound']:.2f}", f"{row['reached']:.2f}", f"{row['share']:.0%}"]
            lines.append((row["tokens"], (f"T={row['tokens']}, {name}", [*times, *ratios])))
    ordered = [line for _, line in sorted(lines, key=lambda line: line[0])]
    return f"{content['engine']}, {content['model']}; {content['gpu']}, {content['cpu']}.\n\n" + (
        grid("batch", columns, ordered)
    )


def hand_over(content: Content) -> str:
    """What a layer costs a CUDA stream, with and without work for the CPU."""
    kinds = ["graph", "eager, 16 layers", "eager", "host"]
    lines = [
        (
            f"T={row['tokens']}, {row['work']}",
            [f"{row[kind]['median']:.1f} ({row[kind]['p99']:.1f})" for kind in kinds],
        )
        for row in content["rows"]
    ]
    names = ["one of 16 layers, graph", "one of 16 layers, eager", "one eager call", "host time"]
    return (
        f"{content['gpu']}, {content['cpus']} virtual CPUs ({content['cpu']}), "
        f"H={content['rows'][0]['hidden']}. Median (99th percentile), µs.\n\n"
        + grid("batch", names, lines)
    )


def streaming(content: Content) -> str:
    """Experts on their way to the GPU: layers that are copied, and unpacking by format."""
    shape = content["shape"]
    layers = [
        (
            row["form"],
            [
                f"{row['layer MB'] * 1e6 / 2**20:.0f} MB",
                f"{row['registered GB/s']:.0f} GB/s",
                f"{row['copy ms']:.2f} ms, {row['bus GB/s']:.1f} GB/s",
                f"{row['stream ms']:.2f} ms",
                f"{row['every other expert ms']:.2f} ms",
                f"{row['host ms']:.1f} ms",
            ],
        )
        for row in content["streaming"]
    ]
    columns = ["a layer", "registration", "copies", "streamed", "every other expert", "host time"]
    sizes = list(content["unpacking"][0]["ms"])
    unpacked = [
        (row["format"], [*(f"{row['ms'][size]:.2f}" for size in sizes), f"{row['GB/s']:.0f}"])
        for row in content["unpacking"]
    ]
    return (
        f"{content['gpu']}, {content['cpus']} virtual CPUs ({content['cpu']}), "
        f"{shape['experts']} experts, H={shape['hidden']}, I={shape['inter']}.\n\n"
        + grid("format", columns, layers)
        + "\n\nUnpacking a layer, ms, by parts x warps of a program, and GB/s of the fastest.\n\n"
        + grid("format", [*sizes, "GB/s"], unpacked)
    )


def steady(content: Content) -> str:
    """Single rounds of a served engine, several versions or settings in turns."""
    prompts = content.get("first_token_ms") or {}
    lengths = list(next(iter(prompts.values()), {}))
    columns = ["median", "worst / median", "rounds below 85%", "rounds"]
    columns += [f"{int(length):,} tokens, ms" for length in lengths]
    lines = [
        (
            name,
            [
                f"{found['median']:.0f}",
                f"{found['worst_of_median']:.0%}",
                str(found["below_85_percent"]),
                str(len(found["rounds"])),
                *(f"{prompts[name][length]:.0f}" for length in lengths),
            ],
        )
        for name, found in content["tokens_per_second"].items()
    ]
    given = content["arguments"]
    options = given.get("additional_config", {}).get("kt") or {
        name.removeprefix("kt_"): value for name, value in given.items()
    }
    return (
        f"{engine_name(content['engine'])}, {options['method']}, "
        f"{options['num_gpu_experts']} hot experts, {content['steps']} tokens per round, "
        f"tokens/s{' (prompts: time to the first token)' if lengths else ''}. "
        f"{content['date']}.\n\n" + grid("version", columns, lines)
    )


def before_and_after(content: Content) -> str:
    """Two versions of a layer that ran in turns, for each method."""
    columns = ["decode, µs", "after / before", "prefill, µs", "after / before", "before / before"]
    rows = {(row["method"], row["tokens"]): row for row in content["rows"]}
    long = max(tokens for _, tokens in rows)
    lines = []
    for method in dict.fromkeys(row["method"] for row in content["rows"]):
        decode, prefill = rows[method, 1], rows[method, long]
        noise = (decode["before_against_before"], prefill["before_against_before"])
        lines.append(
            (
                method,
                [
                    f"{decode['after_us']:.0f}",
                    f"{decode['ratio']:.2f}",
                    f"{prefill['after_us']:.0f}",
                    f"{prefill['ratio']:.2f}",
                    " and ".join(f"{one:.2f}" for one in noise),
                ],
            )
        )
    shape = content["shape"]
    threads = "thread" if content["threads"] == 1 else "threads"
    return (
        f"{content['cpu']}, {content['threads']} {threads}, {content['table']} kernels, "
        f"E={shape['experts']} H={shape['hidden']} I={shape['inter']} k={shape['top_k']}, "
        f"1 and {long} tokens. {content['before']} and {content['after']}, {content['date']}.\n\n"
        + grid("method", columns, lines)
    )


def perplexity(content: Content) -> str:
    """Held-out loss of the demo model."""
    lines = [
        (
            row["experts"],
            [f"{row['nats']:.5f}", f"{row['perplexity']:.4f}", f"{row['change']:+.2%}"],
        )
        for row in content["rows"]
    ]
    return (
        f"Demo model, {content['rows'][0]['tokens']} bytes of held-out text, all experts on the "
        f"CPU, {content['kernels']} kernels.\n\n"
        + grid("experts", ["nats per byte", "perplexity", "change"], lines)
    )


def _streams(counts: Sequence[str]) -> list[str]:
    return [f"{n} stream{'s' if n != '1' else ''}, tokens/s" for n in counts]


PARTS = (
    Part(
        "Served models: SGLang, kt-moe next to kt-kernel",
        "Decode throughput with 1, 4 and 16 streams, and time to the first token of prompts of "
        "three lengths. kt-kernel's GPU prefill copies whole layers to the GPU; kt-moe has no "
        "such mode yet.",
        ["2026-11-28-peer-served-h200"],
        peer,
    ),
    Part(
        "Served models: vLLM 0.26.0",
        "vLLM ran in its default mode (torch.compile and CUDA graphs) with Triton kernels for "
        "attention and experts. `offload` is vLLM's own `--cpu-offload-gb`, which keeps BF16 "
        "weights; the `kt` rows keep cold experts in 8 bits. `d` is the number of deferred "
        "experts per token.",
        ["2026-11-28-engine-vllm-h200", "2026-11-28-engine-vllm-deepseek-v3-h200"],
        served,
    ),
    Part(
        "Deferral in vLLM 0.26.0",
        "The engine was traced (`KT_TRACE`), so compare these rows with each other only.",
        ["2026-11-28-engine-vllm-deferral-h200"],
        served,
    ),
    Part(
        "Overlap of CPU and GPU in vLLM 0.26.0",
        "Microseconds per pass through the MoE layers, from the traces of the runs above; "
        "[traces](hand-over.md#traces) defines the columns. `d` is the number of deferred "
        "experts.",
        ["2026-11-28-trace-vllm-h200"],
        trace,
    ),
    Part(
        "Padding of captured graphs in vLLM 0.26.0",
        "vLLM's graphs have 1, 2, 4, 8 and 16 rows, so 3, 5 and 9 streams are padded. The first"
        " table is the normal mode, in which kt-moe skips padding; in the second, padding is "
        "computed.",
        [
            "2026-11-28-engine-vllm-padding-h200",
            "2026-11-28-engine-vllm-padding-computed-h200",
        ],
        served,
    ),
    Part(
        "Served models: SGLang 0.5.17",
        "Medians of the last two of five rounds: in the first rounds SGLang is not yet at its "
        "speed.",
        ["2026-11-28-engine-sglang-h200"],
        served_when_warm,
    ),
    Part(
        "Served models: SGLang 0.5.17, later runs",
        "Medians of all rounds, after some seconds of decoding that are not timed.",
        [
            "2026-11-28-engine-sglang-settled-h200",
            "2026-11-28-engine-sglang-none-hot-h200",
        ],
        served,
    ),
    Part(
        "How steady decoding is",
        "`before` is the version that slept for up to 50 ms after each interrupted spin. In the "
        "first file, `now` has 14 threads by default; in the third and fourth it has 13, and "
        "`fourteen` is the same with `--kt-cpuinfer 14`. In the last two, `now` has 14 threads, of "
        "which 12 decode (the default), and `thirteen` is the version with 13 in every pass.",
        [
            "2026-11-29-steady-sglang-h200",
            "2026-11-29-threads-sglang-h200",
            "2026-11-29-steady-three-cores-sglang-h200",
            "2026-11-29-steady-three-cores-vllm-h200",
            "2026-11-29-steady-reserves-sglang-h200",
            "2026-11-29-steady-reserves-vllm-h200",
        ],
        steady,
    ),
    Part(
        "Cost of the hand-over between GPU and CPU",
        "Submit and collect of one layer. `nothing`: no route goes to the CPU.",
        ["2026-11-28-hand-over-h200"],
        hand_over,
    ),
    Part(
        "Streamed prompts in vLLM 0.26.0 and SGLang 0.5.17",
        "[Streaming](streaming.md) explains what is compared. First an earlier version, whose "
        "groups had different numbers of experts, beside the CPU alone in the same process; then "
        "the present one in a process of its own.",
        [
            "2026-11-29-engine-vllm-streaming-h200",
            "2026-11-29-engine-vllm-streaming-alone-h200",
            "2026-11-29-engine-sglang-streaming-h200",
        ],
        served,
    ),
    Part(
        "Prompts in vLLM 0.26.0, by where the cold experts are computed",
        "Made by `benchmarks/prompts.py`, one process, modes in turns. `GPU alone` leaves out the "
        "copies, `bound` is the larger of that and the copies alone. The first run is of a version "
        "with 1 GB on the GPU, and streamed from a given number of tokens on; it shared 2,048 "
        "tokens in INT4_G32, and lost by that. The second one is of the same version with the "
        "measured threshold: 449 (INT4_G32), 831 (BF16) and 800 tokens (FP8). The CPU computes "
        "shorter prompts in all columns. The third one is of a later version with "
        "fewer groups: 157 (INT4_G32) and 338 tokens (BF16, half of the experts hot).",
        [
            "2026-11-29-prompts-vllm-h200",
            "2026-11-29-prompts-auto-vllm-h200",
            "2026-11-29-prompts-fewer-groups-vllm-h200",
        ],
        prompts,
    ),
    Part(
        "Prompts in SGLang 0.5.17, by where the cold experts are computed",
        "As above, with the measured threshold, and with SGLang's CUDA graphs for prompts. Prompts "
        "of 512 tokens were captured, so the CPU computes them in all columns.",
        ["2026-11-29-prompts-sglang-h200"],
        prompts,
    ),
    Part(
        "Prompts in both engines, by format and experts hot",
        "Made by `benchmarks/prompts_turns.py`, with the measured threshold. The engines of a "
        "group were started side by side, measured their rates one at a time, and served in turns. "
        "RAWINT4 is a checkpoint of that format. Hot experts have 16 bits in all formats.",
        [
            "2026-11-30-turns-h200",
            "2026-11-30-turns-quarter-h200",
            "2026-11-30-turns-8-layers-sglang-h200",
            "2026-11-30-turns-quarter-8-bits-vllm-h200",
            "2026-11-30-turns-quarter-8-bits-sglang-h200",
            "2026-11-30-turns-beside-sglang-h200",
            "2026-11-30-turns-int4-beside-sglang-h200",
        ],
        in_turns,
    ),
    Part(
        "Prompts under tensor parallelism",
        "Made by `benchmarks/prompts_turns.py`: two ranks, half of the experts hot. The engines "
        "were started side by side and served in turns. In the first run, streaming began at a "
        "given number of 1,024 tokens, in the second one at the measured number.",
        ["2026-11-30-turns-two-gpus-h200", "2026-11-30-turns-two-gpus-control-h200"],
        in_turns,
    ),
    Part(
        "Speculation with n-grams",
        "Made by `benchmarks/speculative.py`: one request. Without drafted tokens, both columns "
        "are the same work. The break-even is how many tokens a pass with drafted ones must give.",
        ["2026-11-30-speculative-vllm-h200", "2026-11-30-speculative-sglang-h200"],
        speculation,
    ),
    Part(
        "Prompts beside kt-kernel's GPU prefill",
        "One run, engines in turns.",
        ["2026-11-29-beside-peer-sglang-h200"],
        beside_peer,
    ),
    Part(
        "Streaming experts to the GPU",
        "Per layer, with 1 GB on the GPU ([streaming](streaming.md)). `streamed`: copied and "
        "unpacked, layer after layer.",
        ["2026-11-29-streaming-int4-h200", "2026-11-29-streaming-h200"],
        streaming,
    ),
    Part(
        "Accuracy of methods and of deferral",
        "Made by `benchmarks/perplexity.py`. The model uses 4 experts per token.",
        ["2026-11-28-perplexity-methods", "2026-11-28-perplexity-deferral"],
        perplexity,
    ),
    Part(
        "One layer: AMX kernels, next to kt-kernel 0.7.2",
        "A cell is the share of t_min and, after the slash, the goal. It is bold if the goal is"
        " missed.",
        ["2026-11-28-formats-amx"],
        markdown,
    ),
    Part(
        "One layer: AVX2 kernels, next to kt-kernel 0.7.2",
        "The same machine, restricted to AVX2.",
        ["2026-11-28-formats-avx2"],
        markdown,
    ),
    Part(
        "One layer: GGUF formats",
        "Bits are counted as packed, 2.6 to 8.5 per weight.",
        ["2026-11-28-ggml-amx", "2026-11-28-ggml-avx2"],
        markdown,
    ),
    Part(
        "One layer: other shapes",
        "AMX kernels.",
        [
            "2026-11-28-deepseek-v3-amx",
            "2026-11-28-gpt-oss-120b-amx",
            "2026-11-28-kimi-k2-amx",
        ],
        markdown,
    ),
    Part(
        "Fine-tuning: one layer, next to PEFT on the CPU",
        "A step is forward, backward, AdamW and `update_lora_weights`, with LoRA in float32. PEFT "
        "trains the experts written out as `nn.Linear`, or transformers' fused experts. All sides "
        "use AVX2. [performance.md](performance.md#how-it-is-measured) explains the columns.",
        ["2026-11-29-sft-avx2"],
        markdown,
    ),
    Part(
        "Fine-tuning: one layer, next to kt-kernel 0.7.2",
        "AMX kernels, before the tile kernels used six tiles. kt-kernel's LoRA weights and their "
        "gradients are bf16.",
        ["2026-11-29-sft-amx"],
        markdown,
    ),
    Part(
        "Fine-tuning: two versions and kt-kernel 0.7.2 in turns",
        "Made by `training_versions.py`, before and after transposed products became one sum for "
        "each block. Phases at 2,048 tokens are those of a build with marks: their milliseconds, "
        "and in parentheses how long threads worked on average. In the second and third result, "
        "rows are also taken in one phase; these machines were busy. In the fourth one, products "
        "with down are kept by pair, and what follows products goes by 32 rows. In the last one, "
        "both versions are the same, on another Xeon.",
        [
            "2026-11-30-sft-amx",
            "2026-11-30-sft-amx-rows",
            "2026-11-30-sft-avx2-versions",
            "2026-11-30-sft-amx-pairs",
            "2026-12-01-sft-amx-2-cpus",
        ],
        versions_table,
    ),
    Part(
        "Fine-tuning: where a step's time goes on AMX",
        "Medians in milliseconds with marked phases, in turns: before and after the transposed "
        "products were rewritten (with chunks of 2,048 tokens), and before and after one tile of "
        "each operand instead of two. In parentheses is the share of the rate at which the tile "
        "unit multiplies with one tile load for each product.",
        ["2026-11-29-sft-amx-phases", "2026-11-29-sft-amx-tiles"],
        training_phases,
    ),
    Part(
        "Fine-tuning: what parts of a step take on AMX",
        "Steps of a build with switches and marks, without AdamW, before products with down were "
        "kept by pair (first result) and after that (second one, in fewer rounds and beside other "
        "work). All variants take turns, step by step. Ratios are medians of those to the usual "
        "steps around. Most variants compute something else, or leave something out.",
        ["2026-11-30-sft-amx-ablation", "2026-11-30-sft-amx-prefetches"],
        training_ablation,
    ),
    Part(
        "Fine-tuning: attention on the GPU",
        "Made by `benchmarks/training_hybrid.py`, in two runs of different versions, so their "
        "times cannot be compared closely. In the second one the LoRA gradients of experts on the "
        "GPU were not yet added in place.",
        ["2026-11-29-sft-hybrid-h200", "2026-11-29-sft-hybrid-hot-h200"],
        training_hybrid,
    ),
    Part(
        "One layer: two versions in turns",
        "`versions.py`, before and after the code was put in order: weight formats as rows of a "
        "table, layered drivers, placements as values. `after / before` is the median of paired "
        "ratios, `before / before` the noise between two processes of the same version, in decode "
        "and in prefill.",
        ["2026-11-29-versions-avx2", "2026-11-29-versions-amx"],
        before_and_after,
    ),
    Part(
        "Packing",
        "Experts are packed from memory.",
        ["2026-11-28-pack"],
        markdown,
    ),
    Part(
        "Loading",
        "`warm` reads from the page cache, `cold` from the disk.",
        ["2026-11-28-load-xeon", "2026-11-28-load-10gb", "2026-11-28-load-10gb-quantising"],
        markdown,
    ),
    Part(
        "Earlier results",
        "Saved by the first version of the benchmark. From T=128 on, AMXINT8 on the Xeon was "
        "disturbed: two other runs of the same kernels reached 30% at T=512 and 16% at T=2048. "
        "The unit peaks of the EPYC run were measured too low, so its shares above T=16 are "
        "meaningless.",
        ["2026-11-28-xeon-amx", "2026-11-28-xeon-avx2", "2026-11-28-epyc-2-cores"],
        early,
    ),
)


def page() -> str:
    parts = [HEAD]
    for part in PARTS:
        parts.append(f"## {part.title}\n\n{part.text}\n")
        for name in part.files:
            parts.append(f"`{name}.json`\n\n{part.render(load(name)).rstrip()}\n")
    return "\n".join(_wrapped(line) for line in "\n".join(parts).splitlines()) + "\n"


def _wrapped(line: str) -> str:
    """Wraps text to 110 characters. Headings, tables and lists stay unchanged."""
    return (
        line
        if line.startswith(("|", "#", "-"))
        else textwrap.fill(line, 110, break_on_hyphens=False)
    )


if __name__ == "__main__":
    print(page(), end="")
