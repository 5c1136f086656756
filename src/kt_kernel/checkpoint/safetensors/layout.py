"""Finds the expert tensors of one layer by their names.

There are two layouts: one tensor per expert and matrix, and one tensor per matrix stacked over the
experts. Any other tensor in the experts' module is refused, because ignoring a scale would give
wrong weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...weights.expert_tensors import MATRICES
from ..header import TensorInfo
from .families import FAMILIES, PREFIXES, Family, Stacked
from .foreign import foreign_part, not_read, refuse_mlx

# The projection in "experts.{e}.{projection}.weight" to the field of ExpertTensors.
_NAMINGS = (
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"w1": "gate", "w3": "up", "w2": "down"},
)

# Not those of multi-token prediction, which count from 0 again.
_LAYER = re.compile(r"(?<!mtp\.)(?:^|(?<=\.))layers\.([0-9]{1,9})\.")
_IN_MODULE = re.compile(r"(?:^|\.)experts\.")  # not "shared_experts."
_EXPERT = re.compile(r"(?:(.+)\.)?experts\.([0-9]{1,9})\.(.+)", re.DOTALL)
# Names with the projection first, as ModelOpt writes the experts of some models.
_PROJECTION_FIRST = re.compile(
    r"(?:(.+)\.)?experts\.((?:gate|up|down)_proj)\.([0-9]{1,9})\.(.+)", re.DOTALL
)
_LOOKS_STACKED = re.compile(
    r"(.+\.)?(experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3|v1|fc1|fc2|fc|proj|mlp\..+)"
    r"(\.weight|_blocks)?|(input|output)_linear\.weight|moe\.(gate|up|down)_proj\.weight)"
)

# What may follow "experts.{e}.{projection}.": the parts of a matrix, and scales and zero points of
# activations, which are ignored.
_PARTS = tuple(
    (
        "weight bias weight_scale_inv weight_scale weight_scale_2"
        " weight_global_scale scale weight_packed weight_shape"
        " weight_zero_point weight_g_idx qweight qzeros scales g_idx"
    ).split()
)
_UNUSED_PARTS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)

# A stack named "….weight" has its scales in "….weight_scale" and so on. For other stacks, one of
# these suffixes is appended to the name.
_STACK_SUFFIXES = {
    "_scale_inv": "weight_scale_inv",
    "_weight_scale": "weight_scale",
    "_weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale",
    "_activation_scale": "activation_scale",
}

# The tensors of one matrix, by the last part of their names: "weight", "bias", "weight_scale", ...
Parts = dict[str, TensorInfo]


@dataclass(frozen=True)
class PerExpert:
    """where: the names up to "experts". experts: for each expert, the tensors of its matrices by
    name: gate (unless the experts have none), up and down. All gates have the same parts, and so
    have all ups and all downs."""

    where: str
    experts: list[dict[str, Parts]]


@dataclass(frozen=True)
class StackedExperts:
    """where: the names up to the layer number. tensors: by field of `Stacked`. candidates: the
    arrangements with these names. scales: of quantised stacks, the parts of each field besides the
    weights. Fields whose weights have the same type have the same parts."""

    where: str
    tensors: dict[str, TensorInfo]
    candidates: tuple[Stacked, ...]
    scales: dict[str, Parts] = field(default_factory=dict)


Layout = PerExpert | StackedExperts


def has_blocks(layout: StackedExperts) -> bool:
    """Whether the stacks are blocks of MXFP4 and their scales, as in gpt-oss."""
    return "gate_up_scales" in layout.tensors


def tensors_of(layout: Layout, expert: int | None = None) -> Iterator[TensorInfo]:
    """The tensors of a layout. expert: only those of this expert, if the experts are single."""
    if isinstance(layout, StackedExperts):
        yield from layout.tensors.values()
        for parts in layout.scales.values():
            yield from parts.values()
        return
    for matrices in layout.experts if expert is None else [layout.experts[expert]]:
        for parts in matrices.values():
            yield from parts.values()


def layer_tensors(tensors: dict[str, TensorInfo]) -> dict[int, dict[str, TensorInfo]]:
    """Groups possible expert tensors by layer number, so that finding a layer needs no scan."""
    layers: dict[int, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if "expert" in name or "_linear" in name or ".moe." in name:
            match = _LAYER.search(name)
            if match:
                layers.setdefault(int(match[1]), {})[name] = info
    return layers


def holds_experts(tensors: dict[str, TensorInfo]) -> bool:
    """Whether a layer's tensors (`layer_tensors`) include experts."""
    return any(
        _IN_MODULE.search(name) or _stack_elsewhere(_split(name, info)[1], info)
        for name, info in tensors.items()
    )


def _stack_elsewhere(rest: str, info: TensorInfo) -> bool:
    """Whether a tensor is a stack of experts outside a module named "experts"."""
    return len(info.shape) == 3 and _LOOKS_STACKED.fullmatch(rest) is not None


