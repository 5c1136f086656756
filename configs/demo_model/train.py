#!/usr/bin/env python3
"""Train the demo model: a byte-level Qwen3-MoE language model of 14 M parameters.

    python3 configs/demo_model/train.py --corpus .corpus --out OUT --minutes 8

Trains on one GPU in minutes (a CPU works for a try-out), keeps the checkpoint
with the best held-out loss, and writes it to ``--out`` as raw parts of one
safetensors file (some transfers limit the size of a file); join them with
``cat OUT/model.safetensors.part* > model.safetensors``.  ``results.json`` has
the losses, the expert load and the digest of the joined file.

The learning rate follows the wall clock, so the schedule always fits into
``--minutes``; the number of steps therefore depends on the machine.  Every
improved checkpoint is written at once: whatever fails later, the best one so
far is in ``--out``.
"""

import argparse
import hashlib
import json
import lzma
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).resolve().parent
MODEL_FILES = HERE.parents[1] / "src" / "kt_kernel" / "demo_model"
LOG2 = math.log(2)
PART_BYTES = 15 * 2**20


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, as in transformers."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with per-head query and key norms."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, c["rms_norm_eps"])

    def forward(self, x, cos, sin):
        b, t, _ = x.shape

        def rotate(y):
            half = torch.cat((-y[..., self.dim // 2 :], y[..., : self.dim // 2]), -1)
            return (y * cos + half * sin).to(v.dtype)

        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q = rotate(self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2))
        k = rotate(self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2))
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Experts(nn.Module):
    """Top-k mixture of experts, computed densely.

    All experts run on every token and the weights of the unselected ones are
    zero: four times the needed arithmetic, but two large matrix products with
    static shapes.  At this size that is faster than gathering tokens, and it
    compiles.  The result is the same as with sparse dispatch.
    """

    def __init__(self, c, dropout):
        super().__init__()
        self.experts, self.top_k = c["num_experts"], c["num_experts_per_tok"]
        hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
        self.inner, self.dropout = inner, dropout
        self.router = nn.Parameter(torch.empty(self.experts, hidden))
        self.w_gate = nn.Parameter(torch.empty(self.experts * inner, hidden))
        self.w_up = nn.Parameter(torch.empty(self.experts * inner, hidden))
        self.w_down = nn.Parameter(torch.empty(self.experts * inner, hidden))  # transposed

    def forward(self, x):
        """Return the mixture, the load of each expert and the two router losses."""
        b, t, hidden = x.shape
        x = x.reshape(-1, hidden)
        logits = F.linear(x, self.router).float()
        probs = logits.softmax(-1)
        top, chosen = probs.topk(self.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probs).scatter(-1, chosen, top)
        load = (weights > 0).float().mean(0) / self.top_k
        # Switch Transformer balancing loss (1 when even) and the z-loss that bounds the logits.
        balance = self.experts * (load * probs.mean(0)).sum()
        z = logits.logsumexp(-1).pow(2).mean()
        h = F.silu(F.linear(x, self.w_gate)) * F.linear(x, self.w_up)
        h = (h.view(-1, self.experts, self.inner) * weights.to(h.dtype)[..., None]).flatten(1)
        h = F.dropout(h, self.dropout, self.training)
        return (h @ self.w_down.to(h.dtype)).view(b, t, hidden), load, balance, z


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, c, dropout):
        super().__init__()
        self.norm1 = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.attention = Attention(c)
        self.norm2 = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.experts = Experts(c, dropout)
        self.dropout = dropout

    def forward(self, x, cos, sin):
        x = x + F.dropout(self.attention(self.norm1(x), cos, sin), self.dropout, self.training)
        y, load, balance, z = self.experts(self.norm2(x))
        return x + F.dropout(y, self.dropout, self.training), load, balance, z


