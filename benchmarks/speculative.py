"""Times decoding in an engine with and without n-gram speculation, no and half of the experts hot.

    ENV/bin/python benchmarks/speculative.py --engine vllm --json FILE

Run it in the engine's environment. The model has random experts, and predicts from each token the
next number of a cycle, so that its text is known. Two prompts of one request: in "accepted", the
n-grams of the prompt continue like the text; in "rejected", they continue in another way. Real
texts are between the two. Each pass of the model computes the drafted tokens, too, and their
experts: with three, up to four times as many as for one token.

For each number of hot experts, "break_even" is the time of a pass with drafted tokens, all of them
rejected, relative to that of a token without speculation: speculation is faster if the model gets
more tokens than that from a pass.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engine_run
from machine import about
from shapes import parse_shape
from synthetic import make

CYCLE, VOCABULARY = 64, 8192
STEPS, ROUNDS = 56, 3  # the text must not repeat itself
PROMPTS = {
    "accepted": [CYCLE + i % CYCLE for i in range(3 * CYCLE)],
    "rejected": [CYCLE + 5 * i % CYCLE for i in range(3 * CYCLE)],
}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {
        "attention_backend": "TRITON_ATTN",
        "moe_backend": "triton",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.4,
        "enable_prefix_caching": False,
        # Nothing is compiled, so that engines start sooner.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 6, 8],
        },
    },
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "moe_runner_backend": "triton",
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 4,
        "mem_fraction_static": 0.4,
    },
}


def ngrams(engine: str, drafted: int) -> dict[str, Any]:
    """The engine's arguments for a number of drafted tokens; none for 0."""
    if not drafted:
        return {}
    if engine == "sglang":
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": drafted + 1,
            # One continuation, not a tree of several.
            "speculative_ngram_min_bfs_breadth": 1,
            "speculative_ngram_max_bfs_breadth": 1,
        }
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": drafted,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
    }


def predictable(model: Path) -> None:
    """Changes embeddings and output layer so that token t is followed by the next one of its
    cycle, whatever the layers add."""
    import torch
    from safetensors.torch import load_file, save_file

    file = model / "rest.safetensors"
    tensors = load_file(file)
    base = torch.randn(VOCABULARY, len(tensors["model.norm.weight"]))
    token = torch.arange(VOCABULARY)
    following = token - token % CYCLE + (token + 1) % CYCLE
    output = torch.empty_like(base)
    output[following] = base * 0.02
    tensors["model.embed_tokens.weight"] = (base * 100).to(torch.bfloat16)
    tensors["lm_head.weight"] = output.to(torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})


def seconds(generate: Any, forget: Callable[[], Any], prompt: list[int]) -> float:
    """For STEPS tokens after the first one. forget: removes earlier requests from caches."""
    times = []
    for steps in (1, STEPS + 1):
        forget()
        begin = time.monotonic()
        generate([prompt], steps)
        times.append(time.monotonic() - begin)
    return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument(
        "--shape", type=parse_shape, default="qwen3-30b-a3b", help="name or E,H,I,k"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--hot", type=float, nargs="+", default=[0, 0.5])
    parser.add_argument("--drafted", type=int, nargs="+", default=[0, 3], help="tokens; 0: none")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--method", default="BF16", help="of kt-moe")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    generators = {"vllm": engine_run.vllm_generator, "sglang": engine_run.sglang_generator}
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "engine": args.engine,
        "engine_version": version(args.engine),
        "shape": args.shape._asdict(),
        "layers": args.layers,
    }
    result["rows"] = rows = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shape = args.shape
        model = make(Path(folder) / "model", shape, args.layers, VOCABULARY)
        predictable(model)
        print(f"model written after {time.monotonic() - begun:.0f} s", flush=True)
        runs = [(hot, drafted) for drafted in args.drafted for hot in args.hot]
        for hot, drafted in runs:
            if time.monotonic() - begun > args.seconds - 25:
                print("no time left", hot, drafted, flush=True)
                break
            kt = {"method": args.method, "num_gpu_experts": round(hot * shape.experts)}
            kt["allow_untested"] = True
            os.environ["KT_CONFIG"] = json.dumps(kt)
            given = ENGINES[args.engine] | args.arguments | ngrams(args.engine, drafted)
            start = time.monotonic()
            with generators[args.engine](str(model), given) as (generate, _, engine):
                # SGLang also looks for n-grams in earlier requests.
                forget = engine.flush_cache if args.engine == "sglang" else lambda: None
                row: dict[str, Any] = {"hot": hot, "drafted": drafted, "method": args.method}
                row["start_seconds"] = time.monotonic() - start
                for name, prompt in PROMPTS.items():
                    seconds(generate, forget, prompt)
                    times = [seconds(generate, forget, prompt) for _ in range(ROUNDS)]
                    row[name] = STEPS / median(times)
                plain = [one for one in rows if one["hot"] == hot and not one["drafted"]]
                if drafted and plain:
                    row["break_even"] = plain[0]["rejected"] / row["rejected"]
                print(json.dumps(row), flush=True)
                rows.append(row)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
                if (hot, drafted) == runs[-1]:
                    os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
