"""The kernels compile for real devices, assembler included, which the interpreter skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grid import FULL

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compile(function, types, warps=8, unaligned=(), **constants):
    names = function.arg_names
    signature = dict.fromkeys(constants, "constexpr")
    signature |= zip([name for name in names if name not in constants], types, strict=True)
    source = ASTSource(
        function, {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
         if signature[n][0] in "*i" and n not in unaligned},
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
"""

HAND_OVER = """
from kt_kernel.device import kernels

def ordered(ptx, *steps):
    at = 0
    for step in steps:
        at = ptx.find(step, at) + 1
        assert at, (step, ptx)

for types, trace, padding in (
    ("*bf16 *i32 *fp32", False, "*i64"), ("*fp32 *i64 *bf16", True, "*u8"),
    ("*fp16 *u8 *fp16", False, None)
):
    x, ids, weights = types.split()
    shape = dict(HIDDEN=2048, BLOCK=2048, FENCE=True, TRACE=trace)
    no_multiples = ("padding", "tokens", "slot")
    there = compile(
        kernels.hand_over,
        [x, ids, weights, padding or "*i32", "*i32", ids, weights, x, "*i32", "*fp32", "*i32",
         "*i64", "*i32", "*i32", "*i32", "*i64", "*i32", "i32", "i32"],
        TOP_K=8, EXPERTS=128, ENTRIES=4096, PADDED=padding is not None, SPLIT=True,
        ONLY_COLD=trace, COLD_SLOT=-1,
        ROUTES=256, ROOM_CHECK=256, unaligned=no_multiples, **shape,
    )
    back = compile(
        kernels.take_back, [x, "*i64", "*i32", "*i32", x, x, "i32"], ADD=True, SCALE=2.5,
        unaligned=no_multiples, **shape
    )
    copies = there[there.find("ld.global") :].split("bar.sync")[0]
    assert copies.rfind("ld.global") < copies.find("st.global")  # all is asked for first
    ordered(there, "st.global.v4", "bar.sync", "fence.acq_rel.sys", "atom.global", "bar.sync",
            "fence.acq_rel.sys", "st.global.b64")
    ordered(back, "ld.relaxed.sys", "fence.acq_rel.sys", "bar.sync", "ld.volatile", "st.global.v4")
    assert there.count("fence.acq_rel.sys") == 2 and back.count("fence.acq_rel.sys") == 1
    assert there.count("globaltimer") == 2 * trace and back.count("globaltimer") == 3 * trace
"""

UNPACK = """
import re
from kt_kernel.device.streaming.unpack import kernel_constants
from kt_kernel.device.streaming.unpack_kernel import unpack
from kt_kernel.weights.formats import WeightForm, WeightFormat

for name in ("INT4_ZERO", "NVFP4", "Q5_K"):
    format = WeightFormat(name)
    form = WeightForm(format, 32 if format.grouped else 0)
    ptx = compile(unpack, ["*u8", "*bf16", *["i32"] * 6], warps=4,
                  **kernel_constants(form, 2048))
    # Codes come, and weights go, in the widest pieces.
    assert "ld.global.v4.b32" in ptx, name
    assert set(re.findall(r"st\\.global[.\\w]*", ptx)) == {"st.global.v4.b32"}, name
"""

DIVIDE = """
from kt_kernel.device.streaming.routes_kernel import divide

for ids, weights, padding, on_cpu in (
    ("*i32", "*fp32", "*i64", "*i32"), ("*i64", "*bf16", "*u8", "*i64"),
    ("*u8", "*fp32", None, "*i64")
):
    types = [ids, weights, padding or ids, "*i32", "*i32", ids, weights, on_cpu, "*i32", weights]
    compile(divide, [*types, *["i32"] * 4], warps=4, unaligned=divide.arg_names[:14], TOP_K=8,
            EXPERTS=128, PADDED=padding is not None, LIVE=padding is None, BLOCK=256)
"""

REPACK = """
import re
from kt_kernel.device.repack_kernel import repack
from kt_kernel.device.slots import repack_constants
from kt_kernel.weights.formats import INT4_GROUP, INT8_ROW, WeightForm

for form, scales in ((WeightForm(INT4_GROUP, 32, 0), "*bf16"), (WeightForm(INT8_ROW), "*fp32")):
    ptx = compile(repack, ["*u8", "*u8", scales, *["i32"] * 5], warps=4,
                  **repack_constants(form, 2048))
    assert "ld.global.v4.b32" in ptx, form
    stores = set(re.findall(r"st\\.global[.\\w]*", ptx))
    assert not any(store.endswith("b8") for store in stores), (form, stores)
"""

COUNT_ROUTES = """
from kt_kernel.device.route_kernel import constants, count_routes

for ids, padding, experts, k in (
    ("*i32", "*i64", 128, 8), ("*i64", "*u8", 512, 10), ("*i32", None, 8, 2)
):
    ptx = compile(
        count_routes,
        [ids, padding or ids, "*i64", "*i64", "*i16", "*i32", "i32", "i32"], warps=4,
        unaligned=("ids", "padding", "totals", "host_totals", "routes", "passes", "tokens",
                   "capacity"),
        PADDED=padding is not None, FENCE=True, **constants(experts, k),
    )
    # The number of tokens goes to the host after the fence, what it counts before it.
    before, after = ptx.split("fence.acq_rel.sys")
    assert "st.global.b16" in before and "st.global.b16" not in after, (experts, k)
    assert "bar.sync" in after and "st.global" in after[after.find("bar.sync"):]
"""


BEGIN_PASS = """
from kt_kernel.device.cache_kernel import begin_pass, constants

for ids, padding, experts, k in (
    ("*i32", "*i64", 256, 8), ("*i64", "*u8", 512, 10), ("*i32", None, 6, 2)
):
    ptx = compile(
        begin_pass, [ids, padding or ids, "*i32", "*i32", "*i32", "*i64", "*i64", "i32"],
        warps=4,
        unaligned=("ids", "padding", "live", "wanted", "version", "totals", "passed", "tokens"),
        PADDED=padding is not None, **constants(experts, k),
    )
    # The map is read after its number.
    number = ptx.find("acquire")
    assert 0 < number < ptx.find("ld.volatile"), (experts, k)
    assert ptx.find("bar.sync", number) < ptx.find("ld.volatile")
"""


pytest.importorskip("triton", reason="Triton is not installed")


def run(program: str, capability: int, cache: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", COMPILE + program, str(capability)]
    subprocess.run(command, check=True, env=environment)


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    run(HAND_OVER, capability, tmp_path)


@pytest.mark.parametrize("capability", [75, 90])
def test_counting_routes_compiles(capability: int, tmp_path: Path) -> None:
    run(COUNT_ROUTES, capability, tmp_path)


@pytest.mark.parametrize("capability", [75, 90])
def test_the_cache_compiles(capability: int, tmp_path: Path) -> None:
    run(BEGIN_PASS, capability, tmp_path)


@pytest.mark.parametrize("capability", [80, 90] if FULL else [90])
def test_unpacking_compiles(capability: int, tmp_path: Path) -> None:
    run(UNPACK, capability, tmp_path)
    run(REPACK, capability, tmp_path)


@pytest.mark.parametrize("capability", [75, 90])
def test_dividing_routes_compiles(capability: int, tmp_path: Path) -> None:
    run(DIVIDE, capability, tmp_path)
