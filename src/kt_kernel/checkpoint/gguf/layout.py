"""Finds the expert tensors of one layer of a GGUF file by their names.

Stacked tensors: blk.{L}.ffn_gate_exps.weight and ffn_up_exps [E, I, H], ffn_down_exps [E, H, I].
ffn_gate_up_exps [E, 2I, H] has the rows of gate first (--fuse-gate-up-exps of llama.cpp's
convert_hf_to_gguf.py; build_moe_ffn reads it). Files of early 2024 have one tensor per expert:
blk.{L}.ffn_gate.{e}.weight [I, H] and so on. Biases have .bias instead of .weight, [E, I] and
[E, H]. These shapes are row-major; the file lists dimensions in reverse. No architecture reorders
the rows of experts. Where a model's own checkpoint interleaves gate and up (gpt-oss), the
conversion to GGUF undoes it.

Any other part of an expert is refused, because ignoring a scale would give wrong weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...weights.expert_tensors import MATRICES, matrix_shapes
from ..header import TensorInfo
from ..open_files import Piece
from .header import SIZES, GgufHeader

Sizes = tuple[int, int, int]

_NUMBER = "(0|[1-9][0-9]{0,8})"
_EXPERT = re.compile(
    rf"blk\.{_NUMBER}\.ffn_(?:(gate|up|down|gate_up)_exps|(gate|up|down)\.{_NUMBER})\.(.+)",
    re.DOTALL,
)
_PARTS = ("weight", "bias")


@dataclass(frozen=True)
class Source:
    """The tensors that hold a matrix or bias of all experts of a layer.

    tensors: one tensor stacked over the experts, or one tensor per expert. half: which half of the
    rows belongs to this matrix; None for all rows.
    """

    tensors: tuple[TensorInfo, ...]
    stacked: bool
    half: int | None = None

    @property
    def some(self) -> TensorInfo:
        return self.tensors[0]

    @property
    def dtype(self) -> str:
        return self.some.dtype

    def piece(self, expert: int, experts: int) -> Piece:
        """Where the files have this matrix or bias of one of `experts` experts."""
        if not self.stacked:
            return self.tensors[expert], 0, 1
        if self.half is None:
            return self.some, expert, experts
        return self.some, 2 * expert + self.half, 2 * experts

    def shape(self, rank: int) -> tuple[int, ...]:
        """The shape [E, ...] with `rank` dimensions. Counts the rows of the whole tensor, even if
        only half of them belong to this matrix. Raises ValueError for another rank."""
        info, shape = self.some, self.some.shape
        if not self.stacked:
            shape = (len(self.tensors), *shape)
        # ggml may drop outermost dimensions of 1, but need not.
        while len(shape) > rank and shape[0] == 1:
            shape = shape[1:]
        if len(shape) == rank - 1 and self.stacked:
            shape = (1, *shape)
        if len(shape) != rank:
            raise ValueError(
                f"{info} has shape {list(info.shape)}; expected {rank - (not self.stacked)}"
                " dimensions"
            )
        return shape


@dataclass(frozen=True)
class GgufLayer:
    """The experts of one layer. biases: their keys are those of `matrices`; {} without biases."""

    where: str
    matrices: dict[str, Source]
    biases: dict[str, Source]

    def pieces(self, expert: int, experts: int) -> Iterator[Piece]:
        """Where the files have one of `experts` experts."""
        for source in (*self.matrices.values(), *self.biases.values()):
            yield source.piece(expert, experts)

    def sizes(self) -> Sizes:
        """(num_experts, hidden_size, moe_intermediate_size) according to the shapes. Raises
        ValueError if the shapes contradict each other."""
        down = self.matrices["down"]
        experts, hidden, inter = down.shape(3)
        self.check(experts, hidden, inter)
        return experts, hidden, inter

    def check(self, experts: int, hidden: int, inter: int) -> None:
        """Raises ValueError naming file and tensor if a shape is wrong, or if the tensors of single
        experts differ in shape or type."""
        shapes = matrix_shapes(hidden, inter)
        for rank, sources in ((3, self.matrices), (2, self.biases)):
            for name, source in sources.items():
                expected = (experts, *shapes[name][: rank - 1])
                if source.half is not None:
                    expected = (experts, 2 * expected[1], *expected[2:])
                found = source.shape(rank)
                if found != expected:
                    cut = expected[0 if source.stacked else 1 :]
                    raise ValueError(
                        f"{source.some} has shape {list(source.some.shape)}; expected"
                        f" {list(cut)}{_count(source, experts)}"
                    )
                for info in source.tensors[1:]:
                    if (info.shape, info.dtype) != (source.some.shape, source.some.dtype):
                        raise ValueError(
                            f"{info} is {info.dtype} {list(info.shape)}; expected"
                            f" {source.dtype} {list(source.some.shape)} as {source.some.name!r}"
                        )


def _count(source: Source, experts: int) -> str:
    if source.stacked or len(source.tensors) == experts:
        return ""
    return f"; there are {len(source.tensors)} experts, not {experts}"


def layer_tensors(tensors: dict[str, TensorInfo]) -> dict[int, dict[str, TensorInfo]]:
    """Groups expert tensors by layer number."""
    layers: dict[int, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(int(match[1]), {})[name] = info
    return layers


def find_layer(layer_idx: int, tensors: dict[str, TensorInfo]) -> GgufLayer:
    """The layout of a layer that has expert tensors. Raises ValueError naming file and tensor if
    the layer is incomplete, has an unknown part, or has the same matrix in two forms."""
    where = f"blk.{layer_idx}."
    stacked: dict[tuple[str, str], TensorInfo] = {}
    single: dict[tuple[str, str], dict[int, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _EXPERT.fullmatch(name)
        assert match is not None
        part = match[5]
        if part not in _PARTS:
            raise ValueError(
                f"{info}: {part!r} of experts is not supported; supported: {', '.join(_PARTS)}"
            )
        if match[2]:
            stacked[match[2], part] = info
        else:
            single.setdefault((match[3], part), {})[int(match[4])] = info
    if stacked and single:
        one, other = next(iter(stacked.values())), next(iter(next(iter(single.values())).values()))
        raise ValueError(f"{one} and {other.name!r}: experts both stacked and one by one")
    sources = _of_each(where, single) if single else _of_stacks(stacked)
    some = next(iter(tensors.values()))
    found = {
        part: {m: sources[m, part] for m in MATRICES if (m, part) in sources} for part in _PARTS
    }
    for part, matrices in found.items():
        for matrix in MATRICES:
            if matrix not in matrices and (matrices or part == "weight"):
                name = f"ffn_{matrix}.0" if single else f"ffn_{matrix}_exps"
                raise ValueError(
                    f"{some.file}: tensor '{where}{name}.{part}' is missing; there is {some.name!r}"
                )
    return GgufLayer(where, found["weight"], found["bias"])


def _of_stacks(stacked: dict[tuple[str, str], TensorInfo]) -> dict[tuple[str, str], Source]:
    sources: dict[tuple[str, str], Source] = {}
    for (matrix, part), info in stacked.items():
        halves = ("gate", "up") if matrix == "gate_up" else (matrix,)
        for half, name in enumerate(halves):
            if (name, part) in sources:
                raise ValueError(
                    f"{info}: the same as {sources[name, part].some.name!r}, or half of it"
                )
            which = half if len(halves) == 2 else None
            sources[name, part] = Source((info,), True, which)
    return sources


def _of_each(
    where: str, single: dict[tuple[str, str], dict[int, TensorInfo]]
) -> dict[tuple[str, str], Source]:
    last = max(max(experts) for experts in single.values())
    sources: dict[tuple[str, str], Source] = {}
    for (matrix, part), experts in single.items():
        for expert in range(last + 1):
            if expert not in experts:
                some = next(iter(experts.values()))
                raise ValueError(
                    f"{some.file}: tensor '{where}ffn_{matrix}.{expert}.{part}' is missing; the"
                    f" experts go up to {last}, and there is {some.name!r}"
                )
        sources[matrix, part] = Source(tuple(experts[e] for e in range(last + 1)), False)
    return sources


def check_metadata(header: GgufHeader, sizes: Sizes) -> None:
    """Raises ValueError naming the key if the metadata has other sizes."""
    for key, size in zip(SIZES, sizes, strict=True):
        name = f"{header.architecture}.{key}"
        value = header.metadata.get(name)  # some models have a list with an entry per layer
        if isinstance(value, int) and not isinstance(value, bool) and value != size:
            raise ValueError(
                f"{header.path}: key {name!r} is {value}, but the experts' tensors have {size}"
            )