class Model(nn.Module):
    """The Qwen3-MoE architecture, written for training speed."""

    def __init__(self, c, dropout=0.0):
        super().__init__()
        self.c, self.dropout = c, dropout
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.04)
            if name.endswith(
                ("o_proj.weight", "w_down")
            ):  # keep the residual stream small at depth
                p.data /= math.sqrt(2 * len(self.layers))
        dim = c["head_dim"]
        inv = c["rope_parameters"]["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
        angle = torch.outer(torch.arange(c["max_position_embeddings"]).float(), inv)
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin(), persistent=False)

    def forward(self, ids, targets):
        """Return the mean loss in nats, the loads [layers, experts] and the router losses."""
        t = ids.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        x = F.dropout(self.embed(ids), self.dropout, self.training)
        loads, balance, z = [], 0.0, 0.0
        for layer in self.layers:
            x, load, b, zz = layer(x, cos, sin)
            loads.append(load)
            balance, z = balance + b / len(self.layers), z + zz / len(self.layers)
        logits = self.head(self.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return loss, torch.stack(loads), balance, z

    @torch.no_grad()
    def export(self):
        """Weights under the Hugging Face names, one tensor per expert, in bfloat16."""
        out = {
            "model.embed_tokens.weight": self.embed.weight,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.head.weight,
        }
        for i, layer in enumerate(self.layers):
            p, a, m = f"model.layers.{i}.", layer.attention, layer.experts
            out[p + "input_layernorm.weight"] = layer.norm1.weight
            out[p + "post_attention_layernorm.weight"] = layer.norm2.weight
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
                out[f"{p}self_attn.{name}.weight"] = getattr(a, name).weight
            out[p + "mlp.gate.weight"] = m.router
            for e in range(m.experts):
                rows = slice(e * m.inner, (e + 1) * m.inner)
                out[f"{p}mlp.experts.{e}.gate_proj.weight"] = m.w_gate[rows]
                out[f"{p}mlp.experts.{e}.up_proj.weight"] = m.w_up[rows]
                out[f"{p}mlp.experts.{e}.down_proj.weight"] = m.w_down[rows].T
        return {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in out.items()}


def heldout_windows(path, length, device):
    """Held-out text as (ids, targets) windows; every byte but the first is scored once.

    Windows do not overlap, so their first bytes see little context: a little
    pessimistic, but simple to repeat with any engine.
    """
    data = torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64))
    count = math.ceil((len(data) - 1) / length)
    ids = torch.zeros(count * length, dtype=torch.int64)
    targets = torch.full((count * length,), -100, dtype=torch.int64)
    ids[: len(data) - 1], targets[: len(data) - 1] = data[:-1], data[1:]
    return ids.view(count, length).to(device), targets.view(count, length).to(device)


@torch.no_grad()
def evaluate(loss_sum, windows, batch):
    """Mean held-out loss in nats per byte; ``loss_sum`` gives (sum, aux) of a batch."""
    ids, targets = windows
    total, aux = 0.0, []
    for i in range(0, len(ids), batch):
        nats, extra = loss_sum(ids[i : i + batch], targets[i : i + batch])
        total += float(nats)
        aux.append(extra)
    return total / int((targets != -100).sum()), aux


def batches(data, batch, length, eos, seed, device):
    """Endless training batches: each epoch cuts at a new offset and shuffles the windows."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(length + 1, device=device)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        count = (len(data) - shift - 1) // length
        starts = shift + length * torch.randperm(count, generator=generator)
        for i in range(0, count - batch + 1, batch):
            window = data[starts[i : i + batch].to(device)[:, None] + steps].long()
            window[window == 0] = eos  # breaks between texts
            yield window[:, :-1], window[:, 1:]


def save_parts(tensors, out):
    """Write a safetensors file as raw parts; return its digest and size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        data = path.read_bytes()
    for n, start in enumerate(range(0, len(data), PART_BYTES)):
        part = out / f"model.safetensors.part{n}"
        part.with_suffix(".tmp").write_bytes(data[start : start + PART_BYTES])
        os.replace(part.with_suffix(".tmp"), part)
    return hashlib.sha256(data).hexdigest(), len(data)


