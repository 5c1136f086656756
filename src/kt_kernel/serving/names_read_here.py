"""Which tensors of a served checkpoint belong to experts that kt-moe reads itself, by their names:
cold ones, and hot ones where kt-moe converts them from files.

An engine must not load them: it has no place for them, and reading them would take as long as
reading the model twice. Independent of the engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ..checkpoint.safetensors.families import FAMILIES
from ..moe.placement import Placement

_T = TypeVar("_T")

# "layers.{L}." and what follows it, up to the module "experts" (not "shared_experts").
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.(?:.*\.)?experts\.(.+)", re.DOTALL)
# "{e}.{projection}…", or the projection first, as ModelOpt writes some models.
_NUMBER = re.compile(r"(?:(?:gate|up|down)_proj\.)?(\d{1,9})\.")
# A stack of a projection of all experts. Other tensors in the module, such as the bias of a router,
# are the engine's.
_STACK = re.compile(r"(?:gate_up_proj|gate_proj|up_proj|down_proj|w[123]|w13)(?![a-z0-9])")
# Stacks by the names of a family, not all of which are in a module "experts".
_FAMILY_STACKS = {
    re.escape(name.removesuffix(".weight"))
    for family in FAMILIES.values()
    for stacked in family.stacked
    for name in stacked.names().values()
}
_FAMILY_STACK = re.compile(
    rf"(?:^|\.)layers\.(\d{{1,9}})\.({'|'.join(sorted(_FAMILY_STACKS))})(?![a-z0-9])"
)


class NamesReadHere:
    """placements: of the layers whose experts kt-moe reads, by layer number. It reads the cold ones
    of a placement, so a layer whose hot experts it reads, too, has a placement without any."""

    def __init__(self, placements: Mapping[int, Placement]) -> None:
        self._placements = dict(placements)

    def __contains__(self, name: str) -> bool:
        """Whether a tensor holds experts that kt-moe reads, and nothing else. A tensor with all
        experts of a layer does only if kt-moe reads all of them."""
        stack = _FAMILY_STACK.search(name)
        match = _EXPERTS.search(name) or stack
        placement = self._placements.get(int(match[1])) if match else None
        if match is None or placement is None:
            return False
        number = _NUMBER.match(match[2])
        if number is None:
            return placement.num_slots == 0 and bool(stack or _STACK.match(match[2]))
        expert = int(number[1])
        return expert < placement.num_experts and placement.slots[expert] < 0

    def without(self, weights: Iterable[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
        """The named tensors of an engine's loader that are not in here."""
        return ((name, tensor) for name, tensor in weights if name not in self)
