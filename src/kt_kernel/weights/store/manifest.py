"""kt_manifest.json of a packed directory: describes the model and each layer's file.

Every value is checked when it is read, and derived values (names and sizes of files) are compared
with what they are derived from, so no manifest can cause invalid memory accesses.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...runtime.files import need_file, parse_object, reading
from ...runtime.variant import native
from ..expert_tensors import BIASES, MATRICES
from ..formats import SCALE_TYPE_NAMES, LayerForm, WeightForm, all_formats
from .layer_file import MAX_LAYER, LayerSpec, form_entries
from .quant_methods import QUANT_METHODS

MANIFEST = "kt_manifest.json"
PACKED_COPY = "kt-packed"  # subfolder that ``cpu_save`` writes to; not part of the checkpoint
VERSION = 1  # of the directory's format; that of the packed bytes is the compiled core's
_MAX_BYTES = 64 << 20  # of the file; no model has that many layers
_MAX_SIZE = 65536  # of a dimension, and experts
_NUMBER = re.compile("0|[1-9][0-9]{0,4}")  # of a layer


@dataclass(frozen=True)
class LayerEntry:
    """A layer's file: what it holds, its size, and its SHA-256."""

    spec: LayerSpec
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """method: its name. model_type: from the source's config.json. generator: the program that
    quantised. scale_search: see `LayerSettings`. source: fingerprint of the checkpoint; None if the
    weights came as tensors. expected: the layers of the finished directory; None if unknown.
    layers: the layers that exist, by number."""

    method: str
    model_type: str | None
    hidden_size: int
    generator: str
    scale_search: bool = False
    source: str | None = None
    expected: tuple[int, ...] | None = None
    layers: dict[int, LayerEntry] = field(default_factory=dict)

    def with_layer(self, entry: LayerEntry) -> Manifest:
        return replace(self, layers=self.layers | {entry.spec.layer: entry})

    def without(self, layers: Any) -> Manifest:
        return replace(self, layers={n: e for n, e in self.layers.items() if n not in layers})

    @property
    def missing(self) -> list[int]:
        """Layers that do not exist yet."""
        return [n for n in self.expected or () if n not in self.layers]

    def about(self) -> dict[str, Any]:
        """The entries shared by all layers, which each file also has."""
        return {
            "version": VERSION,
            "layout_version": native().layout_version,
            "method": self.method,
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "generator": self.generator,
            "scale_search": self.scale_search,
            "source": self.source,
        }

    def header(self, spec: LayerSpec) -> bytes:
        """Everything before the data in a layer's file."""
        return spec.header(self.about())

    def file_bytes(self, spec: LayerSpec) -> int:
        return len(self.header(spec)) + spec.data_bytes

    def differences(self, other: Manifest) -> list[str]:
        """The differences between two directories' models or settings, as "name a, not b"."""
        mine, others = self.about(), other.about()
        mine["layers"], others["layers"] = self.expected, other.expected
        return [f"{k} {mine[k]!r}, not {others[k]!r}" for k in mine if mine[k] != others[k]]

    def to_json(self) -> str:
        """JSON; equal manifests give equal text."""
        layers = {
            str(number): {
                "file": entry.spec.file,
                "bytes": entry.bytes,
                "sha256": entry.sha256,
                "num_experts": entry.spec.num_experts,
                "moe_intermediate_size": entry.spec.moe_intermediate_size,
                "forms": form_entries(entry.spec.form),
                "biases": list(entry.spec.biases),
            }
            for number, entry in sorted(self.layers.items())
        }
        expected = None if self.expected is None else list(self.expected)
        content = self.about() | {"expected_layers": expected, "layers": layers}
        return json.dumps(content, indent=1) + "\n"


def generator() -> str:
    """The name and version of this program: another version may quantise differently."""
    from ... import __version__

    return f"kt-moe {__version__}"


def read_manifest(folder: str) -> Manifest:
    """The manifest of a packed directory.

    Raises FileNotFoundError or PermissionError with the path, and ValueError naming file and key if
    a value is not as this version writes it. For another version, the message has the command that
    converts again.
    """
    path = os.path.join(folder, MANIFEST)
    need_file(path, "a manifest")
    with reading(path) as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{path}: more than {_MAX_BYTES} bytes; not a manifest")
    content = parse_object(text, f"{path}: ", unique=True)
    _check_versions(folder, path, content)
    return _manifest(path, content)


def convert_command(folder: str, method: str) -> str:
    """The command that recreates a packed directory."""
    names = [name for name, other in QUANT_METHODS.items() if other == method]
    if not names:
        return "load the weights again with cpu_save=True and another weight_path"
    return (
        f"remove the folder and convert again: kt quant --input-path CHECKPOINT --output {folder} "
        f"--quant-method {names[0]}"
    )


def _check_versions(folder: str, path: str, content: dict[str, Any]) -> None:
    mine = {"version": VERSION, "layout_version": native().layout_version}
    for key, wanted in mine.items():
        found = content.get(key)
        if type(found) is not int or found != wanted:
            method = content.get("method")
            command = convert_command(folder, method if isinstance(method, str) else "")
            raise ValueError(f"{path}: {key} is {found!r}; this kt-moe reads {wanted}; {command}")


