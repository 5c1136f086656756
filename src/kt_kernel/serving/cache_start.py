"""Starts the live expert cache of a loaded model, or says why it cannot run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..device.cache import CacheMemory, CudaCache, HostCache
from ..device.slots import DenseSlots, PackedSlots, SlotWeights, holds_scales
from ..device.streaming.experts import PackedExperts
from ..device.uploads import CudaUploads, HostUploads, Upload, Uploads
from ..runtime.text import shown_size
from ..runtime.variant import kernel_kind
from ..weights.expert_tensors import MATRICES
from ..weights.formats import BLOCK_SIZE, FP8_BLOCK, INT4_GROUP, INT8_ROW
from .cache import CachedLayer, ModelCache
from .cache_slots import LayerSlots
from .cold_loading import WEIGHT_DTYPES
from .hot_packed import PackedHot
from .moving import CACHE_FLAG, KIND_RULES_IT_OUT, NO_SPLIT_LAYER

RATE_FLAG = "--kt-expert-update-rate"
_TIMED = 256  # uploads, at most
_MOST_DIFFERENT = 0.5  # relative error of a hot expert's weights that rounding may cause


class NoCache(Exception):
    """Why experts cannot move."""


def start_cache(layers: Sequence[Any], device: torch.device, rate: int | None) -> ModelCache:
    """Starts the cache of the `HybridLayer`s that have slots.

    Copies the hot experts from the CPU into their slots, so that an expert has the same weights
    wherever it is computed, and measures how long that takes. rate: bytes per second for uploads
    while serving, at most; None: as many as were measured.

    Raises NoCache, before any weight is replaced, and RuntimeError if a hot expert then has other
    weights than on the CPU.
    """
    if kernel_kind():
        raise NoCache(KIND_RULES_IT_OUT)
    moving = [layer for layer in layers if layer.placement.num_hot and not layer.placement.all_hot]
    if not moving:
        raise NoCache(NO_SPLIT_LAYER)
    if any(not layer.has_cpu_part for layer in moving):
        raise NoCache("tensor parallelism is not supported")
    experts = {layer.num_experts for layer in moving}
    if len(experts) > 1:
        raise NoCache("the layers have different numbers of experts")
    if device.type not in ("cuda", "cpu"):
        raise NoCache(f"the engine's device is {device}; accepted: a CUDA device or the CPU")
    packed = [_packed(layer) for layer in moving]
    try:
        weights = [
            _slot_weights(layer, its_experts, device)
            for layer, its_experts in zip(moving, packed, strict=True)
        ]
        memory = _memory(device, len(moving), experts.pop())
        uploads = _uploads(device, moving, packed)
    except RuntimeError as error:  # torch.OutOfMemoryError, or memory that cannot be pinned
        raise NoCache(_reason(error, device)) from error
    cached = []
    for number, layer in enumerate(moving):
        slots = LayerSlots(layer.placement, memory.wanted[number])
        cached.append(CachedLayer(packed[number], weights[number], slots))
    measured = _fill(cached, uploads)
    for layer, its_slots in zip(moving, cached, strict=True):
        _check_filled(layer, its_slots)
    bound = measured if rate is None else float(rate)
    cache = ModelCache(cached, memory, uploads, bound if device.type == "cuda" else None)
    for number, layer in enumerate(moving):
        layer.start_cache(cache, number, device)
    return cache


def _reason(error: RuntimeError, device: torch.device) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"the memory of {device} is used up ({first})"
    return first


def describe(cache: ModelCache, rate: int | None) -> str:
    """One line for the log."""
    first = cache.layers[0]
    slots = [layer.slots.num_slots for layer in cache.layers]
    bound = cache.rate
    limit = "without a bound"
    if bound is not None:
        why = "given" if rate is not None else f"measured; {RATE_FLAG} sets less"
        limit = f"at up to {shown_size(bound)} per second ({why})"
    return (
        f"kt: experts of {len(cache.layers)} layers move while serving ({CACHE_FLAG}): "
        f"{min(slots)} to {max(slots)} slots per layer, policy {cache.policy} at first, uploads of "
        f"{shown_size(first.packed.expert_bytes)} {limit}; the CPU keeps all experts"
    )


def _packed(layer: Any) -> PackedExperts:
    try:
        packed: PackedExperts = layer.wrapper.packed_experts()
    except ValueError as error:
        raise NoCache(str(error)) from error
    if packed.biased:
        raise NoCache(f"layer {layer.layer_idx}: its experts have biases")
    if len(packed.held) != layer.num_experts:
        raise NoCache(f"layer {layer.layer_idx}: the CPU does not have all experts")
    return packed


def _slot_weights(layer: Any, packed: PackedExperts, device: torch.device) -> SlotWeights:
    """The engine's weights of a layer. Raises NoCache unless they have the experts' values."""
    place = f"layer {layer.layer_idx}"
    hot = layer.hot
    weights: SlotWeights
    if isinstance(hot, PackedHot):
        weights = _packed_slots(place, hot, packed)
    else:
        w13, w2, *scales = _own_weights(place, layer, packed, device)
        weights = _block_slots(place, packed, w13, w2, *scales) if scales else DenseSlots(w13, w2)
    expert = layer.placement.hot_experts[0]
    for name in MATRICES:
        held = weights.values(layer.slot_of(expert), name)
        want = _values(layer, expert, name).to(device)
        if not (held - want).norm() <= _MOST_DIFFERENT * want.norm():
            raise NoCache(f"{place}, expert {expert}: {_own_layout(name, device)}")
    return weights


def _packed_slots(place: str, hot: PackedHot, packed: PackedExperts) -> PackedSlots:
    """Raises NoCache unless the codes and scales are those of the CPU."""
    for part in packed.parts:
        for name, matrix in zip(MATRICES, part.matrices, strict=True):
            form = matrix.form
            same = form.format == INT8_ROW
            if hot.bits == 4:
                same = form.format == INT4_GROUP and form.group_size == hot.group
                same = same and hot.z13 is None and holds_scales(hot.s13.dtype, form)
            if not same:
                raise NoCache(
                    f"{place}: the engine holds hot experts in {hot.title}, and the CPU holds "
                    f"{name} as {form}, which cannot be copied to each other's place; accepted: "
                    "--kt-hot-format bf16"
                )
    return PackedSlots(hot.w13, hot.w2, hot.s13, hot.s2)


def _own_weights(
    place: str, layer: Any, packed: PackedExperts, device: torch.device
) -> list[torch.Tensor]:
    """The engine's own w13 and w2, and of FP8 their scales. Raises NoCache unless they are plain
    matrices."""
    slots, hidden, inter = layer.placement.num_slots, packed.hidden, packed.inter
    if layer.slot_weights is None:
        raise NoCache(f"{place}: the engine's weights of hot experts are not known")
    w13, w2, *scales = (weight.detach() for weight in layer.slot_weights)
    found = [
        ("w13", w13, (slots, 2 * inter, hidden)),
        ("w2", w2, (slots, hidden, inter)),
    ]
    accepted: tuple[torch.dtype, ...] = WEIGHT_DTYPES
    if w13.dtype == torch.float8_e4m3fn and len(scales) == 2:
        accepted += (w13.dtype,)
        found += [
            ("scales", scale, (n, -(-rows // BLOCK_SIZE), -(-columns // BLOCK_SIZE)))
            for scale, (_, _, (n, rows, columns)) in zip(scales, found, strict=True)
        ]
    for name, weight, shape in found:
        if weight.dtype not in accepted:
            raise NoCache(
                f"{place}: the engine holds hot experts in {weight.dtype}; accepted: "
                + ", ".join(map(str, (*WEIGHT_DTYPES, "FP8 with scales of 128 x 128 blocks")))
            )
        if tuple(weight.shape) != shape or not weight.is_contiguous() or weight.device != device:
            raise NoCache(
                f"{place}: the engine holds {name} of hot experts as {list(weight.shape)} on "
                f"{weight.device}, expected {list(shape)}, contiguous, on {device}"
            )
    return [weight for _, weight, _ in found]


def _block_slots(
    place: str,
    packed: PackedExperts,
    w13: torch.Tensor,
    w2: torch.Tensor,
    s13: torch.Tensor,
    s2: torch.Tensor,
) -> PackedSlots:
    """Raises NoCache unless the codes and scales are those of the CPU."""
    forms = {matrix.form for part in packed.parts for matrix in part.matrices}
    if {form.format for form in forms} != {FP8_BLOCK} or {s13.dtype, s2.dtype} != {torch.float32}:
        raise NoCache(
            f"{place}: the engine holds hot experts in FP8 with {s13.dtype} scales, and the CPU "
            f"holds {', '.join(map(str, forms))}, which cannot be copied to each other's place; "
            "accepted: --kt-method FP8, or --kt-hot-format bf16"
        )
    if packed.inter % BLOCK_SIZE:
        raise NoCache(
            f"{place}: blocks of {BLOCK_SIZE} rows lie across gate and up of {packed.inter} "
            "rows; accepted: --kt-hot-format bf16"
        )
    return PackedSlots(w13, w2, s13, s2)


def _own_layout(name: str, device: torch.device) -> str:
    what = f"the engine keeps {name} in a layout of its own"
    if device.type != "cuda":
        return what
    return f"{what}; add --moe-backend triton (vLLM) or --moe-runner-backend triton (SGLang)"


def _values(layer: Any, expert: int, matrix: str) -> torch.Tensor:
    """float32, the weights of an expert as the CPU's kernels use them."""
    values: torch.Tensor = layer.wrapper.unpacked(expert, matrix)
    return values


