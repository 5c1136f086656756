"""The schedule of a forward pass: who computes what must not show in the result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import grid

from . import core
from .core import AUTO, BF16, INT4_GROUP, INT8_ROW, TILE, VECTOR, Format, Kind, Layer, Variant

FORMATS = [Format(BF16), Format(INT8_ROW), Format(INT4_GROUP, 32)]
VARIANTS = [Variant("_C", table) for table in ("amx", "avx512_vnni", "avx2")]
BEST = next(variant for variant in VARIANTS if not variant.missing)

# Tokens of the cases: own plan, a few pairs (up to 512), many, several chunks (max_tokens = 256).
TOKENS = [1, 3, 4, 5, 40, 170, 171, 256, 700]


def is_exact(format: Format, kind: Kind) -> bool:
    """Whose products round as the oracle does: GEMM of group formats may round weights to bf16."""
    return format.code != INT4_GROUP or kind == VECTOR


def batch(layer: Layer, routing: str, tokens: int) -> tuple[Any, Any, Any]:
    x, ids, weights = layer.batch(tokens)
    experts, k = layer.experts, layer.top_k
    match routing:
        case "one expert":
            ids[:] = 3
        case "the same experts":
            ids[:] = np.arange(k)
        case "empty experts":  # and groups of them
            ids = np.where(ids % 5 == 2, ids, -1)
        case "one expert has most":
            ids = np.where(np.random.default_rng(2).random(ids.shape) < 0.8, experts - 1, ids)
        case "none":
            ids[:] = -1
    return x, ids, weights


ROUTINGS = [
    "random",
    "one expert",
    "the same experts",
    "empty experts",
    "one expert has most",
    "none",
]


@grid(variant=VARIANTS, format=FORMATS, kind=[VECTOR, TILE], routing=ROUTINGS)
def test_bits_do_not_depend_on_threads(
    variant: Variant, format: Format, kind: Kind, routing: str
) -> None:
    first = {}
    for threads in (1, 2, 3, 5, 9):
        layer = Layer.of(
            variant, format, 11, 3, 96, 160, kind=kind, threads=(threads,), biases=True
        )
        for tokens in TOKENS:
            y = layer.forward(*batch(layer, routing, tokens))
            np.testing.assert_array_equal(y, first.setdefault(tokens, y))


@grid(
    variant=VARIANTS,
    format=FORMATS,
    kind=[VECTOR, TILE],
    team=[((1,), (4,), (2,)), ((3, 2), (3, 2), (1, 1)), ((1, 2), (2, 4), (0, 3))],
)
def test_bits_do_not_depend_on_reserves(
    variant: Variant, format: Format, kind: Kind, team: tuple[tuple[int, ...], ...]
) -> None:
    """Passes of all kinds in any order: the reserves sit out those of few pairs."""
    plain, threads, reserves = team
    sizes = (11, 3, 96, 160)
    # Of two pools, whose parts of I follow the number of threads, not one thread each.
    alone = Layer.of(variant, format, *sizes, kind=kind, threads=plain)
    layer = Layer.of(variant, format, *sizes, kind=kind, threads=threads, reserves=reserves)
    expected = {tokens: alone.forward(*alone.batch(tokens)) for tokens in TOKENS}
    layer.layer.set_timing(True)
    for tokens in np.random.default_rng(1).choice(TOKENS, 40):
        before = layer.layer.timings()["down"]
        x, ids, weights = layer.batch(int(tokens))
        np.testing.assert_array_equal(layer.forward(x, ids, weights), expected[tokens])
        after = layer.layer.timings()["down"]
        lean = tokens <= layer.max_tokens and np.sum((ids >= 0) & (ids < layer.experts)) <= 512
        first = 0
        for pool, spare in zip(threads, reserves, strict=True):
            for index in range(pool):
                idle = before[first + index] == after[first + index]
                assert idle == (lean and index >= pool - spare)
            first += pool


@grid(variant=VARIANTS, format=FORMATS, kind=[VECTOR, TILE])
def test_bits_do_not_depend_on_tokens(variant: Variant, format: Format, kind: Kind) -> None:
    """Sums over pairs and over groups, own and shared plans: one order of additions."""
    layer = Layer.of(variant, format, 11, 3, 96, 160, kind=kind, max_tokens=300)
    x, ids, weights = layer.batch(700)
    whole = layer.forward(x, ids, weights)
    for tokens in TOKENS[:-1]:
        for first in (0, 250):
            part = slice(first, first + tokens)
            y = layer.forward(x[part], ids[part], weights[part])
            np.testing.assert_array_equal(y, whole[part])


@grid(
    variant=VARIANTS,
    format=FORMATS,
    kind=[AUTO, VECTOR, TILE],
    routing=ROUTINGS,
    where=lambda c: is_exact(c.format, c.kind),
)
def test_routings_against_the_oracle(
    variant: Variant, format: Format, kind: Kind, routing: str
) -> None:
    layer = Layer.of(variant, format, 11, 3, 96, 160, kind=kind, threads=(3,))
    for tokens in (0, 1, 40, 300):
        b = batch(layer, routing, tokens)
        errors = core.row_errors(layer.forward(*b), layer.reference(*b))
        assert np.all(errors <= 5e-3)


@core.formats(FORMATS)
def test_pools_sum_in_one_order(format: Format) -> None:
    """As many pools, other threads in them, pools with and without work: the same bits."""
    for pools in ([(2, 2), (1, 1), (4, 4)], [(1, 3), (2, 6)], [(1, 0, 1), (3, 0, 3)]):
        first = {}
        for threads in pools:
            kind = AUTO if is_exact(format, AUTO) else VECTOR
            layer = Layer.of(BEST, format, 11, 3, 96, 160, threads=threads, kind=kind)
            for tokens in (2, 40, 300):
                y = layer.forward(*layer.batch(tokens))
                np.testing.assert_array_equal(y, first.setdefault(tokens, y))
                errors = core.row_errors(y, layer.reference(*layer.batch(tokens)))
                assert np.all(errors <= 5e-3)


def test_groups_are_narrow_for_wide_layers() -> None:
    """From H = 4096 on there is one group, and more groups than experts there are never."""
    for experts, hidden in ((1, 32), (3, 64), (2, 4100)):
        layer = Layer(("_C", "avx2"), INT8_ROW, 0, experts, 1, hidden, 64, threads=(2,))
        for tokens in (1, 600):
            b = layer.batch(tokens)
            assert np.all(core.row_errors(layer.forward(*b), layer.reference(*b)) <= 5e-3)


def test_threads_that_run_out_of_tasks_take_others() -> None:
    """More threads than CPUs: some are held up in every pass."""
    threads = 2 * len(os.sched_getaffinity(0))
    layer = Layer(("_C", "avx2"), BF16, 0, 8, 4, 256, 256, threads=(threads,))
    expected = layer.forward(*layer.batch(200))
    for _ in range(200):
        np.testing.assert_array_equal(layer.forward(*layer.batch(200)), expected)
        if layer.layer.stats()["stolen_tasks"]:
            return
    pytest.fail("no task was taken over in 200 passes")


def test_one_thread_has_nobody_to_take_from() -> None:
    layer = Layer(("_C", "avx2"), BF16, 0, threads=(1,))
    layer.forward(*layer.batch(200))
    assert layer.layer.stats()["stolen_tasks"] == 0


# --- tuning and timings -------------------------------------------------------------------------


def tuned(**tuning: Any) -> Layer:
    layer = Layer(BEST, INT8_ROW, 0, 6, 3, 96, 160)
    layer.layer = core._C.MoeLayer(
        core.team("_C", (2,)),
        num_experts=6,
        top_k=3,
        hidden_size=96,
        intermediate_size=160,
        forms=[(INT8_ROW, 0, 0)] * 3,
        cpu_slots=[True] * 6,
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=256,
        table=BEST.table,
        kind=AUTO,
        **tuning,
    )
    for slot in range(6):
        layer.load(slot)
    return layer


def test_tuning_changes_no_bit_of_integer_formats() -> None:
    plain = tuned()
    for tuning in (
        dict(row_block=32),
        dict(row_block=160),
        dict(task_bytes=1),
        dict(task_bytes=1 << 40),
        dict(gemm_min_rows=[1] * 3),
        dict(gemm_min_rows=[10_000] * 3),
        dict(gemm_min_rows=[3, 20, 9]),
    ):
        other = tuned(**tuning)
        for tokens in (1, 40, 300):
            b = plain.batch(tokens)
            np.testing.assert_array_equal(other.forward(*b), plain.forward(*b))


@pytest.mark.skipif("amx" not in core._C.kernel_tables(), reason="this CPU has no tile kernels")
def test_gemm_min_rows_decides_the_kernel() -> None:
    for least, tiles in ((0, True), (1, True), (21, False)):
        layer = tuned(gemm_min_rows=[least] * 3)
        x, ids, weights = layer.batch(20)
        ids[:] = [0, 1, 2]
        layer.forward(x, ids, weights)
        assert (layer.layer.stats()["tile_calls"] == 3) is tiles


@pytest.mark.parametrize(
    "wrong",
    [
        dict(row_block=8),
        dict(row_block=1 << 20),
        dict(task_bytes=-1),
        dict(gemm_min_rows=[0, -1, 0]),
    ],
)
def test_wrong_tuning_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tuned(**wrong)


def test_timings_are_off_until_asked_for() -> None:
    layer = Layer(("_C", "avx2"), INT8_ROW, 0, 11, 3, threads=(2,))
    layer.forward(*layer.batch(9))
    assert all(times == [(0, 0), (0, 0)] for times in layer.layer.timings().values())
    layer.layer.set_timing(True)
    layer.forward(*layer.batch(300))
    times = layer.layer.timings()
    assert set(times) == {"tokens", "gather", "gate_up", "quantise", "down", "finish"}
    for phase in ("tokens", "gate_up", "quantise", "down"):
        assert sum(work for work, _ in times[phase]) > 0
    layer.layer.set_timing(False)
    layer.forward(*layer.batch(9))
    assert all(times == [(0, 0), (0, 0)] for times in layer.layer.timings().values())


# --- memory -------------------------------------------------------------------------------------

NODES = """
import numpy as np, sys
sys.path.insert(0, sys.argv[1])
from tests.kernels import core
for threads in ((1, 1), (2, 1), (1, 3), (2, 0)):
    team = core._C.Team(list(threads), [0, 1])
    core.team = lambda *_, team=team: team
    layer = core.Layer(("_C", "avx2"), core.INT8_ROW, 0, 5, 3, 96, 200, threads=threads)
    for tokens in (1, 9, 300):
        b = layer.batch(tokens)
        assert np.all(core.row_errors(layer.forward(*b), layer.reference(*b)) < 5e-3)
print("fine")
"""


def test_two_simulated_nodes() -> None:
    """Two nodes of one CPU each, perhaps one that is not there: uneven splits, an empty pool."""
    cpus = sorted(os.sched_getaffinity(0))
    topology = f"0:{cpus[0]};1:{cpus[-1] if len(cpus) > 1 else cpus[0] + 1}"
    done = subprocess.run(
        [sys.executable, "-c", NODES, str(Path(__file__).parents[2])],
        env={**os.environ, "KT_TOPOLOGY": topology},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def huge_bytes() -> int:
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in smaps if line.startswith("AnonHugePages:"))


def test_weights_lie_on_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("transparent huge pages are off")
    shapes = [(16, 512, 1024), (16, 512, 1024), (16, 1024, 512)]
    weights = [np.ones(shape, np.float32) for shape in shapes]  # numpy asks for huge pages too
    before = huge_bytes()
    layer = Layer(("_C", "avx2"), BF16, 0, 16, 2, 1024, 512, weights=weights)  # 50 MB
    gained = huge_bytes() - before
    if gained == 0 and "thp_fault_alloc 0" in Path("/proc/vmstat").read_text():
        pytest.skip("this system gives no huge pages")
    assert gained >= 0.8 * layer.layer.packed_bytes