def find_layout(
    path: str, layer_idx: int, tensors: dict[str, TensorInfo], kind: str | None, has_config: bool
) -> Layout | None:
    """The layout of one layer, or None if it has no experts.

    tensors: the layer's, from `layer_tensors`. kind: model_type. Raises ValueError naming file and
    tensor for an unknown, ambiguous or incomplete layout.
    """
    family = FAMILIES.get(kind) if kind else None
    split = [_split(name, info) for name, info in tensors.items()]
    stacked = _find_stacked(layer_idx, family, split)
    groups: dict[str, list[tuple[str, str, TensorInfo]]] = {}
    for prefix, rest, info in split:
        found = _expert(rest)
        if found:
            block, digits, part = found
            where = f"{prefix}layers.{layer_idx}.{block + '.' if block else ''}experts"
            groups.setdefault(where, []).append((digits, part, info))
    if family:
        expected = [f"{p}layers.{layer_idx}.{e}" for p in PREFIXES for e in family.experts]
        elsewhere = {where: groups.pop(where) for where in sorted(set(groups) - set(expected))}
        if elsewhere and not groups and not stacked:
            raise ValueError(
                f"{next(iter(elsewhere.values()))[0][2]}: a {kind} model keeps the experts of layer"
                f" {layer_idx} at one of {', '.join(expected)}"
            )
    elif not groups:
        _refuse_stacked(path, split, kind, has_config)
    places = sorted(groups) + sorted(found.where + "…" for found in stacked)
    if len(places) > 1:
        raise ValueError(
            f"{path}: layer {layer_idx} has experts in several places ({', '.join(places)});"
            f" model_type {kind!r} does not determine which to use"
        )
    if stacked:
        return stacked[0]
    for where, members in groups.items():
        return _per_expert(path, where, members, family is None or family.gated)
    refuse_mlx(tensors.values())
    for _, rest, info in split:
        if _IN_MODULE.search(rest):
            raise ValueError(
                f"{info}: not a name of experts of a {kind} model; accepted:"
                f" {', '.join(_names(family))}"
            )
    return None


def _names(family: Family | None) -> Iterator[str]:
    """Names of experts' weights, after "layers.{L}."."""
    for experts in family.experts if family else ("…experts",):
        yield f"{experts}.<number>.<projection>.<part>"
    for stacked in family.stacked if family else ():
        yield from stacked.names().values()


def _expert(rest: str) -> tuple[str | None, str, str] | None:
    """Splits a name after "layers.{L}." into block, number and "projection.part". None if it is not
    an expert's."""
    match = _EXPERT.fullmatch(rest)
    if match:
        return match[1], match[2], match[3]
    match = _PROJECTION_FIRST.fullmatch(rest)
    return (match[1], match[3], f"{match[2]}.{match[4]}") if match else None


def _split(name: str, info: TensorInfo) -> tuple[str, str, TensorInfo]:
    match = _LAYER.search(name)
    assert match is not None  # `layer_tensors` has matched it
    return name[: match.start()], name[match.end() :], info


def _refuse_stacked(
    path: str, split: Iterable[tuple[str, str, TensorInfo]], kind: str | None, has_config: bool
) -> None:
    for _, rest, info in split:
        in_module = _IN_MODULE.search(rest) and _LOOKS_STACKED.fullmatch(rest)
        if in_module or _stack_elsewhere(rest, info):
            if not has_config:
                raise ValueError(
                    f"{info}: stacked experts need the model's config.json next to {path}: only its"
                    " model_type determines their orientation and the order of gate and up"
                )
            raise ValueError(
                f"{info}: unknown model_type {kind!r} for stacked experts; known:"
                f" {', '.join(sorted(FAMILIES))}"
            )


def _find_stacked(
    layer_idx: int, family: Family | None, split: list[tuple[str, str, TensorInfo]]
) -> list[StackedExperts]:
    found = []
    by_place = {(prefix, rest): info for prefix, rest, info in split}
    variants: dict[tuple[tuple[str, str], ...], list[Stacked]] = {}
    for stacked in family.stacked if family else ():
        variants.setdefault(tuple(stacked.names().items()), []).append(stacked)
    for prefix in PREFIXES:
        for names, candidates in variants.items():
            wanted = dict(names)
            present = {f: by_place[prefix, n] for f, n in names if (prefix, n) in by_place}
            # Biases have the same names in all variants, so they decide nothing.
            if not any(not f.endswith("_bias") for f in present):
                continue
            where = f"{prefix}layers.{layer_idx}."
            some = next(iter(present.values()))
            for name in [name for f, name in names if f not in present]:
                raise ValueError(
                    f"{some.file}: tensor {where + name!r} is missing; found {some.name!r}"
                )
            scales = _stack_scales(by_place, prefix, where, wanted)
            found.append(StackedExperts(where, present, tuple(candidates), scales))
    return found


