"""Times the kernels against this machine's ceilings, measured in the same run.

    python benchmarks/run.py                                   # all methods, Qwen3-30B-A3B's layer
    python benchmarks/run.py --methods BF16 --tables avx2 --tokens 1 8 64
    python benchmarks/run.py --json out.json

Each line gives the median time of one layer's forward pass and its share of t_min, the time that
the ceilings allow: the larger of (packed bytes of the experts touched) / (read bandwidth) and
(operations) / (peak of the unit the method may use). Small batches visit disjoint experts in
cyclic order over several layers, so that no expert is read from a cache. Needs g++ for the
ceilings (benchmarks/roofline.cpp).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import kt_kernel
from kt_kernel import _C
from kt_kernel.methods import get_method
from kt_kernel.pools import plan_pools

SHAPES = {  # name: experts, hidden size, intermediate size, experts per token
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral": (8, 4096, 14336, 2),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
METHODS = ("BF16", "AMXINT8", "AMXINT4", "INT4_G32")
INTEGER_UNITS = {
    "amx": "amx_int8", "avx512_bf16": "avx512_vnni_int8", "avx512_vnni": "avx512_vnni_int8",
    "avx512": "avx512_int8_maddubs", "avx2": "avx2_int8_maddubs",
}  # fmt: skip
FLOAT_UNITS = {
    "amx": "amx_bf16", "avx512_bf16": "avx512_fp32", "avx512_vnni": "avx512_fp32",
    "avx512": "avx512_fp32", "avx2": "avx2_fp32",
}  # fmt: skip


@dataclass
class Row:
    method: str
    table: str
    tokens: int
    median_us: float
    p10_us: float
    p90_us: float
    best_us: float
    read_gb_s: float
    tera_ops_s: float
    t_min_us: float
    share: float


def ceilings(gibibytes: int) -> dict[str, float]:
    """dram_read in bytes/s, each unit's peak in operations/s."""
    source = Path(__file__).with_name("roofline.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofline"
        subprocess.run(["g++", "-O3", "-fopenmp", source, "-o", program], check=True)
        text = subprocess.run(
            [program, str(gibibytes)], check=True, capture_output=True, text=True
        ).stdout
    found = {}
    for line in text.splitlines():
        name, value, *unit = line.split()
        if unit:
            found[name] = float(value) * (1e9 if unit[0] == "GB/s" else 1e12)
    return found


def unit_of(method: str, table: str, limits: dict[str, float]) -> str:
    """The unit whose peak bounds the method: per-row integer methods may use the int8 one, BF16 the
    faster of float32 FMA and bf16 products, which differs between makers."""
    if method == "BF16" and table == "avx512_bf16":
        return max("avx512_fp32", "avx512_bf16", key=limits.__getitem__)
    if method.startswith(("AMXINT", "MOE_INT")):
        return INTEGER_UNITS[table]
    return FLOAT_UNITS[table] if method == "BF16" or table == "amx" else INTEGER_UNITS[table]


class Bench:
    """Layers of one method and kernel table that share a team of threads."""

    def __init__(self, args: argparse.Namespace, method: str, table: str) -> None:
        self.experts, self.hidden, self.inter, self.top_k = args.shape
        self.experts = min(self.experts, args.experts or self.experts)
        self.method, self.table = method, table
        spec = get_method(method)
        plan = plan_pools(args.threads, None, None)
        self.threads = sum(plan.threads)
        team = _C.Team(list(plan.threads), list(plan.nodes))
        self.layers = [
            _C.MoeLayer(
                team, num_experts=self.experts, top_k=self.top_k, hidden_size=self.hidden,
                intermediate_size=self.inter, format=int(spec.format), group_size=spec.group_size,
                cpu_slots=[True] * self.experts, swiglu_limit=0.0, swiglu_alpha=0.0,
                max_tokens=1024, table=table, kind=0,
            )
            for _ in range(args.layers)
        ]  # fmt: skip
        shapes = [(self.inter, self.hidden), (self.inter, self.hidden), (self.hidden, self.inter)]
        weights = [(torch.randn(*s) * s[1] ** -0.5).to(torch.bfloat16) for s in shapes]
        begin = time.perf_counter()
        for layer in self.layers:
            for slot in range(self.experts):
                layer.load_expert(slot, *(w.data_ptr() for w in weights), 0)
        seconds = time.perf_counter() - begin
        self.packed = sum(layer.packed_bytes for layer in self.layers)
        self.pack_gb_s = 2 * 3 * self.hidden * self.inter * self.experts * len(self.layers) / 1e9
        self.pack_gb_s /= seconds

    def batches(self, tokens: int) -> list[torch.Tensor]:
        """Expert ids [T, k]: all experts in turn where one batch does not touch them all."""
        order = torch.randperm(self.experts)
        each = tokens * self.top_k
        if each < self.experts:
            picks = (order[(torch.arange(each) + i * each) % self.experts]
                     for i in range(self.experts // each))  # fmt: skip
            return [p.view(tokens, self.top_k).contiguous() for p in picks]
        draws = (torch.randperm(self.experts)[: self.top_k] for _ in range(tokens))
        return [torch.stack(list(draws)).contiguous()]

    def run(self, tokens: int, seconds: float, limits: dict[str, float]) -> Row:
        x = torch.randn(tokens, self.hidden).to(torch.bfloat16)
        weights = torch.rand(tokens, self.top_k)
        out = torch.empty_like(x)
        batches = self.batches(tokens)
        times: list[float] = []
        step, end = 0, time.perf_counter() + seconds
        rounds = 2 * len(self.layers)  # at least, with a first one to warm up
        while step < rounds or time.perf_counter() < end:
            layer = self.layers[step % len(self.layers)]
            ids = batches[step // len(self.layers) % len(batches)]
            begin = time.perf_counter()
            layer.submit(
                x.data_ptr(), 0, tokens, ids.data_ptr(), weights.data_ptr(), out.data_ptr()
            ).wait()
            if step >= len(self.layers):
                times.append(time.perf_counter() - begin)
            step += 1
        touched = len(batches[0].unique())
        byte_count = touched * self.packed / len(self.layers) / self.experts
        operations = 6.0 * tokens * self.top_k * self.hidden * self.inter
        t_min = max(
            byte_count / limits["dram_read"],
            operations / limits[unit_of(self.method, self.table, limits)],
        )
        sample = torch.tensor(times, dtype=torch.float64)
        median = sample.median().item()
        return Row(
            self.method, self.table, tokens, median * 1e6, sample.quantile(0.1).item() * 1e6,
            sample.quantile(0.9).item() * 1e6, sample.min().item() * 1e6,
            byte_count / median / 1e9, operations / median / 1e12, t_min * 1e6, t_min / median,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--tables", nargs="+", help="kernel tables (default: the best)")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, help="default: chosen by kt_kernel")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line, at least")
    parser.add_argument("--gib", type=int, default=2, help="memory read for the bandwidth ceiling")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    name, args.shape = args.shape, SHAPES[args.shape]
    torch.manual_seed(0)
    limits = ceilings(args.gib)
    about: dict[str, Any] = {
        "kt_moe": kt_kernel.__version__, "cpu": _C.cpu_brand(), "python": platform.python_version(),
        "torch": torch.__version__, "shape": name, "layers": args.layers, "ceilings": limits,
    }  # fmt: skip
    print(f"{about['cpu']}: " + ", ".join(f"{k} {v:.3g}/s" for k, v in limits.items()))
    print(f"{'method':9} {'table':12} {'T':>5} {'median us':>10} {'GB/s':>7} {'TOP/s':>7} share")
    rows = []
    for method in args.methods:
        for table in args.tables or _C.kernel_tables()[:1]:
            bench = Bench(args, method, table)
            about["threads"] = bench.threads
            for tokens in args.tokens:
                row = bench.run(tokens, args.seconds, limits)
                rows.append(row)
                print(
                    f"{method:9} {table:12} {tokens:5} {row.median_us:10.1f} {row.read_gb_s:7.1f} "
                    f"{row.tera_ops_s:7.3f} {row.share:5.1%}",
                    flush=True,
                )
            print(f"{method:9} {table:12}  packed at {bench.pack_gb_s:.2f} GB/s of source weights")
    if args.json:
        args.json.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
