"""Tiny random models of the classes in ``families``, and transformers as their reference.

Weights are BF16 values, as in tiny_model. The reference computes in float32.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import reference_models
import torch
import transformers
from families import FAMILIES
from family_settings import COMMON, EXPERTS, LAYERS, TOP_K, VOCABULARY, Family
from safetensors.torch import load_file, save_file
from tiny_model import Reference, spread_prompts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

STEPS = 8
_LINEAR = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
_NUMBERS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
PROMPTS = spread_prompts(3, VOCABULARY, growth=3)

__all__ = [
    "EXPERTS",
    "FAMILIES",
    "LAYERS",
    "PROMPTS",
    "STEPS",
    "TOP_K",
    "FamilyReference",
    "make",
    "whole_of",
]


def make(name: str, path: Path, seed: int = 0, **changed: Any) -> Path:
    """Writes the checkpoint of a class (its name in FAMILIES) to folder ``path``. changed: settings
    of its configuration."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    model = _class_of(name)(_configuration(family.like or name, family, changed))
    for key, tensor in model.state_dict().items():
        gate = key.endswith(".gate.weight") and not tensor.any()  # zeros would tie all experts
        if gate or ("bias" in key and family.unset not in key):
            tensor.normal_(std=0.15)
        if key.endswith("tid2eid"):  # distinct experts for each token
            scores = torch.rand(len(tensor), model.config.n_routed_experts)
            tensor.copy_(scores.topk(tensor.shape[1]).indices)
    if family.inside:  # what stands for images and the like never follows in a text
        getattr(model, "thinker", model).get_output_embeddings().weight.data[VOCABULARY:] = 0
    model.to(torch.bfloat16).save_pretrained(path)
    _as_published(name, family, path, changed)
    if family.tokenizer:
        words = Tokenizer(WordLevel({str(i): i for i in range(VOCABULARY)}, "0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def whole_of(path: Path) -> Path:
    """The checkpoint as transformers wrote it, if the published form is another one."""
    return path.with_name(f"{path.name} whole")


def _class_of(name: str) -> Any:
    """The class of reference_models or transformers that computes what a class of FAMILIES does."""
    name = FAMILIES[name].like or name
    return getattr(reference_models, name, None) or getattr(transformers, name)


def _as_published(name: str, family: Family, path: Path, changed: dict[str, Any]) -> None:
    """changed: as in `make`; these settings also change where the published form sets them."""
    if family.replaced or family.repeated or family.dropped or family.renamed or family.wrapped:
        shutil.copytree(path, whole_of(path))
    file = path / "config.json"
    written, published = family.like or name, family.published or name
    file.write_text(file.read_text().replace(written, published))
    if family.replaced or family.repeated:
        written = json.loads(file.read_text())
        part = written
        for inner in family.inside:
            part = part[inner]
        replaced = {
            key: value if value is None else changed.get(key, value)
            for key, value in family.replaced.items()
        }
        part |= replaced | {key: part[same] for key, same in family.repeated.items()}
        for key in [key for key, value in family.replaced.items() if value is None]:
            del part[key]
        if family.text_only:
            written = part | {"architectures": written["architectures"]}
        file.write_text(json.dumps(written))
    if family.wrapped:
        text = json.loads(file.read_text()) | {"architectures": [family.like or name]}
        around = {key: text if value is None else value for key, value in family.wrapped.items()}
        file.write_text(json.dumps(around | {"architectures": [published]}))
    if family.dropped or family.transposed or family.renamed or family.added or family.parted:
        file, kept = path / "model.safetensors", {}
        for key, tensor in load_file(file).items():
            if family.dropped and re.search(family.dropped, key):
                continue
            if family.transposed and re.search(r"experts\.(gate_up|down)_proj$", key):
                tensor = tensor.transpose(1, 2).contiguous()
            for old, new in family.renamed.items():
                key = key.replace(old, new)
            kept |= _parted(key, tensor, family.parted) if family.parted else {key: tensor}
        for name, parts in family.joined.items():
            for first in [key for key in kept if f".{parts[0]}." in key]:
                keys = [first.replace(f".{parts[0]}.", f".{part}.") for part in parts]
                joined = [kept.pop(key) for key in keys]
                rows = max(joined[0].dim() - 2, 0)
                key = first.replace(f".{parts[0]}.", f".{name}.").removesuffix(".")
                kept[key] = torch.cat(joined, rows)
        for key in [key for key in kept if key.endswith(family.interleaved)]:
            kept[key] = torch.stack(kept[key].chunk(2, 1), 2).flatten(1, 2)
        kept |= {
            key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in family.added.items()
        }
        save_file(kept, file, metadata={"format": "pt"})


def _parted(key: str, tensor: torch.Tensor, into: str) -> dict[str, torch.Tensor]:
    """gate_up [(E,) 2 I, H] as gate and up, and other tensors as they are.

    into: "stacks" keeps those of all experts; otherwise each expert has its own. With "numbers",
    these have the names of Mixtral's, and with "linear" those of Zaya's, where gate and up are one.
    """
    if into != "stacks" and "experts." in key and tensor.dim() == 3:
        module, _, matrix = key.rpartition(".")
        matrix = _LINEAR[matrix] if into == "linear" else matrix
        single = ((f"{module}.{i}.{matrix}.weight", one) for i, one in enumerate(tensor))
        parts = {k: v for key, one in single for k, v in _parted(key, one, "stacks").items()}
        for old, new in _NUMBERS.items() if into == "numbers" else ():
            parts = {key.replace(f".{old}.", f".{new}."): one for key, one in parts.items()}
        return parts
    if "gate_up_proj" not in key:
        return {key: tensor.clone()}
    gate, up = (half.clone() for half in tensor.chunk(2, dim=-2))
    return {key.replace("gate_up", "gate"): gate, key.replace("gate_up", "up"): up}


def _configuration(name: str, family: Family, changed: dict[str, Any]) -> Any:
    """changed: settings of the text model."""
    kind = re.sub("For(CausalLM|ConditionalGeneration)$", "Config", name)
    # transformers changes nested settings.
    own = {"vocab_size": VOCABULARY + 16 if family.inside else VOCABULARY}
    own |= {"num_experts_per_tok": family.top_k}
    settings = getattr(transformers, family.settings or kind)
    known = _names_in(_text_settings(settings, family))
    common = {name: value for name, value in COMMON.items() if name in known}
    given = copy.deepcopy(common | own | family.config | changed)
    if family.inside:
        around = copy.deepcopy(family.around)
        part = around
        for inner in family.inside[:-1]:
            part = part[inner]
        tie = "tie_word_embeddings"
        tied = {tie: family.config.get(tie, COMMON[tie])}
        part |= {family.inside[-1]: given} | tied
        given = around | tied
    return settings(**given)


def _text_settings(settings: Any, family: Family) -> Any:
    """The configuration's class of the text model inside that of a multimodal one."""
    if "model_type" in family.config:
        return transformers.CONFIG_MAPPING[family.config["model_type"]]
    for inner in family.inside:
        settings = type(getattr(settings(), inner))
    return settings


def _names_in(settings: Any) -> set[str]:
    """The settings that a configuration has. Others would be written, too, and published ones lack
    them."""
    return {field.name for field in dataclasses.fields(settings)} | {*settings.attribute_map}


class FamilyReference(Reference):
    """transformers in float32, for any class."""

    def __init__(self, name: str, path: Path) -> None:
        whole = whole_of(path)
        self.model = _class_of(name).from_pretrained(
            whole if whole.exists() else path,
            dtype=torch.float32,
            experts_implementation="eager",
            attn_implementation="eager",
        )
        self.model = getattr(self.model, "thinker", self.model).eval()
        pairs = [
            [getattr(module, name, None) for name in names]
            for module in self.model.modules()
            # Shared experts that are stacked have their gate apart.
            if not _stacked(getattr(module, "gate_proj", None))
            for names in (
                ("gate_up_proj", "down_proj"),
                ("input_linear", "output_linear"),
                ("up_proj", "down_proj"),
            )
        ]
        weights = [[getattr(one, "weight", one) for one in both] for both in pairs]
        stacked = [both for both in weights if _stacked(both[0]) and _stacked(both[1])]
        # Layers of an encoder and of a decoder may have the same ones.
        self._experts = list({id(both[0]): both for both in stacked}.values())
        self.moe_layers = len(self._experts)

    def parameters(self) -> list[list[torch.Tensor]]:
        """The parameters of each MoE layer's experts, the first matrices and the last ones."""
        return self._experts

    def stacks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(gate_up.data, down.data) for gate_up, down in self._experts]


def _stacked(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 3
