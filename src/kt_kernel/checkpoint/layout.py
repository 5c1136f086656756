"""Finds the expert tensors of one layer by their names.

Two layouts are known: one tensor per expert and matrix, and one tensor per matrix stacked over the
experts. Anything in the experts' module that belongs to neither is refused by name rather than
ignored: a scale overlooked would make wrong weights of right ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from .families import FAMILIES, PREFIXES, Family, Stacked
from .header import TensorInfo

MATRICES = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")

# Projection of "experts.{e}.{projection}.weight" to the field of ExpertTensors.
_NAMINGS = (
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"w1": "gate", "w3": "up", "w2": "down"},
)

_LAYER = re.compile(r"(?:^|(?<=\.))layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"(?:(.+)\.)?experts\.([0-9]{1,9})\.(.+)", re.DOTALL)
_PACKED = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_exps\.")
_LOOKS_STACKED = re.compile(
    r"(.+\.)?(experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3|v1|fc1|fc2|mlp\..+)"
    r"(\.weight)?|(input|output)_linear\.weight)"
)

# Last part of the name of a tensor that only quantised checkpoints have.
_QUANTISED = (
    (("weight_scale_inv",), "FP8 or MXFP8 (scales per block)"),
    (("weight_scale_2", "weight_global_scale"), "NVFP4"),
    (("weight_packed", "weight_shape"), "compressed-tensors (RAWINT4, MXFP4 or NVFP4)"),
    (("weight_scale", "weight_zero_point", "weight_g_idx"), "FP8 or compressed-tensors"),
    (("qweight", "qzeros", "scales", "g_idx"), "GPTQ_INT4 or AWQ_INT4"),
    (
        ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
        "MXFP4",
    ),
    (("scale",), "FP8 or MXFP4"),
)


@dataclass(frozen=True)
class PerExpert:
    """where: the names up to "experts"; experts: per expert, field of ExpertTensors to tensor."""

    where: str
    experts: list[dict[str, TensorInfo]]


@dataclass(frozen=True)
class StackedExperts:
    """where: the names up to the layer number; tensors: field of `Stacked` to tensor. `candidates`
    are the arrangements that have these names."""

    where: str
    tensors: dict[str, TensorInfo]
    candidates: tuple[Stacked, ...]


Layout = PerExpert | StackedExperts


def layer_tensors(tensors: dict[str, TensorInfo]) -> dict[int, dict[str, TensorInfo]]:
    """Sorts what may belong to experts by layer number, so that a layer is found without a scan."""
    layers: dict[int, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if "expert" in name or "_linear" in name:
            match = _LAYER.search(name)
            if match:
                layers.setdefault(int(match[1]), {})[name] = info
    return layers


def find_packed(tensors: dict[str, TensorInfo]) -> TensorInfo | None:
    """A tensor of experts packed by another program (blk.{L}.ffn_*_exps.*), if there is one."""
    return next((info for name, info in tensors.items() if _PACKED.match(name)), None)


def refuse_packed(info: TensorInfo) -> NoReturn:
    kind = "packed per NUMA node" if ".numa." in info.name else "named as in GGUF"
    raise ValueError(
        f"{info}: experts {kind} are not supported yet; give the original Hugging Face checkpoint"
    )


def find_layout(
    path: str, layer_idx: int, tensors: dict[str, TensorInfo], kind: str | None, has_config: bool
) -> Layout | None:
    """The layout of one layer, or None if it has no experts.

    tensors: those of `layer_tensors`; kind: model_type. Raises ValueError naming file and tensor
    for quantised, unknown, ambiguous or incomplete layouts.
    """
    family = FAMILIES.get(kind) if kind else None
    split = [_split(name, info) for name, info in tensors.items()]
    for _, rest, info in split:
        if "experts." in rest and "shared_expert" not in rest:
            _refuse_quantised(info, rest)
    stacked = _find_stacked(layer_idx, family, split)
    groups: dict[str, list[tuple[str, str, TensorInfo]]] = {}
    for prefix, rest, info in split:
        match = _EXPERT.fullmatch(rest)
        if match:
            where = f"{prefix}layers.{layer_idx}.{match[1] + '.' if match[1] else ''}experts"
            groups.setdefault(where, []).append((match[2], match[3], info))
    if family:
        expected = [f"{p}layers.{layer_idx}.{family.block}.experts" for p in PREFIXES]
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
            f"{path}: layer {layer_idx} has experts in more than one place ({', '.join(places)});"
            f" model_type {kind!r} does not tell which to take"
        )
    if stacked:
        return stacked[0]
    for where, members in groups.items():
        return _per_expert(path, where, members)
    return None


def _split(name: str, info: TensorInfo) -> tuple[str, str, TensorInfo]:
    match = _LAYER.search(name)
    return name[: match.start()], name[match.end() :], info


def _refuse_quantised(info: TensorInfo, rest: str) -> None:
    last = rest.rsplit(".", 1)[-1]
    for names, method in _QUANTISED:
        if last in names:
            raise ValueError(
                f"{info}: {method} experts are not supported yet; expected BF16 weights"
            )


def _refuse_stacked(
    path: str, split: Iterable[tuple[str, str, TensorInfo]], kind: str | None, has_config: bool
) -> None:
    for _, rest, info in split:
        if _LOOKS_STACKED.fullmatch(rest) and ("experts." in rest or len(info.shape) == 3):
            if not has_config:
                raise ValueError(
                    f"{info}: stacked experts need the config.json of the model beside {path}: only"
                    " its model_type tells their orientation and the order of gate and up"
                )
            raise ValueError(
                f"{info}: stacked experts of model_type {kind!r} are not known; known types:"
                f" {', '.join(sorted(FAMILIES))}"
            )


def _find_stacked(
    layer_idx: int, family: Family | None, split: list[tuple[str, str, TensorInfo]]
) -> list[StackedExperts]:
    found = []
    by_place = {(prefix, rest): info for prefix, rest, info in split}
    fields = ("gate_up", "down", "gate_up_bias", "down_bias")
    variants: dict[tuple[str | None, ...], list[Stacked]] = {}
    for stacked in family.stacked if family else ():
        variants.setdefault(tuple(getattr(stacked, f) for f in fields), []).append(stacked)
    for prefix in PREFIXES:
        for names, candidates in variants.items():
            wanted = {f: n for f, n in zip(fields, names, strict=True) if n is not None}
            present = {f: by_place[prefix, n] for f, n in wanted.items() if (prefix, n) in by_place}
            if not present:
                continue
            where = f"{prefix}layers.{layer_idx}."
            some = next(iter(present.values()))
            for field in wanted.keys() - present.keys():
                raise ValueError(
                    f"{some.file}: tensor {where + wanted[field]!r} is missing; found {some.name!r}"
                )
            used = set(wanted.values())
            stems = tuple(wanted[f].removesuffix(".weight") for f in ("gate_up", "down"))
            for (other, rest), info in by_place.items():
                if other == prefix and rest not in used and rest.startswith(stems):
                    raise ValueError(f"{info}: not expected beside {some.name!r}")
            found.append(StackedExperts(where, present, tuple(candidates)))
    return found


def _per_expert(path: str, where: str, members: list[tuple[str, str, TensorInfo]]) -> PerExpert:
    experts: dict[int, dict[str, TensorInfo]] = {}
    namings: dict[int, TensorInfo] = {}
    for digits, rest, info in members:
        number = int(digits)
        projection, _, kind = rest.partition(".")
        found = [(i, n[projection]) for i, n in enumerate(_NAMINGS) if projection in n]
        if digits != str(number) or not found or kind not in ("weight", "bias"):
            raise ValueError(
                f"{info}: not understood; expected {where}.<number>.<gate_proj, up_proj, down_proj"
                " or w1, w3, w2>.<weight or bias>"
            )
        naming, matrix = found[0]
        namings[naming] = info
        if len(namings) > 1:
            raise ValueError(f"{info}: named otherwise than {namings[1 - naming].name!r}")
        experts.setdefault(number, {})[matrix if kind == "weight" else f"{matrix}_bias"] = info
    names = {matrix: projection for projection, matrix in _NAMINGS[min(namings)].items()}
    last = max(experts)
    some = experts[last][min(experts[last])]
    has_bias = any(field in BIASES for fields in experts.values() for field in fields)
    for number in range(last + 1):
        for field in MATRICES + (BIASES if has_bias else ()):
            if field not in experts.get(number, {}):
                matrix, _, bias = field.partition("_")
                name = f"{where}.{number}.{names[matrix]}.{bias or 'weight'}"
                file = next(iter(experts[number].values())).file if number in experts else path
                raise ValueError(
                    f"{file}: tensor {name!r} is missing; the experts go up to {some.name!r}"
                )
    return PerExpert(where, [experts[number] for number in range(last + 1)])
