"""Settings of the forward pass that depend on the machine, measured once on each.

    python -m kt_kernel.moe.tuning                    # measures all methods, prints the result
    python -m kt_kernel.moe.tuning --save FILE.json   # and writes it, for configs/machines

A GEMV kernel streams an expert's weights for a few rows; a GEMM kernel unpacks them into a cache
for many. The number of rows at which GEMM becomes faster, and the number of rows that should share
unpacked weights, depend on the machine. They come from ``configs/machines`` (installed as
``kt_kernel/machines``), from the user's cache folder, or from a measurement of about a second per
weight format, made by one process at a time. A measurement on a quiet machine is kept
(`machine_cache`) and used from then on, for any number of threads; a disturbed one is used by its
own process only. In formats with float products, the choice of kernel affects the last bits of
results. ``KT_KERNEL_KIND``, or a file in ``configs/machines``, fixes it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..runtime.files import need_writable, write_output
from ..runtime.machine import cpu_model, machine_key
from ..runtime.machine_cache import measured_once, read_cache
from ..runtime.pools import get_team, plan_pools
from ..runtime.variant import KINDS, debug, kernel_table, native
from ..weights.expert_tensors import matrix_shapes
from ..weights.formats import FP8_BLOCK, FP8_ROW, NVFP4, LayerForm, WeightForm
from ..weights.methods import METHODS
from ..weights.quantised import SCALE_TYPES, CoreSource, QuantisedMatrix

#: Smaller layers (packed bytes) keep the defaults: measuring would take longer than it saves.
WORTH_BYTES = 256 << 20

TRIED_ROWS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)  # rows of an expert
TRIED_BLOCKS = (64, 128, 256)
NEVER = 64  # gemm_min_rows if GEMM was slower at the largest of TRIED_ROWS
_EXPERTS, _HIDDEN, _INTER = 16, 2048, 512
_ROUNDS = 2  # in each of the two passes
_NOISE = 1.03  # normal variation of the times of one kernel
# Two passes agree if their times typically differ by less than this factor, and their resulting row
# counts by at most this many steps of TRIED_ROWS.
_SAME_TIME, _SAME_ROWS = 1.15, 2
_Source = torch.Tensor | QuantisedMatrix  # what the core packs
_MACHINES = Path(__file__).parents[1] / "machines"


@dataclass(frozen=True)
class Tuning:
    """Machine-dependent arguments of a layer.

    Attributes:
        gemm_min_rows: rows of an expert from which its GEMM kernel is used, 1 to ``NEVER``.
        row_block: rows that a GEMM kernel processes at a time, a multiple of 32.
    """

    gemm_min_rows: int
    row_block: int


def tuning_for(form: WeightForm, table: str) -> Tuning:
    """The tuning for weights of ``form`` with this kernel table on this machine."""
    found = _sensible(_saved().get(_key(form, table)))
    if found is not None:
        debug(f"{_key(form, table)}: {found} (configs/machines)")
        return found
    key = f"{machine_key()}, {table}: {_name(form)}"
    return measured_once("tuning.json", key, _sensible, lambda: _entry(form, table))


def _entry(form: WeightForm, table: str) -> tuple[dict[str, int], str | None]:
    found, doubt = measure(form, table)
    return asdict(found), doubt


def layer_tuning(form: LayerForm, table: str) -> dict[str, Any]:
    """Arguments of the compiled layer for weights of ``form``. Each matrix switches to GEMM at the
    number of rows measured for its own form; all matrices share the smallest row block."""
    found = [tuning_for(one, table) for one in form]
    return {
        "gemm_min_rows": [one.gemm_min_rows for one in found],
        "row_block": min(one.row_block for one in found),
    }


def _key(form: WeightForm, table: str) -> str:
    """The key in ``configs/machines``, whose files are for all machines with the same CPU."""
    return f"{cpu_model()}, {table}: {_name(form)}"


def _name(form: WeightForm) -> str:
    group = f" g{form.group_size}" if form.group_size else ""
    return f"{form.format.title}{group}"


def _sensible(entry: Any) -> Tuning | None:
    """A stored entry as a Tuning, or None if it is invalid."""
    if not isinstance(entry, dict):
        return None
    values: list[Any] = [entry.get(name) for name in ("gemm_min_rows", "row_block")]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return None
    found = Tuning(*values)
    in_range = 1 <= found.gemm_min_rows <= NEVER and found.row_block in TRIED_BLOCKS
    return found if in_range else None


@functools.cache
def _saved() -> dict[str, Any]:
    """All entries of the files in ``kt_kernel/machines``."""
    found: dict[str, Any] = {}
    for path in sorted(_MACHINES.glob("*.json")):
        found |= read_cache(path)
    return found


def first_row_count(gemv: Sequence[float], gemm: Sequence[float]) -> int:
    """The smallest of ``TRIED_ROWS`` from which GEMM is never clearly slower, else ``NEVER``.

    Args:
        gemv, gemm: seconds at each of ``TRIED_ROWS``.
    """
    best = NEVER
    for rows, slow, fast in reversed(list(zip(TRIED_ROWS, gemv, gemm, strict=True))):
        if fast > _NOISE * slow:
            break
        best = rows
    return best


def measure(form: WeightForm, table: str) -> tuple[Tuning, str | None]:
    """Times a synthetic layer of these weights: both kinds of kernels, and several row blocks.

    Returns the combined result of two passes, and how they disagree (None if they agree).
    """
    rows = max(*TRIED_ROWS, *TRIED_BLOCKS)
    make = functools.partial(_Layer, form, table, _random_expert(form), rows)
    gemms = [make(KINDS["tile"], block) for block in TRIED_BLOCKS]
    times = _together(_two_passes([functools.partial(layer.run, rows) for layer in gemms]))
    best = times.index(min(times))
    layers = make(KINDS["vector"], TRIED_BLOCKS[best]), gemms[best]
    runs = [functools.partial(layer.run, n) for layer in layers for n in TRIED_ROWS]
    passes = _two_passes(runs)
    return Tuning(_first_rows(_together(passes)), TRIED_BLOCKS[best]), _disagreement(*passes)


def _first_rows(times: list[float]) -> int:
    """`first_row_count` of the times of GEMV and then GEMM."""
    half = len(TRIED_ROWS)
    return first_row_count(times[:half], times[half:])


def _two_passes(runs: Sequence[Callable[[], float]]) -> tuple[list[float], list[float]]:
    """Seconds of each, the best of some rounds. Taken in turn, so that what disturbs the machine
    for a moment disturbs all alike."""
    one, other = (
        list(map(min, *([run() for run in runs] for _ in range(_ROUNDS)))) for _ in range(2)
    )
    return one, other


def _together(passes: tuple[list[float], list[float]]) -> list[float]:
    return list(map(min, *passes))


def _disagreement(one: list[float], other: list[float]) -> str | None:
    """How two passes over GEMV and GEMM differ, in words; None if they agree."""
    factor = statistics.median(max(pair) / min(pair) for pair in zip(one, other, strict=True))
    if factor > _SAME_TIME:
        return f"times of one pass are {factor:.2f} times those of another"
    rows = _first_rows(one), _first_rows(other)
    steps = [[*TRIED_ROWS, NEVER].index(count) for count in rows]
    if abs(steps[0] - steps[1]) > _SAME_ROWS:
        return f"one pass results in {rows[0]} rows and another in {rows[1]}"
    return None


def _sizes(form: WeightForm) -> tuple[int, int]:
    """H and I, multiples of the form's group size."""
    unit = form.column_unit
    return -(-_HIDDEN // unit) * unit, -(-_INTER // unit) * unit


class _Layer:
    """Experts with one kind of kernel, all of which get the same number of rows."""

    def __init__(
        self,
        form: WeightForm,
        table: str,
        weights: list[_Source],
        rows: int,
        kind: int,
        block: int,
    ) -> None:
        hidden, inter = _sizes(form)
        self._core = native().MoeLayer(
            get_team(plan_pools(None, None, None)),
            num_experts=_EXPERTS,
            top_k=1,
            hidden_size=hidden,
            intermediate_size=inter,
            forms=[form.core] * 3,
            cpu_slots=[True] * _EXPERTS,
            swiglu_limit=0.0,
            swiglu_alpha=0.0,
            max_tokens=_EXPERTS * rows,
            table=table,
            kind=kind,
            row_block=block,
        )
        sources = [CoreSource(w) for w in weights]
        for slot in range(_EXPERTS):
            self._core.load(
                slot,
                *(source.address for source in sources),
                dtypes=[source.dtype for source in sources],
            )
        # Explicit types: engines load models with another default.
        self._x = torch.randn(_EXPERTS * rows, hidden, dtype=torch.float32).bfloat16()
        self._ids = torch.arange(len(self._x)) % _EXPERTS
        self._router = torch.ones(len(self._x), dtype=torch.float32)
        self._out = torch.empty_like(self._x)

    def run(self, rows: int) -> float:
        """Seconds of a forward pass with ``rows`` rows for each expert."""
        begin = time.perf_counter()
        self._core.submit(
            self._x.data_ptr(),
            0,
            rows * _EXPERTS,
            self._ids.data_ptr(),
            self._router.data_ptr(),
            self._out.data_ptr(),
        ).wait()
        return time.perf_counter() - begin


def _random_expert(form: WeightForm) -> list[_Source]:
    """gate, up and down."""
    return [random_source(form, *shape) for shape in matrix_shapes(*_sizes(form)).values()]


def random_source(form: WeightForm, n: int, k: int) -> torch.Tensor | QuantisedMatrix:
    """A random matrix [N, K] that packs to this form: bf16 where the core quantises, else with
    scales of one."""
    if form.format.from_dense and form.scale_type == 0:
        return (torch.randn(n, k) * k**-0.5).bfloat16()
    return _random_matrix(form, n, k)


def _random_matrix(form: WeightForm, n: int, k: int) -> QuantisedMatrix:
    format = form.format
    if format.ggml:  # float16 with bytes below 0x60 are finite
        row_bytes = k // format.block_columns * format.file_bytes
        blocks = torch.randint(0, 0x60, (n, row_bytes), dtype=torch.uint8)
        return QuantisedMatrix(format, blocks, None)
    if format.grouped:
        dtype = tuple(SCALE_TYPES)[form.scale_type]
        scale = torch.ones(n, k // form.group_size, dtype=dtype)
    elif format == FP8_BLOCK:
        scale = torch.ones(-(-n // 128), -(-k // 128), dtype=torch.float32)
    elif format == FP8_ROW:
        scale = torch.ones(n, dtype=torch.float32)
    else:
        one = 0x38 if format == NVFP4 else 127  # 1.0 in e4m3 or ue8m0
        scale = torch.full((n, k // format.scale_columns), one, dtype=torch.uint8)
    # Codes below 0x60 are numbers up to 32 in e4m3, and any two nibbles otherwise.
    width = k * format.bits // 8
    codes = torch.randint(0, 0x60, (n, width), dtype=torch.uint8)
    zero = torch.full(scale.shape, 8, dtype=torch.uint8) if format.zero_points else None
    return QuantisedMatrix(format, codes, scale, zero)


def _forms() -> list[WeightForm]:
    """The forms of all methods; if the source decides the group size, 32 and 128."""
    forms: dict[WeightForm, None] = {}
    for method in METHODS.values():
        if method.form is not None:
            forms[method.form] = None
            continue
        for format in method.formats:
            groups = (32, 128) if format.grouped else (0,)
            forms |= {WeightForm(format, group): None for group in groups}
    return list(forms)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kt_kernel.moe.tuning",
        description="Measure how many rows an expert needs before GEMM kernels are faster on "
        "this machine.",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="also write the result to this file, as JSON"
    )
    args = parser.parse_args()
    if args.save:
        try:
            need_writable(args.save)
        except OSError as error:
            parser.error(f"--save {error.filename}: {error.strerror}")
    table = kernel_table()
    result: dict[str, dict[str, int]] = {}
    for form in _forms():
        key = _key(form, table)
        found, doubt = measure(form, table)
        print(f"{key}: {asdict(found)}", flush=True)
        if doubt is None:
            result[key] = asdict(found)
        else:
            print(f"{key}: disturbed, not saved: {doubt}", file=sys.stderr, flush=True)
    if args.save:
        write_output(args.save, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
