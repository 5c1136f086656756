"""The settings of `kt sft train`: the keys of the TOML file, their defaults and meanings."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..sft.config import KTConfig
from ..sft.settings import MAX_RANK
from ..weights.methods import SFT_METHODS
from .kinds import FLAG, TEXT, Kind, integer, number, one_of, texts

MOST_STEPS = 10**9
_REQUIRED = dataclasses.MISSING
_DEFAULTS = KTConfig()

#: The methods; those with this suffix do not train LoRA.
METHODS = tuple(sorted(name for name in SFT_METHODS if not name.endswith("_SkipLoRA")))


def _key(
    default: Any, kind: Kind, meaning: str, *, may_change: bool = False, shown: str | None = None
) -> Any:
    """A key of the file. may_change: whether a run may be resumed with another value. shown: the
    default as the documentation gives it."""
    return dataclasses.field(
        default=default,
        metadata={"kind": kind, "meaning": meaning, "may_change": may_change, "shown": shown},
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model, and where it is computed."""

    path: str = _key(
        _REQUIRED, TEXT, "the model to tune: a folder, or a repository on the Hugging Face hub"
    )
    method: str = _key(
        "AMXINT8_SFT",
        one_of(*METHODS),
        "format of the experts' base weights, see [methods](#methods)",
    )
    weight_path: str = _key(
        "",
        TEXT,
        "read the experts from here: a packed directory, or a checkpoint that is quantised as "
        "`method` says. Required for methods that keep quantised weights",
        shown="the model's own experts",
    )
    group_size: int = _key(
        _DEFAULTS.group_size, integer(32, multiple=32), "columns per scale in the KGroup methods"
    )
    dtype: str = _key(
        "bfloat16",
        one_of("bfloat16", "float32"),
        "everything but the experts: its weights, and the type of autocast. float32 is often "
        "faster on CPUs without AVX-512 BF16",
    )
    device: str = _key(
        "auto",
        one_of("auto", "cpu"),
        "where everything but the experts is computed. `auto`: on the GPU if there is one",
        may_change=True,
    )
    gpu_experts: int = _key(
        0,
        integer(0),
        "as many experts of each layer are computed on the device, see "
        "[experts on the GPU](#experts-on-the-gpu)",
        may_change=True,
    )
    cpuinfer_threads: int = _key(
        0,
        integer(0),
        "CPU threads for the experts",
        may_change=True,
        shown="[measured](measured.md)",
    )
    allow_untested: bool = _key(
        False, FLAG, "accept classes of experts that were not tested", may_change=True
    )


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapter."""

    rank: int = _key(16, integer(1, MAX_RANK), "rank R")
    alpha: float = _key(
        32.0, number(0, above=True, single=True), "LoRA is multiplied by alpha / rank"
    )
    dropout: float = _key(0.0, number(0, 1, single=True), "dropout on the inputs of LoRA")
    attention_modules: tuple[str, ...] = _key(
        (),
        texts(0),
        'other modules with LoRA of the same rank, through PEFT, such as `["q_proj", "v_proj"]`',
        shown="none",
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The texts."""

    train: tuple[str, ...] = _key(
        _REQUIRED,
        texts(1),
        "files to train on: plain text (`.txt`, `.md`), or `.jsonl` with an object in each line "
        "that has `text`, or `messages` for the model's chat template",
    )
    held_out: tuple[str, ...] = _key(
        (),
        texts(0),
        "files that measure the loss and are not trained on",
        shown="a part of `train`",
    )
    held_out_fraction: float = _key(
        0.05,
        number(0, 1, above=True),
        "the part of `train`, at the end of each file, that is held "
        "out where `held_out` is not given",
    )
    sequence_length: int = _key(
        1024, integer(2), "tokens in a block; texts are joined and cut into blocks"
    )
    assistant_only: bool = _key(
        False,
        FLAG,
        "count the loss of the assistant's messages only; all data has to be `messages`",
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training loop."""

    epochs: float = _key(1.0, number(0, above=True), "passes over the training data")
    steps: int = _key(
        0, integer(0, MOST_STEPS), "optimizer steps, instead of `epochs`", shown="by `epochs`"
    )
    batch_size: int = _key(1, integer(1), "blocks in a forward pass")
    gradient_accumulation: int = _key(1, integer(1), "forward passes in an optimizer step")
    learning_rate: float = _key(2e-4, number(0, above=True), "the largest learning rate (AdamW)")
    schedule: str = _key(
        "cosine",
        one_of("cosine", "linear", "constant"),
        "of the learning rate after warm-up: down to 0, or constant",
    )
    warmup: float = _key(0.05, number(0), "warm-up in steps, or below 1 as a part of all steps")
    weight_decay: float = _key(0.0, number(0), "weight decay")
    max_grad_norm: float = _key(1.0, number(0), "largest norm of the gradient; 0: no clipping")
    gradient_checkpointing: bool = _key(
        False, FLAG, "compute activations again in backward: less memory, a third more time"
    )
    seed: int = _key(
        0, integer(0, 2**32 - 1), "of LoRA's initial values, of the order of blocks, of dropout"
    )
    eval_steps: int = _key(
        0,
        integer(0),
        "optimizer steps between measurements of the held-out loss",
        may_change=True,
        shown="a tenth of all steps",
    )
    save_steps: int = _key(
        0,
        integer(0),
        "optimizer steps between checkpoints",
        may_change=True,
        shown="a tenth of all steps",
    )
    keep_checkpoints: int = _key(2, integer(1), "checkpoints that are kept", may_change=True)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written."""

    folder: str = _key(_REQUIRED, TEXT, "folder for all results", may_change=True)
    layout: str = _key(
        "fused",
        one_of("fused", "per_expert"),
        "of the adapter, see [adapters](#adapters)",
        may_change=True,
    )
    plot: bool = _key(True, FLAG, "draw `loss.png` (needs matplotlib)", may_change=True)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A checked settings file. Paths are absolute, except names of repositories."""

    model: Model
    lora: Lora
    data: Data
    training: Training
    output: Output


SECTIONS: dict[str, type] = {
    "model": Model,
    "lora": Lora,
    "data": Data,
    "training": Training,
    "output": Output,
}

_Section = TypeVar("_Section")


def read_settings(path: str, folder: str | None = None) -> Settings:
    """Reads and checks a settings file. Relative paths in it start at its folder.

    Args:
        path: the file.
        folder: replaces ``folder`` of the section ``output``; relative to the working directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: not TOML; an unknown section or key, a value that is not accepted, a required
            key that is missing, or keys that exclude each other. The message names the file, the
            key, the value and what is accepted.
    """
    with open(path, "rb") as file:
        try:
            content = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
    for name, table in content.items():
        if name not in SECTIONS:
            raise ValueError(f"{path}: {_unknown('section', name, SECTIONS)}")
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} = {table!r}; expected a section, [{name}]")
    if folder is not None:
        content["output"] = content.get("output", {}) | {"folder": os.path.abspath(folder)}
    settings = Settings(
        **{
            name: _section(path, name, kind, content.get(name, {}))
            for name, kind in SECTIONS.items()
        }
    )
    settings = _absolute(settings, os.path.dirname(os.path.abspath(path)))
    _check_together(path, settings, content)
    return settings


def _section(path: str, name: str, kind: type[_Section], table: Mapping[str, Any]) -> _Section:
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise ValueError(f"{path}: [{name}] {_unknown('key', key, fields)}")
        accepted: Kind = fields[key].metadata["kind"]
        try:
            values[key] = accepted.check(value)
        except ValueError:
            raise ValueError(
                f"{path}: [{name}] {key} = {_toml(value)}; accepted: {accepted.accepted}"
            ) from None
    for key, field in fields.items():
        if key not in values and field.default is _REQUIRED:
            accepted = field.metadata["kind"]
            raise ValueError(f"{path}: [{name}] {key} is missing; accepted: {accepted.accepted}")
    return kind(**values)


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{name}: unknown {what}; {hint}accepted: {', '.join(known)}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _check_together(path: str, settings: Settings, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError for keys that exclude each other."""
    for section, one, other in (
        ("data", "held_out", "held_out_fraction"),
        ("training", "steps", "epochs"),
    ):
        if {one, other} <= given.get(section, {}).keys():
            raise ValueError(f"{path}: [{section}] {one} and {other} exclude each other; give one")
    training, data = settings.training, settings.data
    both = set(data.train) & set(data.held_out)
    if both:
        raise ValueError(f"{path}: [data] held_out: {min(both)} is in train, too")
    if training.warmup >= 1 and not training.warmup.is_integer():
        raise ValueError(
            f"{path}: [training] warmup = {training.warmup:g}; accepted: a whole number of steps, "
            "or a number below 1"
        )
    if training.steps and training.warmup > training.steps:
        raise ValueError(
            f"{path}: [training] warmup = {training.warmup:g}; accepted: at most steps = "
            f"{training.steps}"
        )


def check_steps(training: Training, blocks: int) -> int:
    """The optimizer steps of a run with so many training blocks, as Trainer counts them. Raises
    ValueError if they are too many, or fewer than those of the warm-up."""
    batches = -(-blocks // training.batch_size)
    epoch = -(-batches // training.gradient_accumulation)
    total = training.steps or training.epochs * epoch
    what = f"epochs = {training.epochs:g}, of {epoch} optimizer steps each"
    if total > MOST_STEPS:
        raise ValueError(f"[training] {what}; accepted: at most {MOST_STEPS} steps in all")
    steps = math.ceil(total)
    if training.warmup > steps:
        raise ValueError(
            f"[training] warmup = {training.warmup:g}; accepted: at most the {steps} steps of "
            f"{what}"
        )
    return steps


def _absolute(settings: Settings, folder: str) -> Settings:
    def resolve(path: str) -> str:
        return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))

    model, data = settings.model, settings.data
    local = resolve(model.path)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(
            model,
            path=local if os.path.exists(local) else model.path,
            weight_path=model.weight_path and resolve(model.weight_path),
        ),
        data=dataclasses.replace(
            data,
            train=tuple(map(resolve, data.train)),
            held_out=tuple(map(resolve, data.held_out)),
        ),
        output=dataclasses.replace(settings.output, folder=resolve(settings.output.folder)),
    )


def fixed_values(settings: Settings) -> dict[str, Any]:
    """The values that decide a run's results, by "section.key"."""
    return {
        f"{name}.{field.name}": getattr(getattr(settings, name), field.name)
        for name, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
        if not field.metadata["may_change"]
    }
