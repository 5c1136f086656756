"""SGLang plugin: looks through all modules once for what the hooks replace.

For each hook, SGLang's registry looks through all attributes of all modules, some six thousand, for
other references to the function that it replaces. With kt-moe's hooks, that takes seconds in each
process.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any


@contextmanager
def one_sweep() -> Iterator[None]:
    """Inside, the registry only notes which methods it replaces; references to them are looked for
    at the end. For functions of modules and for classes, it looks at once: the path of another hook
    may lead through such a reference."""
    from sglang.srt.plugins import hook_registry

    each = getattr(hook_registry, "_propagate_patch", None)
    if each is None:  # the contract has a warning
        yield
        return
    noted: dict[int, tuple[Any, Any]] = {}  # with the originals, so that no other object has the id

    def note(original: Any, wrapped: Any, owner: Any) -> int:
        if isinstance(owner, type) and not isinstance(original, type):
            noted[id(original)] = original, wrapped
            return 0  # references that were replaced so far, for the log
        found: int = each(original, wrapped, owner)
        return found

    hook_registry._propagate_patch = note
    try:
        yield
    finally:
        hook_registry._propagate_patch = each
        _replace(noted)


def once_when_applied() -> None:
    """The next time SGLang applies the hooks of all plugins, its registry looks through all modules
    once, see `one_sweep`."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = vars(HookRegistry)["apply_hooks"]

    def apply_hooks() -> None:
        HookRegistry.apply_hooks = original
        with one_sweep():
            HookRegistry.apply_hooks()

    HookRegistry.apply_hooks = staticmethod(apply_hooks)


def _replace(noted: Mapping[int, tuple[Any, Any]]) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) not in noted:
                continue
            while id(value) in noted:  # what replaced it may have been replaced itself
                value = noted[id(value)][1]
            with suppress(AttributeError, TypeError):  # as the registry does
                setattr(module, name, value)