def _stack_scales(
    by_place: dict[tuple[str, str], TensorInfo], prefix: str, where: str, wanted: dict[str, str]
) -> dict[str, Parts]:
    """The tensors that accompany the weights of a stack, by field. Raises ValueError for a tensor
    of no known format, and if only some of the weights have scales."""
    weights = {f: n for f, n in wanted.items() if f in ("gate_up", "gate", "up", "down")}
    some = by_place[prefix, next(iter(weights.values()))]
    known: dict[str, tuple[str, str]] = {}
    for matrix, name in weights.items():
        stem = name.removesuffix(".weight")
        if stem != name:
            parts = {f"{stem}.{part}": part for part in _PARTS + _UNUSED_PARTS if "scale" in part}
        else:
            parts = {f"{stem}{suffix}": part for suffix, part in _STACK_SUFFIXES.items()}
        known |= {n: (matrix, part) for n, part in parts.items()}
    scales: dict[str, Parts] = {f: {} for f in weights}
    names = {}
    stems = tuple(n.removesuffix(".weight").removesuffix("_blocks") for n in weights.values())
    for (other, rest), info in by_place.items():
        if other != prefix or rest in wanted.values() or not rest.startswith(stems):
            continue
        if rest not in known or "gate_up_scales" in wanted:
            raise ValueError(f"{info}: unexpected tensor; found together with {some.name!r}")
        matrix, part = known[rest]
        if part not in _UNUSED_PARTS:
            scales[matrix][part] = info
            names[part] = rest.removeprefix(weights[matrix].removesuffix(".weight"))
    for part, suffix in names.items():
        alike = {by_place[prefix, weights[m]].dtype for m in weights if part in scales[m]}
        for matrix, name in weights.items():
            # Weights of another type may be in another format.
            if part not in scales[matrix] and by_place[prefix, name].dtype in alike:
                missing = where + name.removesuffix(".weight") + suffix
                raise ValueError(f"{some.file}: tensor {missing!r} is missing; found {some.name!r}")
    return scales if names else {}


def _per_expert(
    path: str, where: str, members: list[tuple[str, str, TensorInfo]], gated: bool
) -> PerExpert:
    experts: dict[int, dict[str, Parts]] = {}
    namings: dict[int, TensorInfo] = {}
    for digits, rest, info in members:
        number = int(digits)
        projection, _, part = rest.partition(".")
        found = [(i, n[projection]) for i, n in enumerate(_NAMINGS) if projection in n]
        if known := foreign_part(part):
            raise not_read(info, known)
        if digits != str(number) or not found or part not in _PARTS + _UNUSED_PARTS:
            raise ValueError(
                f"{info}: unknown name; expected {where}.<number>.<gate_proj, up_proj, down_proj"
                f" or w1, w3, w2>.<{', '.join(_PARTS)}>"
            )
        naming, matrix = found[0]
        parts = experts.setdefault(number, {}).setdefault(matrix, {})
        if part in _UNUSED_PARTS:  # W4AFP8 has them by the other names
            continue
        parts[part] = namings[naming] = info
        if len(namings) > 1:
            raise ValueError(f"{info}: other naming scheme than {namings[1 - naming].name!r}")
    naming = min(namings, default=0)
    names = {matrix: projection for projection, matrix in _NAMINGS[naming].items()}
    last = max(experts)
    everywhere: dict[str, set[str]] = {matrix: set() for matrix in MATRICES}
    for matrices in experts.values():
        for matrix, parts in matrices.items():
            everywhere[matrix] |= parts.keys()
    wanted = MATRICES if gated or everywhere["gate"] else MATRICES[1:]
    for number in range(last + 1):
        for matrix in wanted:
            present = experts.get(number, {}).get(matrix, {})
            missing = (everywhere[matrix] or {"weight"}) - present.keys()
            for part in sorted(missing, key=_PARTS.index):
                name = f"{where}.{number}.{names[matrix]}.{part}"
                file, some = _neighbour(experts, number, part, members[0][2])
                raise ValueError(
                    f"{file or path}: tensor {name!r} is missing; the experts go up to {last}, and"
                    f" {some.name!r} exists"
                )
    ordered = [{matrix: experts[number][matrix] for matrix in wanted} for number in range(last + 1)]
    return PerExpert(where, ordered)


def _neighbour(
    experts: dict[int, dict[str, Parts]], number: int, part: str, other: TensorInfo
) -> tuple[str | None, TensorInfo]:
    """The file with other tensors of the expert, or None; and a tensor like the missing one, or
    `other`."""
    own = [info for parts in experts.get(number, {}).values() for info in parts.values()]
    alike = [parts[part] for e in sorted(experts) for parts in experts[e].values() if part in parts]
    return (own[0].file if own else None), (alike[-1] if alike else other)