def verify(out, config_dir, windows, batch, device):
    """Load the parts with transformers; return its held-out loss in bfloat16 and some samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for path in config_dir.glob("*.json"):
            shutil.copy(path, folder)
        with open(Path(folder) / "model.safetensors", "wb") as joined:
            for part in sorted(out.glob("model.safetensors.part*")):
                joined.write(part.read_bytes())
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = {
        k: sorted(v) for k, v in info.items() if k in ("missing_keys", "unexpected_keys") and v
    }
    assert not problems, problems
    model = model.to(device).eval()

    def loss_sum(ids, targets):
        logits = model(ids, use_cache=False).logits.float()
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        ), None

    nats, _ = evaluate(loss_sum, windows, batch)
    samples = []
    for prompt in (
        "It is a truth universally acknowledged, that ",
        "And it came to pass",
        "HACKER, n.  ",
    ):
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        torch.manual_seed(0)
        tokens = model.generate(
            ids,
            max_new_tokens=200 if device.type == "cuda" else 8,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
        )
        samples.append(tokenizer.decode(tokens[0]))
    return nats, samples


def main():
    """Train, export, verify."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder written by prepare_corpus.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="wall clock for training, start-up included"
    )
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--length", type=int, default=2048, help="bytes per window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--balance", type=float, default=0.01, help="weight of the load-balancing loss"
    )
    parser.add_argument("--z-loss", type=float, default=1e-4)
    parser.add_argument("--eval-seconds", type=float, default=20.0)
    parser.add_argument(
        "--eval-bytes", type=int, default=None, help="use only the start of the held-out text"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    budget = args.minutes * 60
    log = args.out / "train_log.jsonl"
    log.write_text("")

    def record(**entry):
        entry = {k: round(v, 5) if isinstance(v, float) else v for k, v in entry.items()}
        print(json.dumps(entry), flush=True)
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")

    def autocast():
        """bfloat16 on the GPU; plain float32 on a CPU, where bfloat16 may be very slow."""
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    config = json.loads((MODEL_FILES / "config.json").read_text())
    with lzma.open(args.corpus / "train.bin.xz") as file:
        raw = np.frombuffer(file.read(), np.uint8)
    data = torch.from_numpy(raw.copy()).to(device)
    windows = heldout_windows(args.corpus / "heldout.txt", args.length, device)
    if args.eval_bytes:
        windows = tuple(w[: max(1, args.eval_bytes // args.length)] for w in windows)

    model = Model(config, args.dropout).to(device)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    info = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_bytes": len(data),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
    }
    record(**{k: v for k, v in info.items() if k != "arguments"})

    def eval_model(m):
        """Held-out loss of the uncompiled model and the mean expert loads."""
        m.eval()

        def loss_sum(ids, targets):
            with autocast():
                loss, loads, _, _ = m(ids, targets)
            return loss * (targets != -100).sum(), loads * len(ids) / len(windows[0])

        nats, loads = evaluate(loss_sum, windows, args.batch // 4 or 1)
        m.train()
        return nats, sum(loads)

    stream = batches(data, args.batch, args.length, config["eos_token_id"], args.seed, device)
    # Evaluation calls the model itself, so that a ragged last batch compiles nothing.
    forward = (
        model if args.no_compile or device.type != "cuda" else torch.compile(model, dynamic=False)
    )

    def step(run, x, y):
        with autocast():
            loss, _, balance, z = run(x, y)
        (loss + args.balance * balance + args.z_loss * z).backward()
        return loss.detach(), balance.detach()

    x, y = next(stream)
    model.train()
    try:
        step(forward, x, y)
    except Exception as error:  # compilers fail in many ways: train without
        if forward is model:
            raise
        record(event="compile failed, running eager", error=str(error)[-300:])
        forward = model
        torch.cuda.empty_cache()
        optimizer.zero_grad(set_to_none=True)
        step(forward, x, y)
    optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = last_eval = time.monotonic()
    span = max(budget - (begin - start), 1.0)
    record(event="training starts", startup_seconds=begin - start)

    best, digest, size, n = float("inf"), None, 0, 0

    def checkpoint():
        """Evaluate, and write the checkpoint when it is the best so far."""
        nonlocal best, digest, size
        nats, loads = eval_model(model)
        if nats < best:
            best = nats
            digest, size = save_parts(model.export(), args.out)
        return nats, loads

    try:
        while (elapsed := time.monotonic() - begin) < span:
            done = elapsed / span
            # Cosine down to 1 %: the best checkpoint is nearly always among the last.
            lr = (
                args.lr
                * min(1.0, (n + 1) / args.warmup)
                * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
            )
            for group in optimizer.param_groups:
                group["lr"] = lr
            x, y = next(stream)
            loss, balance = step(forward, x, y)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            n += 1
            if n % 20 == 0:
                loss.item()  # keeps the queue short, so that the clock stays honest
            if time.monotonic() - last_eval > args.eval_seconds:
                train_nats = loss.item()
                if not math.isfinite(train_nats):
                    raise FloatingPointError(f"training loss {train_nats} at step {n}")
                nats, loads = checkpoint()
                last_eval = time.monotonic()
                seen = n * args.batch * args.length
                record(
                    step=n,
                    seconds=last_eval - begin,
                    epoch=seen / len(data),
                    mbytes_per_s=seen / (last_eval - begin) / 1e6,
                    lr=lr,
                    train_nats=train_nats,
                    heldout_nats=nats,
                    heldout_bits=nats / LOG2,
                    balance=balance.item(),
                    load_min=loads.min().item(),
                    load_max=loads.max().item(),
                )
        _, loads = checkpoint()
    except (Exception, KeyboardInterrupt) as error:
        # The best checkpoint is on disk already: report it rather than lose it.
        record(event="training stopped early", error=f"{type(error).__name__}: {error}"[-300:])
        info["stopped_early"] = True
        loads = None

    results = {
        **info,
        "steps": n,
        "epochs": round(n * args.batch * args.length / len(data), 2),
        "train_seconds": round(time.monotonic() - begin, 1),
        "heldout_nats_per_byte": best,
        "heldout_bits_per_byte": best / LOG2,
        "window": args.length,
        "sha256": digest,
        "bytes": size,
    }
    if loads is not None:
        results["expert_load_min_max_per_layer"] = [
            [round(v, 4) for v in (r.min().item(), r.max().item())] for r in loads
        ]
    path = args.out / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    if digest is None:
        raise SystemExit("no checkpoint was written")
    try:
        nats, samples = verify(args.out, MODEL_FILES, windows, args.batch // 4 or 1, device)
        results["transformers_bf16_nats_per_byte"] = nats
        results["transformers_agrees"] = abs(nats - best) < 0.01
        results["samples"] = samples
    except Exception as error:  # the checkpoint stays good: leave the check to the reader
        results["transformers_error"] = f"{type(error).__name__}: {error}"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
