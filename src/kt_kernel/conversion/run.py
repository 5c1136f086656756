"""The conversion: reads and packs one layer while the previous one is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..moe.settings import LayerSettings, check_settings
from ..moe.whole import WholeLayer
from ..runtime.files import nearest_existing
from ..runtime.machine import usable_cores
from ..runtime.text import shown_size
from ..runtime.variant import KINDS
from ..weights.store.atomic import sha256_of, until_left
from ..weights.store.layer_file import LayerSpec
from ..weights.store.manifest import Manifest
from ..weights.store.writer import PackedLayer, PackedWriter
from .plan import Plan


class Progress:
    """Receives the progress of a conversion; does nothing by itself. Several threads call it."""

    def checking(self, layers: int, total: int) -> None:
        """`layers` layers of `total` bytes already exist; their checksums are being computed."""

    def checked(self, count: int) -> None:
        """`count` more of those bytes were read."""

    def begin(self, layers: int, kept: int, total: int) -> None:
        """The result has `layers` layers, `kept` of which exist; `total` bytes will be written."""

    def wrote(self, count: int) -> None:
        """`count` more bytes were written."""

    def packing(self, layer: int) -> None:
        """This layer is being read and packed."""


def convert(plan: Plan, progress: Progress | None = None) -> None:
    """Carries out `plan`. A plan with ``resume`` continues a packed directory that was not
    finished, for whatever reason.

    At most two layers' packed weights are in memory. Raises ValueError naming file and tensor if
    weights cannot be converted, and OSError naming the file if it cannot be read or written, or if
    there is too little space.
    """
    progress = progress or Progress()
    output = os.path.abspath(plan.request.output)
    bad = _damaged(output, plan.found, progress) if plan.found else set()
    kept = set(plan.found.layers) - bad if plan.found else set()
    todo = tuple(spec for spec in plan.specs if spec.layer not in kept)
    total = plan.bytes_of(todo)
    check_space(output, total)
    with PackedWriter(output, plan.manifest) as writer:
        if bad:
            writer.remove(bad)
        progress.begin(len(plan.specs), len(kept), total)
        _write_all(plan, todo, writer, progress)


def check_space(folder: str, needed: int) -> None:
    """Raises OSError if the file system of `folder`, which need not exist, lacks the space."""
    status = os.statvfs(nearest_existing(folder))
    free = status.f_bavail * status.f_frsize
    if free < needed:
        left = shown_size(free, down=True)
        raise OSError(f"{folder}: {shown_size(needed)} are needed, but only {left} are free")


def _damaged(folder: str, manifest: Manifest, progress: Progress) -> set[int]:
    """Layers whose file does not match the manifest."""
    entries = list(manifest.layers.values())
    progress.checking(len(entries), sum(entry.bytes for entry in entries))

    def is_bad(entry: Any) -> bool:
        try:
            path = os.path.join(folder, entry.spec.file)
            return sha256_of(path, checked) != entry.sha256
        except FileNotFoundError:
            return True

    with ThreadPoolExecutor(usable_cores()) as threads, until_left(progress.checked) as checked:
        bad = list(threads.map(is_bad, entries))
    return {entry.spec.layer for entry, wrong in zip(entries, bad, strict=True) if wrong}


def _write_all(
    plan: Plan, specs: Iterable[LayerSpec], writer: PackedWriter, progress: Progress
) -> None:
    with (
        ThreadPoolExecutor(1, "kt-write") as thread,
        # After an error, the layer that is being written is good.
        until_left(progress.wrote, finish_on_error=True) as wrote,
    ):
        writing: Future[None] | None = None
        for spec in specs:
            progress.packing(spec.layer)
            layer = _pack(plan, spec)
            _refuse_changed(plan)
            if writing is not None:
                writing.result()
            writing = thread.submit(writer.add, layer, wrote)
            del layer  # or it would be a third one in memory
        if writing is not None:
            writing.result()


def _refuse_changed(plan: Plan) -> None:
    """Raises ValueError if the input has changed. Every layer opens it again."""
    if changed := plan.checkpoint.changed(folders=False):
        raise ValueError(
            f"{changed}: changed during the conversion; the layers written so far are from the old"
            " files"
        )


def _pack(plan: Plan, spec: LayerSpec) -> PackedLayer:
    return WholeLayer(_settings(plan, spec)).load_from_files()


def _settings(plan: Plan, spec: LayerSpec) -> LayerSettings:
    settings = check_settings(
        layer_idx=spec.layer,
        num_experts=spec.num_experts,
        num_experts_per_tok=1,
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        cpuinfer_threads=plan.request.threads or usable_cores(),
        weight_path=plan.checkpoint.path,
        chunked_prefill_size=1,
        method=plan.method,
    )
    # A fixed kind of kernel needs no measurement.
    return replace(settings, kind=KINDS["vector"], scale_search=plan.manifest.scale_search)
