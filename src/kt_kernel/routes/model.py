"""Identifies the model that statistics and records belong to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class RoutedModel:
    """What must agree between two models so that their experts correspond.

    Weights are not compared: statistics of a 16-bit model also hold for its quantised versions, and
    roughly for models fine-tuned from it.

    Attributes:
        model_type: of config.json, such as "qwen3_moe"; "" if it has none.
        num_hidden_layers, hidden_size, moe_intermediate_size, num_experts_per_tok: of config.json;
            0 if it has none under that name.
        num_experts: routed experts per layer.
        name: for messages only; not compared.
    """

    model_type: str
    num_hidden_layers: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    name: str = field(default="", compare=False)

    def describe(self) -> str:
        """The name, and the type and sizes that tell models apart."""
        layers = f"{self.num_hidden_layers} layers, " if self.num_hidden_layers else ""
        what = f"{self.model_type or 'unknown type'}, {layers}{self.num_experts} experts"
        return f"{self.name} ({what})" if self.name else what

    def need_same(self, other: RoutedModel, place: str) -> None:
        """ValueError, beginning with ``place``, unless ``other`` is the same model.

        place: names what belongs to this model, such as a file.
        """
        differing = [
            f"{f.name} {getattr(self, f.name)} instead of {getattr(other, f.name)}"
            for f in fields(self)
            if f.compare and getattr(self, f.name) != getattr(other, f.name)
        ]
        if differing:
            raise ValueError(
                f"{place} is of {self.describe()}, not of {other.describe()}: "
                + ", ".join(differing)
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RoutedModel:
        """ValueError unless it is what `to_json` returns."""
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        kinds = {f.name: str if f.name in ("model_type", "name") else int for f in fields(cls)}
        if (
            not isinstance(values, dict)
            or values.keys() != kinds.keys()
            or any(type(values[name]) is not kind for name, kind in kinds.items())
            or values["num_experts"] < 1
        ):
            raise ValueError(f"its description of the model is invalid: {text[:200]!r}")
        return cls(**values)
