"""For tests of what is measured on a machine."""

import pytest

from kt_kernel.moe import tuning
from kt_kernel.runtime import machine, machine_cache


@pytest.fixture
def forget(monkeypatch):
    """Forgets what this process knows of the machine, now and when called: the next one to ask
    is as in a new process."""
    for name in ("_unwritable", "_lock_seconds"):
        monkeypatch.setattr(machine_cache, name, getattr(machine_cache, name))

    def clear():
        monkeypatch.setattr(machine_cache, "_known", {})
        machine._machine_key.cache_clear()
        tuning._saved.cache_clear()

    clear()
    yield clear
    clear()
