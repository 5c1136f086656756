"""On a GPU: training steps of a model with attention there and the experts' LoRA on the CPU.

    python benchmarks/training_hybrid.py [--layers 2] [--hot 0 16] [--json FILE]

A Qwen3-MoE model of random weights: `wrap_experts` puts the experts on the CPU, but for the first
--hot of each layer; the rest goes to the GPU. Says tokens/s of a step (forward, backward,
optimizer), and the share of its time in which the GPU had nothing to do, by the profiler. First it
checks that a wrapped layer gives the same for inputs on the GPU as for inputs on the CPU: the same
bits, or with experts on the GPU nearly the same values.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from outputs import output_file, save_result

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import torch
from machine import about
from shapes import Shape, parse_shape
from synthetic import config
from torch import nn
from training_layers import SFT_METHODS, Batch, optimizer

from kt_kernel.sft import wrap_experts


def make_model(shape: Shape, layers: int) -> nn.Module:
    """On the meta device but for the experts: of each layer one expert's weights, many times."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    given = config(shape, layers, vocabulary=4096)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**given, attn_implementation="sdpa"))
    model = model.to(torch.bfloat16)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            _, *size = getattr(experts, name).shape
            one = (torch.randn(size) * size[1] ** -0.5).bfloat16()
            setattr(experts, name, nn.Parameter(one.expand(shape.experts, -1, -1)))
    return model


def to_device(model: nn.Module, device: str) -> None:
    """Random weights for all that is not there yet, and everything but LoRA to the device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                values = torch.randn(parameter.shape, device=device, dtype=torch.bfloat16) * 0.02
                if isinstance(module, nn.Embedding):
                    values *= 50  # tokens so different that each expert has its share of them
                if parameter.dim() == 1:  # of a norm
                    values = torch.ones_like(values)
                setattr(module, name, nn.Parameter(values, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                made = type(module)(model.config)  # of the rotary embedding, which computes it
                setattr(module, name, getattr(made, name))
    model.to(device)


def check_devices(module: nn.Module, shape: Shape, tokens: int, device: str) -> None:
    """The same, with inputs, results and hot experts on the device as on the CPU."""
    batch = Batch.make(shape, tokens)
    found = []
    for where in ("cpu", device):
        if module.hot is not None:
            module.hot.to(where)
        x, ids, weights, grad = (
            t.to(where) for t in (batch.x, batch.ids, batch.weights, batch.grad)
        )
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y = module(x, ids, weights)
        y.backward(grad)
        assert y.device.type == x.grad.device.type == where
        lora = [p.grad for p in module.lora_parameters().values()]
        found.append([t.cpu() for t in (y.detach(), x.grad, weights.grad, *lora)])
        module.zero_grad()
    for one, other in zip(*found, strict=True):
        distance = float((one.double() - other.double()).norm() / other.double().norm())
        assert distance <= (0 if module.hot is None else 0.02), f"results differ by {distance}"
    assert all(t.isfinite().all() and t.any() for t in found[0])


def gpu_busy(step: Any) -> tuple[float, float]:
    """Seconds of one step, and of those in which the GPU did something."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0.0, 0.0
    for begin_us, end_us in spans:
        busy += max(0.0, end_us - max(begin_us, until))
        until = max(until, end_us)
    return seconds, busy * 1e-6


def hot_share(model: nn.Module, modules: Sequence[nn.Module], ids: torch.Tensor) -> float:
    """The share of the routes that go to experts on the GPU."""
    routes, hot = 0, 0

    def count(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal routes, hot
        routes += given[1].numel()
        if module.hot is not None:
            hot += int(torch.isin(given[1].cpu(), torch.tensor(module.hot.slots)).sum())

    hooks = [module.register_forward_pre_hook(count) for module in modules]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return hot / routes


def measure(
    model: nn.Module, modules: Sequence[nn.Module], tokens: int, steps: int, device: str
) -> dict[str, Any]:
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(4096, (1, tokens), generator=random).to(device)
    trained = optimizer([p for p in model.parameters() if p.requires_grad])

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        trained.step()
        trained.zero_grad()
        return loss.item()

    losses = [step()]
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - begin)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    row = {
        "tokens": tokens,
        "median_us": median(times) * 1e6,
        "best_us": min(times) * 1e6,
        "tokens_s": tokens / median(times),
        "losses": losses[:2],
        "hot_share": hot_share(model, modules, ids),
    }
    if device == "cuda":
        seconds, busy = gpu_busy(step)
        row |= {"profiled_us": seconds * 1e6, "gpu_busy_us": busy * 1e6}
        row["gpu_waits"] = 1 - busy / seconds
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="64,2048,768,8", help="E,H,I,k")
    add("--layers", type=int, default=2)
    add("--methods", nargs="+", default=["AMXBF16_SFT", "AMXINT8_SFT"], choices=SFT_METHODS)
    add("--hot", nargs="+", type=int, default=[0], help="experts of each layer on the GPU")
    add("--rank", type=int, default=16)
    add("--tokens", nargs="+", type=int, default=[512, 2048, 4096])
    add("--steps", type=int, default=5)
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this program")
    add("--json", type=output_file)
    args = parser.parse_args()
    shape = parse_shape(args.shape)
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "routine": "sft-hybrid",
        "shape": shape._asdict(),
        "layers": args.layers,
        "rank": args.rank,
        "rows": [],
    }
    for method, hot in itertools.product(args.methods, args.hot):
        model = make_model(shape, args.layers)
        modules = wrap_experts(
            model,
            sft_method=method,
            lora_rank=args.rank,
            lora_device="cpu",
            num_gpu_experts=hot,
        )
        for module in modules.values():
            for parameter in module.lora_parameters().values():
                nn.init.normal_(parameter, std=0.02)  # B is zero at first, and A has no gradient
        to_device(model, args.device)
        check_devices(next(iter(modules.values())), shape, 64, args.device)
        for tokens in args.tokens:
            row = {
                "method": method,
                "hot": hot,
                **measure(model.train(), list(modules.values()), tokens, args.steps, args.device),
            }
            content["rows"].append(row)
            share = f", {row['hot_share']:.0%} of the routes" if hot else ""
            waits = f", the GPU waits {row['gpu_waits']:.0%} of it" if "gpu_waits" in row else ""
            print(
                f"{method}, {hot} hot{share}, T={tokens}: {row['tokens_s']:.0f} tokens/s{waits}",
                flush=True,
            )
            if args.json:
                save_result(args.json, content)
        del model, modules


if __name__ == "__main__":
    main()
