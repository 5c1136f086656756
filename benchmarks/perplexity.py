"""Held-out loss of a Mixture-of-Experts model with its experts computed by kt_kernel.

Everything except the experts runs in transformers in float32, so differences are caused by the
method of the experts (quantisation) or by deferral. The default model and text are the package's:

    python benchmarks/perplexity.py                        # all methods on the whole text
    python benchmarks/perplexity.py --deferral             # BF16, d = 0..4, one token at a time
    python benchmarks/perplexity.py --json out.json

Loss is in nats per token (per byte for the demo model); see `kt_kernel.accuracy.loss`. Methods with
groups are measured with plain scales, as when quantising while loading, and with searched scales,
as the converter makes them. Deferral depends on the batch, so it is measured as in decode: one
token at a time with a key-value cache.
"""

from __future__ import annotations

import argparse
import math
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from outputs import output_file, save_result

import kt_kernel
from kt_kernel.accuracy.loss import (
    decode_loss,
    load_model,
    prefill_loss,
    replace_experts,
    windows_of,
)
from kt_kernel.weights.methods import get_method

METHODS = ("BF16", "AMXINT8", "AMXINT4", "INT4_G32", "INT4_G128")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    windows = windows_of(args.model, args.text.read_text(), args.window, args.tokens)
    count = sum(len(w) - 1 for w in windows)
    rows: list[dict[str, Any]] = []

    def add(experts: str, loss: float) -> None:
        first = rows[0]["nats"] if rows else loss
        row = {
            "experts": experts,
            "tokens": count,
            "nats": loss,
            "perplexity": math.exp(loss),
            "change": math.exp(loss - first) - 1,
        }
        rows.append(row)
        print(
            f"| {experts} | {loss:.5f} | {row['perplexity']:.4f} | {row['change']:+.2%} |",
            flush=True,
        )

    print(f"{count} tokens\n| experts | nats/token | perplexity | change |\n|---|---|---|---|")
    if args.deferral:
        top_k = load_model(args.model).config.num_experts_per_tok
        for deferred in range(top_k + 1):
            model = replace_experts(
                load_model(args.model),
                args.model,
                "BF16",
                threads=args.threads,
                max_deferred=deferred,
            )
            add(f"BF16, {deferred} deferred", decode_loss(model, windows))
        return rows
    add("transformers, float32", prefill_loss(load_model(args.model), windows))
    for method in args.methods:
        for search in (False, True) if get_method(method).group_size else (False,):
            model = replace_experts(
                load_model(args.model),
                args.model,
                method,
                threads=args.threads,
                scale_search=search,
            )
            add(f"{method}, scales searched" if search else method, prefill_loss(model, windows))
    return rows


def main() -> None:
    demo = files("kt_kernel") / "demo_model"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(demo))
    parser.add_argument("--text", type=Path, default=Path(str(demo / "heldout.txt")))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--deferral", action="store_true", help="BF16 with d = 0..k deferred")
    parser.add_argument("--window", type=int, default=2048, help="tokens per window")
    parser.add_argument("--tokens", type=int, help="only the first TOKENS of the text")
    parser.add_argument("--threads", type=int, help="CPU threads (default: chosen by kt_kernel)")
    parser.add_argument("--json", type=output_file, help="write the rows to this file")
    args = parser.parse_args()
    rows = measure(args)
    if args.json:
        about = {
            "kt_moe": kt_kernel.__version__,
            "kernels": kt_kernel.__cpu_kernel__,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "window": args.window,
        }
        save_result(args.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
