"""Held-out loss of a Mixture-of-Experts model with its experts computed by kt_kernel.

Everything but the experts runs in transformers in float32, so the differences are those of the
expert method (quantisation) or of deferral. The default model and text are the package's own:

    python benchmarks/perplexity.py                        # all methods on the whole text
    python benchmarks/perplexity.py --deferral             # BF16, d = 0..4, one token at a time
    python benchmarks/perplexity.py --json out.json

Loss is in nats per token (a byte, for the demo model): windows that do not overlap, each token
but the first of its window predicted once. Deferral depends on the batch, so it is measured as
decode runs: one token at a time with a key-value cache.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kt_kernel
from kt_kernel import KTMoEWrapper

METHODS = ("BF16", "AMXINT8", "AMXINT4", "INT4_G32", "INT4_G128")


class KTExperts(torch.nn.Module):
    """Takes the place of a transformers MoE block's `experts` module."""

    def __init__(self, experts: Any, layer_idx: int, top_k: int, **options: Any) -> None:
        super().__init__()
        gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        num_experts, two_i, hidden = gate_up.shape
        self.wrapper = KTMoEWrapper(
            layer_idx, num_experts, top_k, hidden, two_i // 2, num_gpu_experts=0, **options
        )
        gate, up = gate_up.split(two_i // 2, dim=1)
        self.wrapper.load_weights_from_tensors(gate, up, down, torch.arange(num_experts))

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.wrapper.forward(hidden, top_k_index, top_k_weights, None)


def load_model(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    return model.eval()


def replace_experts(model: Any, **options: Any) -> Any:
    """Puts kt_kernel under every MoE layer of a transformers model, in place."""
    for layer_idx, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            top_k = model.config.num_experts_per_tok
            layer.mlp.experts = KTExperts(layer.mlp.experts, layer_idx, top_k, **options)
    return model


def windows_of(path: str, text: str, window: int, limit: int | None) -> list[torch.Tensor]:
    tokens = torch.tensor(AutoTokenizer.from_pretrained(path).encode(text))[:limit]
    return [w for w in tokens.split(window) if len(w) > 1]


def token_losses(logits: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1].double(), window[1:], reduction="none")


@torch.no_grad()
def prefill_loss(model: Any, windows: list[torch.Tensor]) -> float:
    """Mean loss with each window as one batch of tokens."""
    return torch.cat([token_losses(model(w[None]).logits[0], w) for w in windows]).mean().item()


@torch.no_grad()
def decode_loss(model: Any, windows: list[torch.Tensor]) -> float:
    """Mean loss with one token at a time."""
    losses = []
    for window in windows:
        cache, rows = None, []
        for token in window:
            out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
        losses.append(token_losses(torch.stack(rows), window))
    return torch.cat(losses).mean().item()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    windows = windows_of(args.model, args.text.read_text(), args.window, args.tokens)
    count = sum(len(w) - 1 for w in windows)
    rows: list[dict[str, Any]] = []

    def add(experts: str, loss: float) -> None:
        first = rows[0]["nats"] if rows else loss
        row = {
            "experts": experts, "tokens": count, "nats": loss, "perplexity": math.exp(loss),
            "change": math.exp(loss - first) - 1,
        }  # fmt: skip
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
                load_model(args.model), method="BF16", cpuinfer_threads=args.threads,
                max_deferred_experts_per_token=deferred,
            )  # fmt: skip
            add(f"BF16, {deferred} deferred", decode_loss(model, windows))
        return rows
    add("transformers, float32", prefill_loss(load_model(args.model), windows))
    for method in args.methods:
        model = replace_experts(
            load_model(args.model), method=method, cpuinfer_threads=args.threads
        )
        add(method, prefill_loss(model, windows))
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
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows = measure(args)
    if args.json:
        about = {
            "kt_moe": kt_kernel.__version__, "kernels": kt_kernel.__cpu_kernel__,
            "torch": torch.__version__, "machine": platform.machine(), "window": args.window,
        }  # fmt: skip
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
