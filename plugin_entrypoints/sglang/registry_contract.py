"""How SGLang installs hooks. A part of the contract, see `contract`."""

from ..contract import Attributes, Name
from .expert_contract import SRT

CALLS_WITH_ARGUMENTS = "SGLang calls plugins with the finished arguments"
_REGISTRY = f"{SRT}.plugins.hook_registry"
_SWEEPS = "SGLang's registry looks through all modules once for all hooks"
_SLOWER = "a start takes some seconds longer"

HOOK_SOURCE = Attributes(
    f"{_REGISTRY}:HookSource", ("plugin_name",), "the owner of a conflicting hook"
)
HOOKING = (
    Name(
        f"{_REGISTRY}:HookRegistry.register", "called", "registers hooks that SGLang then applies"
    ),
    Name(
        f"{_REGISTRY}:HookRegistry._apply_target",
        "called",
        "applies hooks in the main process, which gets the options after SGLang applied all hooks",
        until=CALLS_WITH_ARGUMENTS,
    ),
    Name(
        f"{_REGISTRY}:HookRegistry._hooks",
        "read",
        "the hooks of other plugins: two replacements of one target are a conflict",
        until="SGLang refuses two replacements of one function",
    ),
    Name(f"{_REGISTRY}:HookType.REPLACE", "read", "the kind of hook that may conflict"),
    Name(f"{_REGISTRY}:HookSource", "called", "names our plugin in SGLang's log"),
    Name(
        f"{_REGISTRY}:HookRegistry.apply_hooks",
        "wrapped",
        "in workers with kt options, looks through all modules once for all methods",
        until=_SWEEPS,
    ),
    Name(
        f"{_REGISTRY}:_propagate_patch",
        "wrapped",
        "notes the methods that are hooked, while hooks are applied with kt options",
        until=_SWEEPS,
        without=_SLOWER,
    ),
)