def _memory(device: torch.device, layers: int, experts: int) -> CacheMemory:
    made = CudaCache if device.type == "cuda" else HostCache
    return made(device, layers, experts)


def _uploads(
    device: torch.device, moving: Sequence[Any], packed: Sequence[PackedExperts]
) -> Uploads:
    if device.type != "cuda":
        owner = {id(experts): layer for experts, layer in zip(packed, moving, strict=True)}
        return HostUploads(
            lambda experts, expert, matrix: _values(owner[id(experts)], expert, matrix)
        )
    from ..device.backend import CudaBackend

    try:
        from ..device.streaming import unpack_kernel  # noqa: F401 - Triton may be missing

        backend = CudaBackend(device)
        for experts in packed:
            experts.register(backend)
    except ImportError as error:
        raise NoCache(str(error)) from error
    return CudaUploads(device, packed)


def _fill(layers: Sequence[CachedLayer], uploads: Uploads) -> float:
    """Uploads all hot experts; returns the bytes per second of doing that again, for some of them:
    the first upload to each slot prepares the next ones."""
    every = [
        Upload(layer.packed, layer.weights, expert, slot)
        for layer in layers
        for expert, slot in enumerate(layer.slots.wanted.tolist())
        if slot >= 0
    ]
    uploads.start(every)
    uploads.wait()
    again = every[:: -(-len(every) // _TIMED)]
    began = time.perf_counter()
    uploads.start(again)
    uploads.wait()
    moved = sum(upload.experts.expert_bytes for upload in again)
    return moved / max(time.perf_counter() - began, 1e-9)


def _check_filled(layer: Any, cached: CachedLayer) -> None:
    """Raises RuntimeError unless the last hot expert of a layer has the CPU's weights, apart from
    what `SlotWeights.same` allows: the engine's own ones are lost."""
    expert = layer.placement.hot_experts[-1]
    slot = layer.slot_of(expert)
    for name in MATRICES:
        held = cached.weights.values(slot, name)
        want = _values(layer, expert, name).to(held.device)
        if not cached.weights.same(held, want):
            raise RuntimeError(
                f"layer {layer.layer_idx}, expert {expert}: after its upload, {name} has other "
                f"weights on {held.device} than on the CPU; remove {CACHE_FLAG}"
            )