def _manifest(path: str, content: dict[str, Any]) -> Manifest:
    keys = {"version", "layout_version", "expected_layers", "layers", *_MODEL_KEYS}
    _check_keys(path, "the manifest", content, keys)
    for key, (good, accepted) in _MODEL_KEYS.items():
        if not good(content[key]):
            raise ValueError(f"{path}: {key} is {content[key]!r}; expected {accepted}")
    expected, layers = content["expected_layers"], content["layers"]
    if expected is not None and not (
        isinstance(expected, list)
        and all(_is_int(n, 0, MAX_LAYER) for n in expected)
        and expected == sorted(set(expected))
    ):
        raise ValueError(f"{path}: expected_layers must be null or ascending layer numbers")
    if not isinstance(layers, dict):
        raise ValueError(f"{path}: layers must be an object")
    entries = {}
    for number, entry in layers.items():
        if not _NUMBER.fullmatch(number):
            raise ValueError(f"{path}: {number!r} in layers is not a layer number")
        if expected is not None and int(number) not in expected:
            raise ValueError(f"{path}: layer {number} is not in expected_layers")
        entries[int(number)] = _entry(path, int(number), entry, content["hidden_size"])
    manifest = Manifest(
        method=content["method"],
        model_type=content["model_type"],
        hidden_size=content["hidden_size"],
        generator=content["generator"],
        scale_search=content["scale_search"],
        source=content["source"],
        expected=None if expected is None else tuple(expected),
        layers=dict(sorted(entries.items())),
    )
    for number, entry in manifest.layers.items():
        wanted = manifest.file_bytes(entry.spec)
        if type(entry.bytes) is not int or entry.bytes != wanted:
            raise ValueError(f"{path}: layer {number}: bytes is {entry.bytes!r}; expected {wanted}")
    return manifest


def _entry(path: str, layer: int, entry: Any, hidden_size: int) -> LayerEntry:
    where = f"layer {layer}"
    sizes = ("num_experts", "moe_intermediate_size")
    _check_keys(path, where, entry, {"file", "bytes", "sha256", "forms", "biases", *sizes})
    for key in sizes:
        if not _is_int(entry[key], 1, _MAX_SIZE):
            raise ValueError(
                f"{path}: {where}: {key} is {entry[key]!r}; accepted: 1 to {_MAX_SIZE}"
            )
    _check_keys(path, f"{where}: forms", entry["forms"], set(MATRICES))
    biases = entry["biases"]
    if not isinstance(biases, list) or biases != [b for b in BIASES if b in biases]:
        raise ValueError(f"{path}: {where}: biases is {biases!r}; expected some of {list(BIASES)}")
    spec = LayerSpec(
        layer=layer,
        num_experts=entry["num_experts"],
        hidden_size=hidden_size,
        moe_intermediate_size=entry["moe_intermediate_size"],
        form=LayerForm(*(_form(path, f"{where}: {m}", entry["forms"][m]) for m in MATRICES)),
        biases=tuple(biases),
    )
    for matrix, form in enumerate(spec.form):
        columns = spec.matrix_shape(matrix)[1]
        if columns % form.column_unit:
            raise ValueError(f"{path}: {where}: {MATRICES[matrix]} of {form} has {columns} columns")
    if entry["file"] != spec.file:
        raise ValueError(f"{path}: {where}: file is {entry['file']!r}; expected {spec.file!r}")
    if not _is_sha256(entry["sha256"]):
        raise ValueError(f"{path}: {where}: sha256 is {entry['sha256']!r}")
    return LayerEntry(spec, entry["bytes"], entry["sha256"])


def _form(path: str, where: str, entry: Any) -> WeightForm:
    _check_keys(path, where, entry, {"format", "group_size", "scale_type"})
    number, group, scale = entry["format"], entry["group_size"], entry["scale_type"]
    formats = all_formats()
    format = formats[number] if _is_int(number, 0, len(formats) - 1) else None
    grouped = format is not None and format.grouped
    if not (
        format is not None
        and _is_int(scale, 0, len(SCALE_TYPE_NAMES) - 1 if grouped else 0)
        and _is_int(group, 32 if grouped else 0, _MAX_SIZE if grouped else 0)
        and group % 32 == 0
    ):
        raise ValueError(f"{path}: {where}: {entry} is not a weight form")
    return WeightForm(format, group, scale)


def _check_keys(path: str, where: str, content: Any, keys: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {where} is {content!r}; expected an object")
    for problem, names in (("lacks", keys - content.keys()), ("has", content.keys() - keys)):
        if names:
            raise ValueError(f"{path}: {where} {problem} {', '.join(map(repr, sorted(names)))}")


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_MODEL_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "method": (_is_text, "a method"),
    "model_type": (lambda value: value is None or _is_text(value), "a text or null"),
    "hidden_size": (lambda value: _is_int(value, 1, _MAX_SIZE), f"1 to {_MAX_SIZE}"),
    "generator": (_is_text, "a text"),
    "scale_search": (lambda value: isinstance(value, bool), "true or false"),
    "source": (lambda value: value is None or _is_sha256(value), "a SHA-256 or null"),
}
