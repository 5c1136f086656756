"""The objects with which the calls are made."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from kt_kernel.weights.formats import all_formats

from ..sources import BF16
from .specs import Address, Flag, Number, Real, Some, Text, good

MAX = (1 << 63) - 1
EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 2, 1, 64, 96, 4
NONE = Address(0)


def at(a: np.ndarray, says: str = "address 0") -> Address:
    return Address(a.ctypes.data, says)


def weight_format(good: int) -> Number:
    return Number(good, 0, len(all_formats()) - 1)


class Things:
    """The objects with which the calls are made, kept alive."""

    def __init__(self, core: ModuleType, library: str) -> None:
        self.core, self.library = core, library
        self.team = core.Team([1], [-1])
        self.w = np.ones((64, 128), np.float32)  # as large as any weights here
        self.codes = np.zeros((64, 64), np.uint8)
        self.scale, self.zero = np.ones((64, 4), np.float16), np.zeros((64, 4), np.uint8)
        self.blocks = np.zeros((64, 4 * 20), np.uint8)
        self.x, self.y = (
            np.ones((TOKENS, HIDDEN), np.float32),
            np.ones((TOKENS, HIDDEN), np.float32),
        )
        self.ids, self.router = (
            np.zeros((TOKENS, TOP_K), np.int64),
            np.ones((TOKENS, TOP_K), np.float32),
        )
        self.order = np.arange(HIDDEN, dtype=np.int32)
        self.bias = np.ones(128, np.float32)
        self.bad_orders = [
            np.where(self.order == 5, value, self.order).astype(np.int32)
            for value in (6, -1, HIDDEN)
        ]
        self.layer = self.new_layer()
        self.dense = (at(self.w), NONE, NONE, Real(1.0))
        for slot in range(EXPERTS):
            self.layer.load(slot, *[good(self.dense)] * 3, dtypes=[2] * 3)
        self.tiles = [
            np.zeros(core.packed_shape(BF16, 0, 0, *shape), np.uint8)
            for shape in ((INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER))
        ]
        self.side = core.StreamSide(TOKENS, HIDDEN, TOP_K, 2, True)
        self.kernel = core.KernelLaunch(1, 32, 0, "pi", library=library)
        self.context = core.CudaContext(library)
        self.uploads = core.UploadQueue(self.context, 0)

    def new_layer(self) -> Any:
        return self.core.MoeLayer(**{name: good(spec) for name, spec in self.layer_specs().items()})

    def layer_specs(self) -> dict[str, Any]:
        form = (weight_format(BF16), Number(0, 0, 0), Number(0, 0, 2))
        return dict(
            team=Some(self.team),
            num_experts=Number(EXPERTS, EXPERTS, EXPERTS),
            top_k=Number(TOP_K, 1, 1 << 16),
            hidden_size=Number(HIDDEN, 1, 1 << 16),
            intermediate_size=Number(INTER, 1, 1 << 16),
            forms=[form] * 3,
            cpu_slots=[Flag(True)] * EXPERTS,
            swiglu_limit=Real(0.0, (-1.0,)),
            swiglu_alpha=Real(0.0, ()),
            max_tokens=Number(8, 1, (1 << 24) - 1),
            table=Text("avx2"),
            kind=Number(0, 0, 2),
            activation=Number(0, 0, 5),
            gated=Flag(True),
            weight_on_input=Flag(False),
            situ_beta=Real(1.0, (0.0, -1.0)),
            situ_linear_beta=Real(0.0, (-1.0,)),
            gemm_min_rows=[Number(0, 0, MAX, True)] * 3,
            row_block=Number(0, 0, 256, True),
            task_bytes=Number(0, 0, MAX, True),
        )

    def engine(self) -> Any:
        """An engine with one slot."""
        engine = self.core.StreamEngine(8, 10.0)
        engine.add_slot(
            self.layer, "layer", self.core.StreamSide(TOKENS, HIDDEN, TOP_K, 2, True), 0, 0, TOP_K
        )
        return engine

    def submit(self, **given: Any) -> Any:
        ticket = self.layer.submit(**given)
        ticket.wait()
        return ticket
