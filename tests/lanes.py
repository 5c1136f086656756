"""Which tests start an engine of the same kind: they run in one process, one after the other."""

from __future__ import annotations

ENGINES = ("vllm", "sglang")


def engine_of(nodeid: str) -> str | None:
    """The engine that a test starts, according to the test's name."""
    if "tests/plugin/" in nodeid:
        for engine in ENGINES:
            if f"test_{engine}" in nodeid or f"[{engine}-" in nodeid:
                return engine
    return None
