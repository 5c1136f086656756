"""Which weights of hot experts an engine's loader has delivered. Independent of the engines.

An engine allocates its tensors of experts without values. The loader of a model class copies into
them what it finds in the checkpoint and knows by name. What it leaves out keeps the values that
were in memory, and at most a line in the log says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..runtime.text import lacking

# Tensors that some checkpoints do not have: scales of activations, orders of columns, zero points,
# sizes, and types. If one has something of them, it must have all.
_OPTIONAL = re.compile("input|g_idx|zero|offset|shape|type")


class HotDelivery:
    """The parts of a layer's hot experts that arrived in the engine's own tensors.

    Tensors have the engines' names: "w13_…" holds gate and up of all experts, and "w2_…" holds
    down; of a format with scales or biases, there is one for each of these, too.

    place: of the layer, for messages. engine: its name, for messages. matrices: those of an expert.
    """

    def __init__(self, place: str, engine: str, matrices: Sequence[str]) -> None:
        self._place, self._engine, self._matrices = place, engine, matrices
        self._arrived: dict[str, set[tuple[int, str]]] = {}

    def add(self, tensor: str, experts: Iterable[int], which: str) -> None:
        """Notes what arrived in a tensor: the part of a matrix ("gate", "up" or "down") of these
        experts."""
        self._arrived.setdefault(tensor, set()).update((expert, which) for expert in experts)

    def check_complete(
        self, tensors: Iterable[str], experts: Sequence[int], shared: Sequence[int] = ()
    ) -> None:
        """Raises ValueError that names what did not arrive.

        tensors: all that the engine's loader has to fill; names other than "w13_…" and "w2_…" are
        not those of experts. shared: numbers of the shared experts in the same tensors, after those
        of all routed ones.
        """
        missing: dict[int, list[str]] = {}
        for tensor in tensors:
            stem, _, part = tensor.partition("_")
            arrived = self._arrived.get(tensor, ())
            if stem not in ("w13", "w2") or (not arrived and _OPTIONAL.search(part)):
                continue
            for expert in (*experts, *shared):
                missing.setdefault(expert, []).extend(
                    f"{which} of {tensor}"
                    for which in self._matrices
                    if (which == "down") == (stem == "w2") and (expert, which) not in arrived
                )
        if problem := lacking(missing):
            fused = f" (from {shared[0]} on, shared ones)" if shared else ""
            raise ValueError(
                f"{self._place}: {self._engine} did not load weights of hot experts{fused}: "
                f"{problem}. The checkpoint lacks them, or the loader of this model class leaves "
                "them out; with --kt-weight-path and --kt-num-gpu-experts 0, kt-moe reads all "
                "experts itself"
            )
