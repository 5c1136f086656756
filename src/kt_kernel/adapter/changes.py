"""What an adapter adds to the weights of experts, layer by layer.

The two forms of adapters for experts are those of `kt_kernel.sft.peft_format`: single modules of
each expert with A [r, in] and B [out, r], or 3-D parameters ``gate_up_proj`` and ``down_proj`` of
all experts with A [E r, in], expert by expert, and B [out, r E], where column j E + e is column j
of expert e.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..weights.expert_tensors import MATRICES, matrix_shapes
from .files import PREFIX, Adapter

#: Matrices by the names of their modules.
MATRIX_OF = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
#: The module of a layer's experts, at the beginning of a name.
EXPERTS_IN_NAME = r"^(.*\blayers\.\d+\.(?:.*\.)?experts)"

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT_TENSOR = re.compile(EXPERTS_IN_NAME + r"\.(.*)lora_A\.weight$")
_SINGLE = re.compile(rf"(\d+)\.({'|'.join(MATRIX_OF)})\.")
# PEFT wraps a module once for each adapted parameter, the last one outermost. `gate_up_proj` comes
# before `down_proj` in modules.
_WRAPPED = ("", "base_layer.")


@dataclass(frozen=True)
class LowRank:
    """scaling * B A, of a matrix or of all experts' matrices.

    Attributes:
        a: [r, in], or [E r, in] for a parameter of all experts.
        b: [out, r], or [out, r E].
        rank: r.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    rank: int

    def of_expert(self, expert: int, experts: int) -> LowRank:
        """That of one expert of a parameter."""
        a = self.a.unflatten(0, (experts, -1))[expert]
        b = self.b.unflatten(1, (-1, experts))[..., expert]
        return LowRank(a, b, self.scaling, self.rank)

    def product(self, rows: slice = slice(None)) -> torch.Tensor:
        """float32 [out, in], or some of its rows."""
        return self.scaling * self.b[rows].float() @ self.a.float()


@dataclass
class LayerChange:
    """What an adapter adds to the experts of one layer.

    Attributes:
        module: name of the module of experts, such as "model.layers.3.mlp.experts".
        fused: by parameter, "gate_up_proj" or "down_proj".
        single: by matrix ("gate", "up", "down") and expert.
    """

    module: str
    fused: dict[str, LowRank] = field(default_factory=dict)
    single: dict[tuple[str, int], LowRank] = field(default_factory=dict)

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return layer_number(self.module)

    def misfit(self, experts: int, hidden: int | None = None, inter: int | None = None) -> str:
        """Why the adapter does not fit a layer of these sizes; "" if it does.

        hidden, inter: hidden and intermediate size of the experts; None: not known.
        """
        for matrix in MATRICES:
            named = {expert for other, expert in self.single if other == matrix}
            if named and named != set(range(experts)):
                return f"{matrix} has adapters of {len(named)} experts up to {max(named)}"
        for name, low in self.fused.items():
            if len(low.a) != low.rank * experts or low.b.shape[1] != low.rank * experts:
                return f"{name} has {len(low.a)} rows of A for rank {low.rank}"
        if hidden is None or inter is None:
            return ""
        shapes = matrix_shapes(hidden, inter)
        gate, down = shapes["gate"], shapes["down"]
        shapes |= {"gate_up_proj": (2 * gate[0], gate[1]), "down_proj": down}
        lows = {(name, ""): low for name, low in self.fused.items()}
        lows |= {(name, f" of expert {e}"): low for (name, e), low in self.single.items()}
        for (name, which), low in lows.items():
            found = low.b.shape[0], low.a.shape[1]
            if found != shapes[name]:
                return (
                    f"the adapter's {name}{which} is {list(found)}, and hidden size {hidden} and "
                    f"intermediate size {inter} make it {list(shapes[name])}"
                )
        return ""

    def matrix(
        self, name: str, expert: int, experts: int, interleaved: bool = False
    ) -> torch.Tensor | None:
        """What is added to "gate", "up" or "down" of one expert: float32 [N, K], or None.

        interleaved: whether gate and up alternate in ``gate_up_proj``.
        """
        if (name, expert) in self.single:
            return self.single[name, expert].product()
        low = self.fused.get("down_proj" if name == "down" else "gate_up_proj")
        if low is None:
            return None
        one = low.of_expert(expert, experts)
        if name == "down":
            return one.product()
        number, half = ("gate", "up").index(name), len(one.b) // 2
        if interleaved:
            return one.product(slice(number, None, 2))
        return one.product(slice(number * half, (number + 1) * half))

    def parameter(self, name: str, expert: int, experts: int) -> torch.Tensor | None:
        """The same of "gate_up_proj" or "down_proj", with gate before up unless the adapter is of
        that parameter."""
        if name in self.fused:
            return self.fused[name].of_expert(expert, experts).product()
        if name == "down_proj":
            return self.matrix("down", expert, experts)
        gate, up = (self.matrix(matrix, expert, experts) for matrix in ("gate", "up"))
        if gate is None or up is None:
            some = up if gate is None else gate
            if some is None:
                return None
            gate, up = (torch.zeros_like(some) if x is None else x for x in (gate, up))
        return torch.cat([gate, up])

    def tensors(self) -> list[torch.Tensor]:
        """All As and Bs."""
        return [t for low in (*self.fused.values(), *self.single.values()) for t in (low.a, low.b)]


