"""Parts of sglang_hooks.py: references to what hooks replace."""

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kt_kernel.plugin_entrypoints.sglang.sweep import once_when_applied, one_sweep


def _modules() -> tuple[Any, Any]:
    """A module with a class and a function, and one that refers to their parts."""

    class Owner:
        def first(self) -> int:
            return 1

        def second(self) -> int:
            return 10

    owner, other = ModuleType("kt_owner"), ModuleType("kt_other")
    vars(owner).update(Owner=Owner, function=lambda: 100)
    vars(other).update(first=Owner.first, second=Owner.second, function=vars(owner)["function"])
    sys.modules |= {"kt_owner": owner, "kt_other": other}
    return owner, other


def check_references_are_found_in_one_sweep() -> None:
    """The same as SGLang's registry finds, also of a method with two hooks."""
    each, outcomes = hook_registry._propagate_patch, []
    for sweeps in (nullcontext, one_sweep):
        owner, other = _modules()
        with sweeps():
            for target in ("Owner.first", "Owner.second", "Owner.first", "function"):
                more = [(HookType.AFTER, lambda result, *given: result + 1, None)]
                HookRegistry._apply_target(f"kt_owner.{target}", more)
            assert other.function is owner.function  # a path may lead through it
            noted = other.first is not owner.Owner.first
            assert noted == (sweeps is one_sweep)
        assert other.first is owner.Owner.first and other.second is owner.Owner.second
        outcomes.append((other.first(None), other.second(None), other.function()))
        assert hook_registry._propagate_patch is each
    assert outcomes == [(3, 11, 101)] * 2
    del sys.modules["kt_owner"], sys.modules["kt_other"]


def check_the_registry_is_left_as_it_was() -> None:
    """In a worker, after hooks were applied once, and without the function that sweeps."""
    original = vars(HookRegistry)["apply_hooks"]
    once_when_applied()
    assert vars(HookRegistry)["apply_hooks"] is not original
    HookRegistry.apply_hooks()
    assert vars(HookRegistry)["apply_hooks"] is original
    each = hook_registry._propagate_patch
    del hook_registry._propagate_patch
    with one_sweep():
        assert not hasattr(hook_registry, "_propagate_patch")
    hook_registry._propagate_patch = each
