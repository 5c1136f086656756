"""Imported in an engine's process: makes other experts hot than the first ones.

No option selects such a placement yet. With SCATTERED_EXPERTS="6,1,4", layers with three hot
experts have these in the slots 0, 1 and 2.
"""

import os
from typing import Any

from kt_kernel.moe.placement import COLD, Placement

VARIABLE = "SCATTERED_EXPERTS"


def _first(cls: Any, num_experts: int, count: int, original: Any = Placement.first) -> Placement:
    hot = [int(expert) for expert in os.environ.get(VARIABLE, "").split(",") if expert]
    if len(hot) != count or not hot:
        return original(num_experts, count)
    slots = [hot.index(e) if e in hot else COLD for e in range(num_experts)]
    return Placement(tuple(slots), count)


Placement.first = classmethod(_first)
