"""Streams between a GPU and the layers, and launches of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .case import Case, NoConstructor
from .specs import Flag, Number, Real, Some, Text
from .things import (
    HIDDEN,
    MAX,
    TOKENS,
    TOP_K,
    Things,
)


def stream_cases(t: Things) -> dict[str, list[Case]]:
    core, engine = t.core, t.engine()
    buffer = core.HostBuffer(100)
    small, kinds = (1 << 31) - 2, Text("pi", any=True)
    slot = Number(0, 0, 0)
    bound = t.kernel.bind(1, None, None)
    pointer, int32 = Number(0, 0, (1 << 64) - 1, True), Number(0, -1 << 31, (1 << 31) - 1, True)
    copies = [(pointer,) * 3] * 2
    stream, grid = Number(0, 0, (1 << 64) - 1, True), Number(1, 1, (1 << 31) - 1, True)

    def properties(name: str, of: Any, *names: str) -> dict[str, list[Case]]:
        return {f"{name}.{p}": [Case(lambda p=p: getattr(of, p))] for p in names}

    seconds = Real(1.0, (-1.0,))
    return {
        "split_over_bus": [
            Case(
                core.split_over_bus,
                on_cpu=[seconds, seconds],
                expert_on_bus=seconds,
                batch_on_cpu=seconds,
                streaming=seconds,
            ),
        ],
        "HostBuffer()": [
            Case(
                core.HostBuffer,
                nbytes=Number(100, 1, MAX),
                extra=[(dict(nbytes=n), MemoryError) for n in (1 << 50, 1 << 62, MAX)],
            ),
        ],
        **properties("HostBuffer", buffer, "address", "nbytes"),
        "StreamSide()": [
            Case(
                core.StreamSide,
                capacity=Number(TOKENS, 1, (1 << 31) - 1),
                hidden=Number(HIDDEN, 1, 1 << 16),
                top_k=Number(TOP_K, 1, 1 << 16),
                dtype=Number(2, 0, 2),
                with_partial=Flag(True),
                extra=[(dict(capacity=(1 << 31) - 1, hidden=1 << 16), MemoryError)],
            ),
        ],
        **properties(
            "StreamSide",
            t.side,
            "buffer",
            "capacity",
            "tokens_address",
            "times_address",
            "done_address",
            "ready_address",
            "x_address",
            "ids_address",
            "weights_address",
            "out_address",
        ),
        "StreamEngine()": [
            Case(
                core.StreamEngine,
                entries=Number(8, 2, 1 << 20),
                watchdog_seconds=Real(1.0, (0.0, -1.0), infinite=True),
                first=Number(0, 0, (1 << 32) - 1, True),
                traces=Flag(False),
                extra=[(dict(entries=n), ValueError) for n in (3, 12, (1 << 20) - 1)],
            ),
        ],
        **properties("StreamEngine", engine, "buffer", "entries", "ring_address", "head_address"),
        "StreamEngine.add_slot": [
            Case(
                t.engine().add_slot,
                layer=Some(t.layer),
                where=Text("layer", any=True),
                side=Some(core.StreamSide(TOKENS, HIDDEN, TOP_K, 2, True)),
                chain=Number(0, 0, small, True),
                position=Number(0, 0, small, True),
                protected_k=Number(TOP_K, -MAX - 1, MAX, True),
                extra=[(dict(layer=t.new_layer()), ValueError)],
            ),
        ],
        "StreamEngine.drop_slot": [Case(t.engine().drop_slot, slot=slot, forget=Flag(True))],
        "StreamEngine.entries_of": [Case(engine.entries_of, slot=slot)],
        "StreamEngine.raise_error": [Case(engine.raise_error)],
        "StreamEngine.pending": [Case(engine.pending)],
        "StreamEngine.drain": [Case(engine.drain, timeout_s=Real(0.1, (-1.0,), infinite=True))],
        "StreamEngine.stop": [Case(t.engine().stop)],
        "StreamEngine.wake": [Case(engine.wake)],
        "StreamEngine.take_trace": [Case(engine.take_trace)],
        "StreamEngine.stats": [Case(engine.stats)],
        "CudaContext()": [
            Case(core.CudaContext, library=Text(t.library), errors=(RuntimeError,)),
        ],
        "CudaContext.capturing": [Case(t.context.capturing, stream=stream)],
        "CudaContext.wait": [
            Case(
                t.context.wait,
                stream=stream,
                address=Number(64, 4, (1 << 64) - 4, True),
                value=Number(1, 0, (1 << 32) - 1, True),
                extra=[(dict(address=6), ValueError)],
            ),
        ],
        "CudaContext.copy": [
            Case(
                t.context.copy,
                stream=stream,
                copies=copies,
            ),
        ],
        "KernelLaunch()": [
            Case(
                core.KernelLaunch,
                function=Number(1, 1, (1 << 64) - 1, True),
                threads=Number(32, 1, 1024, True),
                shared_bytes=Number(0, 0, 1 << 20, True),
                kinds=kinds,
                library=Text(t.library),
                errors=(RuntimeError,),
                extra=[(dict(kinds=text), ValueError) for text in ("pf", "p\0", "p" * 33)],
            ),
        ],
        "KernelLaunch.run": [
            Case(
                lambda grid, stream, p, i: t.kernel.run(grid, stream, p, i),
                grid=grid,
                stream=stream,
                p=pointer,
                i=int32,
            ),
        ],
        "KernelLaunch.bind": [
            Case(
                lambda grid, p, i, wait: t.kernel.bind(grid, p, i, wait_address=wait),
                grid=grid,
                p=replace(pointer, none=True),
                i=replace(int32, none=True),
                wait=Number(0, 0, (1 << 64) - 4, True),
            ),
            Case(
                lambda x, y, z: t.kernel.bind((x, y, z), 0, 0),
                x=grid,
                y=Number(1, 1, 65535, True),
                z=Number(1, 1, 65535, True),
            ),
        ],
        "SyncedCopies()": [
            Case(
                core.SyncedCopies,
                context=Some(t.context),
                stream=stream,
                to_device=copies,
                to_host=copies,
            ),
        ],
        "SyncedCopies.run": [Case(core.SyncedCopies(t.context, 0, to_device=[], to_host=[]).run)],
        "UploadQueue()": [Case(core.UploadQueue, context=Some(t.context), stream=stream)],
        "UploadQueue.start": [
            Case(
                t.uploads.start,
                uploads=[(copies, [Some(t.kernel.bind(1, 0, 0))])] * 2,
                extra=[(dict(uploads=[([], [bound])]), ValueError)],  # with open parameters
            ),
        ],
        "UploadQueue.completed": [Case(t.uploads.completed)],
        "UploadQueue.wait": [Case(t.uploads.wait)],
        "BoundLaunch()": [NoConstructor(core.BoundLaunch)],
        "BoundLaunch.run": [
            Case(lambda stream, p, i: bound.run(stream, p, i), stream=stream, p=pointer, i=int32),
        ],
    }
