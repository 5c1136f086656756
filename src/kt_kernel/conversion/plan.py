"""Plans a conversion, and checks it as far as file headers allow before anything is written."""

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
    """A conversion as the user requests it.

    method: None keeps the format that the input already has. input_type: the type that the input
    must have, bf16, fp16 or fp8; None accepts any. threads: None uses all cores. from_kt: the input
    must be weights that kt-kernel converted. scale_search: whether INT4 group scales are searched
    for the least error instead of being absmax / 7.
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
    """specs: one per layer, ascending. manifest: that of the directory before its first layer is
    written. found: the manifest that the directory already has and that is continued."""

    request: Request
    checkpoint: Checkpoint
    method: str
    specs: tuple[LayerSpec, ...]
    manifest: Manifest
    found: Manifest | None

    def bytes_of(self, specs: tuple[LayerSpec, ...]) -> int:
        """The size of these layers' files."""
        return sum(self.manifest.file_bytes(spec) for spec in specs)


def make_plan(request: Request) -> Plan:
    """Reads headers, samples for the fingerprint and, with ``input_type``, one expert of each
    layer.

    Raises what `open_checkpoint` and its readers raise for the input. Raises ValueError if the
    input has no experts, has another type or is already packed, and if the output is inside the
    input, has other contents, or exists and ``resume`` is not set.
    """
    output = os.path.abspath(check_path("output", request.output))
    checkpoint = open_checkpoint(request.input_path)
    _refuse_overlap(checkpoint.path, output)
    if isinstance(checkpoint, PackedCheckpoint):
        raise ValueError(
            f"{checkpoint.path}: this is already a packed directory (method {checkpoint.method}); "
            "convert the checkpoint that it was made from"
        )
    if request.from_kt and not isinstance(checkpoint, KtPackedCheckpoint):
        raise ValueError(f"{checkpoint.path}: expected weights that kt-kernel converted")
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
                f"{output}: already holds a packed directory ({len(found.layers)} of "
                f"{len(layers)} layers); add --resume to continue it, or choose another folder"
            )
        refuse_other(output, manifest, found)
    return Plan(request, checkpoint, method, specs, manifest, found)


def _refuse_overlap(source: str, output: str) -> None:
    if is_inside(source if os.path.isdir(source) else os.path.dirname(source), output):
        raise ValueError(
            f"output {output} is inside the input folder; choose another folder (the input is "
            "never written to)"
        )


def _method_of(checkpoint: Checkpoint, layer: int) -> str:
    """The quantising method (AMXINT8 or AMXINT4) whose format the layer's weights have."""
    form, _ = _stored(checkpoint, layer)
    for name in ("AMXINT8", "AMXINT4"):
        if form is not None and form.gate == form.up == get_method(name).form:
            return name
    held = str(form) if form else "not quantised"
    raise ValueError(
        f"{checkpoint.path}: the experts are {held}; choose their new format with --quant-method"
    )


def _spec(checkpoint: Checkpoint, layer: int, method: str, request: Request) -> LayerSpec:
    experts, hidden, inter = checkpoint.sizes(layer)
    if request.input_type is not None:  # otherwise no expert has to be read
        form, name = _stored(checkpoint, layer)
        if request.input_type != name:
            raise ValueError(
                f"{checkpoint.path}: experts of layer {layer} are {name or form}, but --input-type "
                f"{request.input_type} was requested"
            )
    with checkpoint.each_expert(layer, experts, hidden, inter, (), method) as checked:
        if "gate" not in checked.fields:
            raise ValueError(
                f"{checkpoint.path}: the experts of layer {layer} have no gate; packed directories "
                "hold experts with a gate only; use the checkpoint itself as --kt-weight-path"
            )
        made = checked.form or get_method(method).layer_form
    assert made is not None  # quantising methods have a fixed layer form
    check_sizes(made, method, hidden, inter, f"{checkpoint.path}: layer {layer}")
    biases = tuple(bias for bias in BIASES if bias in checked.fields)
    return LayerSpec(layer, experts, hidden, inter, made, biases)


def _stored(checkpoint: Checkpoint, layer: int) -> tuple[LayerForm | None, str | None]:
    """The form of a layer's weights (None if dense), and their name in --input-type."""
    with checkpoint.each_expert(layer, *checkpoint.sizes(layer), experts=(0,)) as experts:
        if experts.form is not None:
            fp8 = all(each.format in (FP8_BLOCK, FP8_ROW) for each in experts.form)
            return experts.form, "fp8" if fp8 else None
        _, first = next(iter(experts))
        up = first["up"]
        assert isinstance(up, torch.Tensor)  # no form: dense
        return None, _DENSE[up.dtype]
