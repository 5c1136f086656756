"""The progress of ``kt quant``."""

from __future__ import annotations

import sys
import time

from ..conversion import Progress
from ..runtime.text import shown_size
from .progress import bytes_bar

TELL_SECONDS = 30.0  # between log lines, if there is no terminal for a bar


class Shown(Progress):
    """A bar for the layers that are checked, then one for those that are written. Without a
    terminal, a line now and then."""

    def __enter__(self) -> Shown:
        self._bar = bytes_bar()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def checking(self, layers: int, total: int) -> None:
        self._task = self._bar.add_task(f"checking {layers} layers", total=total)

    def checked(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def begin(self, layers: int, kept: int, total: int) -> None:
        self._layers, self._next = layers, kept
        self._task = self._bar.add_task("converting", total=total)
        self._total, self._wrote = total, 0
        self._began = self._told = time.monotonic()

    def packing(self, layer: int) -> None:
        self._next += 1
        where = f"layer {layer} ({self._next} of {self._layers})"
        self._bar.update(self._task, description=where)
        now = time.monotonic()
        if self._bar.disable and now - self._told >= TELL_SECONDS and self._wrote:
            self._told = now
            rate = self._wrote / (now - self._began)
            print(
                f"kt: {where}: {shown_size(self._wrote)} of {shown_size(self._total)} written, "
                f"{rate / 1e9:.2f} GB/s, {(self._total - self._wrote) / rate / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )

    def wrote(self, count: int) -> None:
        self._wrote += count
        self._bar.advance(self._task, count)
