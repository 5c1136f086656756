"""For tests of measurements of the machine."""

import pytest

from kt_kernel.moe import tuning
from kt_kernel.runtime import machine, machine_cache


@pytest.fixture
def forget(monkeypatch):
    """Forgets what this process knows about the machine, now and whenever called. The next query is
    then as in a new process."""
    for name in ("_unwritable", "_lock_seconds"):
        monkeypatch.setattr(machine_cache, name, getattr(machine_cache, name))

    def clear():
        monkeypatch.setattr(machine_cache, "_known", {})
        machine._machine_key.cache_clear()
        tuning._saved.cache_clear()

    clear()
    yield clear
    clear()