def layer_number(module: str) -> int:
    """Number of the layer that a module of experts is in."""
    found = _LAYER.search(module)
    assert found is not None  # EXPERTS_IN_NAME has one
    return int(found[1])


def changes_of(adapter: Adapter) -> tuple[dict[str, LayerChange], Mapping[str, LowRank]]:
    """What the adapter changes: experts by their module, and other modules by name.

    Raises:
        ValueError: a tensor that is not an A with its B, or one that belongs to experts in no known
            way; names the tensor.
    """
    layers: dict[str, LayerChange] = {}
    wrapped: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
    linear: dict[str, LowRank] = {}
    for key, a in adapter.tensors.items():
        if not key.endswith(".lora_A.weight"):
            if not key.endswith(".lora_B.weight"):
                raise ValueError(f"{adapter.folder}: {key} cannot be merged; only LoRA's A and B")
            _partner(adapter, key, ".lora_B.", ".lora_A.")
            continue
        b = _partner(adapter, key, ".lora_A.", ".lora_B.")
        found = _EXPERT_TENSOR.match(key)
        if found is None:
            module = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            linear[module] = _low_rank(adapter, key, module, a, b)
            continue
        place = found[1].removeprefix(PREFIX)
        layer = layers.setdefault(place, LayerChange(place))
        if found[2] in _WRAPPED:
            wrapped.setdefault(place, {})[found[2]] = a, b
        elif single := _SINGLE.fullmatch(found[2]):
            module = f"{place}.{found[2]}".removesuffix(".")
            layer.single[MATRIX_OF[single[2]], int(single[1])] = _low_rank(
                adapter, key, module, a, b
            )
        else:
            raise ValueError(
                f"{adapter.folder}: {key}: unknown part of experts; known: 3-D parameters, and "
                f"modules {', '.join(MATRIX_OF)} of numbered experts"
            )
    for place, found_pairs in wrapped.items():
        names = _parameters(adapter, place, found_pairs)
        for name, (a, b) in zip(names, found_pairs.values(), strict=True):
            path = f"{place}.{name}"
            # The configuration has the rank of one expert. The number of experts is unknown here.
            rank = adapter.rank(path)
            layers[place].fused[name] = LowRank(a, b, adapter.scaling(path, rank), rank)
    return layers, linear


def _partner(adapter: Adapter, key: str, side: str, other: str) -> torch.Tensor:
    """The other one of A and B; both are checked."""
    name = key.replace(side, other)
    if name not in adapter.tensors:
        raise ValueError(f"{adapter.folder}: {key} has no {name} beside it")
    for each in (key, name):
        tensor = adapter.tensors[each]
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{adapter.folder}: {each} is {tensor.dtype} {list(tensor.shape)}; expected a "
                "matrix of floats"
            )
    return adapter.tensors[name]


def _low_rank(adapter: Adapter, key: str, module: str, a: torch.Tensor, b: torch.Tensor) -> LowRank:
    """That of a module with one matrix."""
    rank = len(a)
    if b.shape[1] != rank or rank != adapter.rank(module):
        raise ValueError(
            f"{adapter.folder}: {key} is {list(a.shape)} and its B {list(b.shape)}; the "
            f"configuration has rank {adapter.rank(module)} for it"
        )
    return LowRank(a, b, adapter.scaling(module, rank), rank)


def _parameters(adapter: Adapter, place: str, found: Mapping[str, object]) -> list[str]:
    """Names of the 3-D parameters whose adapters these are."""
    if len(found) == len(_WRAPPED):
        return ["down_proj" if not wrap else "gate_up_proj" for wrap in found]
    targets = adapter.config.get("target_parameters") or ()
    named = [
        name
        for name in ("gate_up_proj", "down_proj")
        if any(f".{place}.{name}".endswith(f".{target}") for target in targets)
    ]
    if len(named) != 1 or "" not in found:
        raise ValueError(
            f"{adapter.folder}: {place} has tensors of one parameter, and target_parameters of its "
            f"configuration names {' and '.join(named) or 'none of this module'}"
        )
    return named
