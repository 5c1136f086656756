"""Where an engine's cold experts are computed, changed while it serves; for prompts.py.

The mode is in a file, because SGLang computes in another process than the benchmark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VARIABLE = "STREAM_MODE_FILE"
CPU, STREAMED, SHARED, NO_COPIES = "cpu", "streamed", "shared", "no copies"
DIVIDED = "divided"  # to see where kt-moe should share
MODES = {
    CPU: "nothing is streamed",
    STREAMED: "all cold experts are streamed",
    SHARED: "the CPU and the bus share the experts, as kt-moe does by itself",
    DIVIDED: "as shared, but all experts are never streamed just because that is simpler",
    NO_COPIES: "as streamed, but zeros instead of the copies: what the GPU takes. The results are "
    "wrong",
}


def install(path: Path) -> None:
    """From now on, batches above the threshold are computed as the file says."""
    from torch.cuda import stream as on_stream

    from kt_kernel.device.streaming.lane import CopyLane
    from kt_kernel.serving.streaming import ModelStreaming

    def mode() -> str:
        return path.read_text()

    wants, whole, copy = ModelStreaming.wants, ModelStreaming.whole, CopyLane.copy
    ModelStreaming.wants = lambda self, x: mode() != CPU and wants(self, x)

    def all_of_them(self: Any, *batch: Any) -> bool:
        now = mode()
        return now in (STREAMED, NO_COPIES) or (now != DIVIDED and whole(self, *batch))

    ModelStreaming.whole = all_of_them

    cleared: set[tuple[int, int]] = set()  # memory that holds zeros: its address and size

    def maybe_copy(self: Any, to: Any, *what: Any) -> None:
        if mode() != NO_COPIES:
            cleared.clear()
            copy(self, to, *what)
            return
        # What lies there could be the right weights, of the same layer's last batch.
        place = to.data_ptr(), to.nbytes
        if place not in cleared:
            cleared.add(place)
            with on_stream(self._stream):
                to.zero_()

    CopyLane.copy = maybe_copy
