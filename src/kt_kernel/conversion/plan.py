"""What a conversion has to do, checked as far as files say it, before anything is written."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.kt_kernel.packed import KtPackedCheckpoint
from ..checkpoint.packed import PackedCheckpoint
from ..checkpoint.paths import check_path
from ..moe.settings import check_sizes
from ..runtime.files import is_inside
from ..weights.expert_tensors import BIASES
from ..weights.formats import FP8_BLOCK, FP8_ROW, LayerForm
from ..weights.methods import get_method
from ..weights.store.layer_file import LayerSpec
from ..weights.store.manifest import Manifest, generator
from ..weights.store.writer import manifest_if_any, refuse_other

_DENSE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    method: None takes the one whose weights the input holds already. input_type: what the input
    must hold, bf16, fp16 or fp8; None: whatever is there. threads: None for all cores. from_kt:
    the input must be weights that kt-kernel converted. scale_search: whether group scales of INT4
    are those of the least error, rather than absmax / 7.
    """

    input_path: str
    output: str
    method: str | None
    input_type: str | None = None
    threads: int | None = None
    resume: bool = False
    from_kt: bool = False
    scale_search: bool = True


@dataclass(frozen=True)
class Plan:
    """specs: of all layers, ascending. manifest: of the directory before its first layer. found:
    what the directory says already, to be continued."""

    request: Request
    checkpoint: Checkpoint
    method: str
    specs: tuple[LayerSpec, ...]
    manifest: Manifest
    found: Manifest | None

    def bytes_of(self, specs: tuple[LayerSpec, ...]) -> int:
        """Of the files of these layers."""
        return sum(self.manifest.file_bytes(spec) for spec in specs)


def make_plan(request: Request) -> Plan:
    """Reads headers, samples for the fingerprint and, with ``input_type``, an expert of each layer.

    Raises what `open_checkpoint` and its readers raise for the input, and ValueError for an input
    without experts, of another type, or packed already; for an output in the input, with other
    contents, or there already without ``resume``.
    """
    output = os.path.abspath(check_path("output", request.output))
    checkpoint = open_checkpoint(request.input_path)
    _refuse_overlap(checkpoint.path, output)
    if isinstance(checkpoint, PackedCheckpoint):
        raise ValueError(
            f"{checkpoint.path}: a packed directory already, for method {checkpoint.method}; "
            "convert the checkpoint that it was made from"
        )
    if request.from_kt and not isinstance(checkpoint, KtPackedCheckpoint):
        raise ValueError(f"{checkpoint.path}: no weights that kt-kernel converted")
    layers = checkpoint.layers()
    if not layers:
        raise ValueError(f"{checkpoint.path}: no layer has experts; nothing to convert")
    method = request.method or _method_of(checkpoint, layers[0])
    specs = tuple(_spec(checkpoint, layer, method, request) for layer in layers)
    hidden = specs[0].hidden_size
    for spec in specs:
        if spec.hidden_size != hidden:
            raise ValueError(
                f"{checkpoint.path}: layer {spec.layer} has hidden size {spec.hidden_size}, layer "
                f"{layers[0]} has {hidden}; expected one model"
            )
    manifest = Manifest(
        method=method,
        model_type=checkpoint.model_type,
        hidden_size=hidden,
        generator=generator(),
        scale_search=request.scale_search and get_method(method).group_size > 0,
        source=checkpoint.fingerprint,
        expected=tuple(layers),
    )
    found = manifest_if_any(output)
    if found is not None:
        if not request.resume:
            raise ValueError(
                f"{output}: holds a packed directory already ({len(found.layers)} of "
                f"{len(layers)} layers); --resume continues it, or give another folder"
            )
        refuse_other(output, manifest, found)
    return Plan(request, checkpoint, method, specs, manifest, found)


def _refuse_overlap(source: str, output: str) -> None:
    if is_inside(source if os.path.isdir(source) else os.path.dirname(source), output):
        raise ValueError(
            f"output {output} is the input's folder or in it; give a folder elsewhere: the input "
            "is never written to"
        )


def _method_of(checkpoint: Checkpoint, layer: int) -> str:
    """The method that quantises by itself whose weights a layer holds."""
    form, _ = _stored(checkpoint, layer)
    for name in ("AMXINT8", "AMXINT4"):
        if form is not None and form.gate == get_method(name).form:
            return name
    held = str(form) if form else "not quantised"
    raise ValueError(
        f"{checkpoint.path}: experts are {held}: say with --quant-method what they are to become"
    )


def _spec(checkpoint: Checkpoint, layer: int, method: str, request: Request) -> LayerSpec:
    experts, hidden, inter = checkpoint.sizes(layer)
    if request.input_type is not None:  # or nothing of an expert need be read
        form, name = _stored(checkpoint, layer)
        if request.input_type != name:
            raise ValueError(
                f"{checkpoint.path}: experts of layer {layer} are {name or form}, but --input-type "
                f"{request.input_type} was given"
            )
    with checkpoint.each_expert(layer, experts, hidden, inter, (), method) as checked:
        made = checked.form or get_method(method).layer_form
    assert made is not None  # methods that quantise by themselves say what they make
    check_sizes(made, method, hidden, inter, f"{checkpoint.path}: layer {layer}")
    biases = tuple(bias for bias in BIASES if bias in checked.fields)
    return LayerSpec(layer, experts, hidden, inter, made, biases)


def _stored(checkpoint: Checkpoint, layer: int) -> tuple[LayerForm | None, str | None]:
    """The form of a layer's weights, None for dense ones; and what --input-type calls them."""
    with checkpoint.each_expert(layer, *checkpoint.sizes(layer), experts=(0,)) as experts:
        if experts.form is not None:
            fp8 = experts.form.gate.format in (FP8_BLOCK, FP8_ROW)
            return experts.form, "fp8" if fp8 else None
        _, first = next(iter(experts))
        gate = first["gate"]
        assert isinstance(gate, torch.Tensor)  # no form: dense
        return None, _DENSE[gate.dtype]
