"""Which experts of a layer are hot, computed by the engine, and which are cold, on the CPU."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..runtime.tensors import need_dense

COLD = -1  # instead of the slot of a cold expert


@dataclass(frozen=True)
class Placement:
    """Where each of a layer's experts is computed. Immutable; equal placements hash alike.

    A hot expert has a slot in the engine's weights, on the engine's device; a cold one is computed
    on the CPU. (Arguments of the public API call a hot expert one "on the GPU".)

    Attributes:
        slots: [E], the slot of each expert, `COLD` for a cold one.
        num_slots: slots in the engine's weights. Some may be unused. If there are as many slots as
            experts, every expert is hot and has the slot of its own number: the engine's layer runs
            unchanged.

    Raises:
        TypeError: a slot, or ``num_slots``, is not an integer.
        ValueError: no experts, more slots than experts, a slot that does not exist or that two
            experts share, or ``num_slots`` = E and slots other than 0 … E-1.
    """

    slots: tuple[int, ...]
    num_slots: int

    def __post_init__(self) -> None:
        slots = tuple(_integer(f"slot of expert {e}", slot) for e, slot in enumerate(self.slots))
        count, experts = _integer("num_slots", self.num_slots), len(slots)
        if not experts:
            raise ValueError("placement: no experts; at least one is needed")
        if not 0 <= count <= experts:
            raise ValueError(f"placement: num_slots={count}; accepted: 0 to {experts}")
        owner: dict[int, int] = {}
        for expert, slot in enumerate(slots):
            if slot == COLD:
                continue
            if not 0 <= slot < count:
                raise ValueError(
                    f"placement: expert {expert} is in slot {slot}; accepted: {COLD} (cold) and "
                    f"the {count} slots from 0 on"
                )
            if slot in owner:
                raise ValueError(
                    f"placement: experts {owner[slot]} and {expert} are both in slot {slot}"
                )
            owner[slot] = expert
        if count == experts and slots != tuple(range(experts)):
            raise ValueError(
                f"placement: num_slots={count} is the number of experts, so expert e must be in "
                "slot e; a layer with cold experts needs fewer slots"
            )
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "num_slots", count)

    @classmethod
    def first(cls, num_experts: int, count: int) -> Placement:
        """The first ``count`` experts are hot. ValueError unless 0 ≤ count ≤ num_experts."""
        if not 0 <= count <= num_experts:
            raise ValueError(
                f"placement: {count} hot experts of {num_experts}; accepted: 0 to {num_experts}"
            )
        return cls((*range(count), *[COLD] * (num_experts - count)), count)

    @classmethod
    def from_mask(cls, mask: Any, name: str = "mask") -> Placement:
        """From bool [E], True = hot: a tensor, or a value that ``torch.as_tensor`` accepts. Hot
        experts get the slots from 0 on, in ascending order; no slot is unused.

        TypeError if it is not a mask, ValueError for another dtype or shape; both contain ``name``.
        """
        if not isinstance(mask, torch.Tensor):
            try:
                mask = torch.as_tensor(mask, device="cpu")
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f"{name} must be a bool tensor [E], got {type(mask).__name__}"
                ) from None
        need_dense(name, mask)
        if mask.dtype != torch.bool or mask.dim() != 1 or not mask.numel():
            raise ValueError(f"{name} must be bool [E], got {mask.dtype} {list(mask.shape)}")
        slots, count = [], 0
        for hot in mask.tolist():
            slots.append(count if hot else COLD)
            count += hot
        return cls(tuple(slots), count)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.slots)

    @property
    def num_hot(self) -> int:
        """Number of hot experts."""
        return len(self.hot_experts)

    @property
    def num_cold(self) -> int:
        """Number of cold experts."""
        return len(self.cold_experts)

    @property
    def all_hot(self) -> bool:
        """Whether every expert is hot. This depends only on ``num_slots``, so all placements of a
        layer agree."""
        return self.num_slots == self.num_experts

    @cached_property
    def hot_experts(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(expert for expert, slot in enumerate(self.slots) if slot != COLD)

    @cached_property
    def cold_experts(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(expert for expert, slot in enumerate(self.slots) if slot == COLD)

    @property
    def mask(self) -> torch.Tensor:
        """bool [E] on the CPU, True = hot; a new tensor each time."""
        return torch.tensor([slot != COLD for slot in self.slots], dtype=torch.bool, device="cpu")

    def slot_map(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """``slots`` as int32 [E] on a device; a new tensor each time."""
        return torch.tensor(self.slots, dtype=torch.int32, device=device)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def generate_gpu_experts_masks(activation_freq: torch.Tensor, num_gpu_experts: int) -> torch.Tensor:
    """Puts the globally most frequent layer-expert pairs on the GPU.

    Args:
        activation_freq: [L, E], how often expert e of layer l was selected; any real dtype, any
            device.
        num_gpu_experts: total over all layers, not per layer; clamped to 0 … L·E.

    Returns:
        bool [L, E] on the CPU, True = on the GPU. Among equal frequencies, the lower layer comes
            first, then the lower expert.

    Raises:
        TypeError: ``activation_freq`` is not a tensor or ``num_gpu_experts`` not an integer.
        ValueError: not two-dimensional, not dense, complex, or contains NaN.
    """
    if not isinstance(activation_freq, torch.Tensor):
        raise TypeError(
            f"activation_freq must be a tensor [L, E], got {type(activation_freq).__name__}"
        )
    need_dense("activation_freq", activation_freq)
    count = _integer("num_gpu_experts", num_gpu_experts)
    if activation_freq.dim() != 2:
        raise ValueError(
            f"activation_freq must have shape [L, E], got {list(activation_freq.shape)}"
        )
    if activation_freq.is_complex():
        raise ValueError(f"activation_freq must be real, got {activation_freq.dtype}")
    flat = activation_freq.detach().cpu().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    elif flat.is_floating_point():
        flat = flat.double()
        if bool(flat.isnan().any()):
            where = int(flat.isnan().nonzero()[0])
            layer, expert = divmod(where, activation_freq.shape[1])
            raise ValueError(f"activation_freq[{layer}, {expert}] is NaN")
    count = min(max(count, 0), flat.numel())
    order = torch.sort(flat, descending=True, stable=True).indices[:count]
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device="cpu")
    mask[order] = True
    return mask.reshape(activation_freq.shape)
