"""SGLang plugin: installs hooks, and checks that they are in effect.

SGLang collects the hooks of all plugins before it reads its arguments, and applies them at once.
kt-moe hooks SGLang's model code and its request handlers only in processes that serve with kt
options, so that SGLang and other plugins are not affected otherwise:

- A worker process gets the options before SGLang loads its plugins. It registers its hooks like
  any plugin (`register`).
- The main process gets them later. It applies its hooks on top of those of SGLang and the other
  plugins (`apply`).

If SGLang cannot apply a hook, it only logs that. If two plugins replace the same function, the last
one wins. `verify` refuses both cases.
"""

import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from kt_kernel.serving.option_table import OptionError

from .contract import CONTRACT
from .sweep import one_sweep

_PLUGIN = "kt_moe"  # the name of our entry point
_WITHOUT = {name.target: name.without for name in CONTRACT.names}

_logger = logging.getLogger("sglang.kt")


@dataclass(frozen=True)
class Hook:
    """A hook on a function or class of SGLang, which the contract names.

    Attributes:
        target: ``module:attribute.path``, as in the contract.
        kind: the name of SGLang's HookType.
        function: the hook, or the class that replaces one.
    """

    target: str
    kind: Literal["BEFORE", "AFTER", "AROUND", "REPLACE"]
    function: Callable[..., Any]

    @property
    def dotted(self) -> str:
        """The target as SGLang's registry spells it."""
        return self.target.replace(":", ".")

    def exists(self) -> bool:
        """Whether this SGLang has the target."""
        return _resolve(self) is not None

    @property
    def without(self) -> str:
        """What is lost without the hook; "" if kt-moe needs it."""
        return _WITHOUT.get(self.target, "")


def register(hooks: Iterable[Hook]) -> None:
    """Registers hooks with SGLang, which applies them together with those of other plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if not in_effect(hook):
            HookRegistry.register(hook.dotted, hook.function, HookType[hook.kind])


def apply(hooks: Iterable[Hook]) -> None:
    """Applies hooks in a process whose plugins are loaded; hooks in effect stay unchanged.

    Raises OptionError as `verify` does.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    hooks = list(hooks)
    for hook in hooks:
        _refuse_if_taken(hook)
    source = HookSource(_PLUGIN, "kt-moe")
    with _quiet(HookRegistry.__module__), one_sweep():  # it logs a line for each hook
        for hook in hooks:
            if in_effect(hook) or (hook.without and not hook.exists()):
                continue
            try:
                # HookRegistry.apply_hooks skips a target that another plugin has hooked already.
                HookRegistry._apply_target(
                    hook.dotted, [(HookType[hook.kind], hook.function, source)]
                )
            except Exception:
                _logger.exception("kt: the hook on %s cannot be applied", hook.dotted)
    verify(hooks)


@contextmanager
def _quiet(module: str) -> Iterator[None]:
    """Inside, the module's logger logs only warnings and errors."""
    logger = logging.getLogger(module)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def verify(hooks: Iterable[Hook]) -> None:
    """Raises OptionError for the first required hook that is not in effect, or whose target another
    plugin replaces. Logs a warning for optional ones."""
    for hook in hooks:
        _refuse_if_taken(hook)
        if in_effect(hook):
            continue
        if hook.without:
            _logger.warning("kt: the hook on %s is not in effect: %s", hook.dotted, hook.without)
            continue
        raise OptionError(
            f"the hook on {hook.dotted} is not in effect; see SGLang's log. If another plugin "
            "causes this, set SGLANG_PLUGINS to a list without it"
        )


def in_effect(hook: Hook) -> bool:
    """Whether the target, or a function that it wraps, is the hook or calls it: SGLang's wrappers
    hold the hook in their closure, and what they wrap in ``__wrapped__``."""
    found = _resolve(hook)
    while found is not None:
        if any(part is hook.function for part in (found, *_closure(found))):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def _refuse_if_taken(hook: Hook) -> None:
    if hook.kind != "REPLACE":
        return
    others = list(_other_replacements(hook))
    if not others and not in_effect(hook):
        found = _resolve(hook)
        module = getattr(found, "__module__", None)
        if found is not None and module != hook.target.partition(":")[0]:
            others.append(f"code of {module}")
    if others:
        raise OptionError(
            f"both {others[0]} and kt-moe replace {hook.dotted}; choose one of the plugins with "
            "SGLANG_PLUGINS"
        )


def _other_replacements(hook: Hook) -> Iterator[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for kind, function, source in HookRegistry._hooks.get(hook.dotted, ()):
        if kind is HookType.REPLACE and function is not hook.function:
            yield "another plugin" if source is None else f"the plugin {source.plugin_name}"


def _resolve(hook: Hook) -> Any:
    try:
        return pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return None


def _closure(function: Any) -> list[Any]:
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    return found
