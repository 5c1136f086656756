"""Adapters of the tiny model's experts, and transformers with them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import COLD, Answers
from lora_files import Deltas
from peft import PeftModel
from tiny_model import EXPERTS, LAYERS, VOCABULARY, Reference
from transformers import Qwen3MoeForCausalLM

from kt_kernel.sft import save_adapter, wrap_experts

STEPS = 6


@dataclass(frozen=True)
class TrainedAdapter:
    """fused, per_expert: the same adapter in both layouts. reference: transformers with it, in
    float32; in_bf16: the same in BF16."""

    fused: Path
    per_expert: Path
    reference: Reference
    in_bf16: Reference


def train(model: Path, folder: Path) -> TrainedAdapter:
    """Trains with steps that are large enough to change the text. PEFT loads what was saved."""
    paths = {"fused": folder / "fused", "per_expert": folder / "per_expert"}
    torch.manual_seed(4)
    trained = Qwen3MoeForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    )
    wrap_experts(trained, lora_rank=4, lora_alpha=16, cpuinfer_threads=2, threadpool_count=1)
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    tokens = torch.randint(3, VOCABULARY, (4, 32))
    for _ in range(STEPS):
        optimizer.zero_grad()
        trained(tokens, labels=tokens).loss.backward()
        optimizer.step()
    for layout, path in paths.items():
        save_adapter(trained.eval(), path, layout=layout)
    reference, in_bf16 = Reference(model), Reference(model)
    merged = PeftModel.from_pretrained(reference.model, paths["fused"]).merge_and_unload()
    with torch.no_grad():
        probe = tokens[:1, :6]
        found, wanted = trained(probe).logits, merged(probe).logits
    assert (found - wanted).norm() < 0.1 * wanted.norm(), (found - wanted).norm() / wanted.norm()
    reference.model, in_bf16.model = merged, copy.deepcopy(merged).bfloat16()
    return TrainedAdapter(**paths, reference=reference, in_bf16=in_bf16)


@contextmanager
def adapted(reference: Reference, deltas: Deltas) -> Iterator[None]:
    """Within, the reference has an adapter of random tensors, and its cold experts are rounded to
    BF16."""

    def add(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        gate, up, change = (deltas[layer][name][expert] for name in ("gate", "up", "down"))
        for weight, more in ((gate_up, torch.cat([gate, up])), (down, change)):
            weight += more
            if expert in COLD:
                weight.copy_(weight.bfloat16())

    with reference.changed(add, range(EXPERTS)):
        yield


def runs(adapter: TrainedAdapter) -> list[tuple[str, dict[str, Any]]]:
    """Names and kt options of the configurations that `check` looks at."""
    none: dict[str, Any] = {"method": "BF16", "expert_lora_path": str(adapter.fused)}
    some = {"num_gpu_experts": COLD.start, "expert_lora_path": str(adapter.per_expert)}
    return [
        ("adapter none hot", none),
        ("adapter some hot", none | some),
        ("adapter all hot", none | {"num_gpu_experts": EXPERTS}),
    ]


def check(
    name: str,
    answers: Answers,
    log: str,
    adapter: TrainedAdapter,
    plain: Reference,
    prompts: list[list[int]],
) -> None:
    """The log-probabilities are those of transformers with the adapter. Where all experts are hot,
    both compute in float32; else they are within the spread of BF16, by which transformers in BF16
    differs from itself in float32. Without the adapter they are far off."""
    answer = answers[name]
    assert "error" not in answer, answer
    found = torch.tensor(answer["logprobs"]).flatten()

    def distance(reference: Reference) -> float:
        scores = reference.logprobs(prompts, answer["tokens"])
        return float((scores - found).abs().mean())

    near, far = distance(adapter.reference), distance(plain)
    exact = adapter.reference.logprobs(prompts, answer["tokens"])
    rounded = adapter.in_bf16.logprobs(prompts, answer["tokens"])
    spread = float((rounded - exact).abs().mean())
    print(f"{name}: near {near:.5f} spread {spread:.5f} far {far:.3f}")
    assert near < (1e-4 if name == "adapter all hot" else spread)
    assert far > 20 * spread
    line = f"; adapter {adapter.fused} merged into layers 0-{LAYERS - 1}"
    assert line in log and line.replace("fused", "per_expert") in log
