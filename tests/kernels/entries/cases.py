"""Lists the entries, and the calls of each."""

from __future__ import annotations

from types import ModuleType

from .cache import cache_cases
from .case import Case
from .functions import function_cases
from .layers import layer_cases
from .streams import stream_cases
from .things import Things
from .training import training_cases


def entries(core: ModuleType) -> list[str]:
    """Everything that can be called, or read from an object, according to the module's listing."""
    found = []
    for name, value in vars(core).items():
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            found.append(f"{name}()")
            found += [f"{name}.{member}" for member in vars(value) if not member.startswith("__")]
        elif callable(value):
            found.append(name)
    return sorted(found)


def cases(core: ModuleType, library: str) -> dict[str, list[Case]]:
    things = Things(core, library)
    return {
        **cache_cases(things),
        **function_cases(things),
        **layer_cases(things),
        **stream_cases(things),
        **training_cases(things),
    }
