"""What a plugin relies on in an engine: the types of the two tables, and the checks of them.

``vllm/contract.py`` and ``sglang/contract.py`` hold the tables. A table names every function that
the plugin hooks, every name that it imports or calls, every attribute that it reads, and every
configuration value that the hybrid layer does not support. Each entry states the engine versions
that it holds for. An entry that holds for the installed version and is not there stops a start
with kt options: what cannot be found is never assumed to be fine.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kt_kernel.options import OptionError

Use = Literal["wrapped", "subclassed", "replaced", "called", "read"]

_ABSENT = object()


@dataclass(frozen=True)
class Name:
    """A module-level name, or an attribute of a class, in the engine's code.

    Attributes:
        target: ``module:attribute.path`` as it is in the engine.
        use: what the plugin does with it.
        why: what it is needed for.
        versions: PEP 440 specifier of the engine versions that have it; "" means all supported.
        until: what would let the plugin do without it.
    """

    target: str
    use: Use
    why: str
    versions: str = ""
    until: str = "stays"


@dataclass(frozen=True)
class Attributes:
    """Attributes of the instances of one class in the engine that the plugin reads or sets.

    Attributes:
        owner: ``module:Class`` as it is in the engine.
        names: the attributes.
        why: what they are needed for.
        versions: as in `Name`.
    """

    owner: str
    names: tuple[str, ...]
    why: str
    versions: str = ""


@dataclass(frozen=True)
class Refusal:
    """A value of the engine's configuration that the hybrid layer does not support.

    Attributes:
        path: attributes from the configuration object on, separated by dots.
        accepted: the values that are supported.
        reason: why others are not, as a clause.
        flag: the command-line flag, where it is not named after the last attribute.
        versions: as in `Name`.
    """

    path: str
    accepted: tuple[Any, ...]
    reason: str
    flag: str = ""
    versions: str = ""

    def check(self, configuration: Any, engine: str) -> None:
        """Raises OptionError, one line, if the value is not accepted or cannot be found."""
        value = configuration
        for name in self.path.split("."):
            value = getattr(value, name, _ABSENT)
            if value is _ABSENT:
                raise OptionError(
                    f"{engine} has no {self.path}, which kt-moe must check before it starts; "
                    "install a tested version of the engine, or remove the kt options"
                )
        if value in self.accepted:
            return
        flag = self.flag or "--" + self.path.rpartition(".")[2].replace("_", "-")
        if isinstance(value, (int, float, str)) and value is not True:
            flag += f" {value}"
        choices = [str(choice) for choice in self.accepted if type(choice) in (int, str)]
        advice = f"accepted: {', '.join(choices)}" if choices else "remove it"
        raise OptionError(f"{flag}: {self.reason}; {advice}")


@dataclass(frozen=True)
class Contract:
    """The table of one engine.

    Attributes:
        engine: the engine's name, as its users write it.
        package: its import package, whose ``__version__`` counts.
        supported: PEP 440 specifier of the versions that kt-moe supports.
        tested: the versions that its tests ran with, oldest first, and where they ran.
        names, attributes, refusals: the entries.
    """

    engine: str
    package: str
    supported: str
    tested: dict[str, str]
    names: tuple[Name, ...]
    attributes: tuple[Attributes, ...]
    refusals: tuple[Refusal, ...]

    def version(self) -> str:
        """The version of the installed engine."""
        return str(import_module(self.package).__version__)

    def holds(self, versions: str) -> bool:
        """Whether an entry with this specifier holds for the installed engine.

        A version that is not in PEP 440's form, such as that of a nightly build, counts as the
        newest one: all entries without an upper bound hold for it.
        """
        try:
            version = Version(self.version()).base_version
        except InvalidVersion:
            version = "9999"
        return SpecifierSet(versions, prereleases=True).contains(version)

    def untested(self) -> str:
        """A warning if the installed version is not between two tested ones, else ""."""
        oldest, *_, newest = self.tested
        if self.holds(f">={oldest},<={newest}"):
            return ""
        return (
            f"{self.engine} {self.version()} is not tested with kt-moe; tested: "
            f"{', '.join(self.tested)}"
        )

    def lacks(self) -> list[str]:
        """The names and attributes that the installed engine should have and does not have."""
        return [
            target for entry in self._held() for target in _targets(entry) if not _exists(target)
        ]

    def _held(self) -> Iterator[Name | Attributes]:
        yield from (entry for entry in self.names if self.holds(entry.versions))
        yield from (entry for entry in self.attributes if self.holds(entry.versions))

    def refuse(self, configuration: Any, refusals: Iterable[Refusal] | None = None) -> None:
        """Raises OptionError for the first value that is not accepted, or that cannot be found.

        refusals: those to check; all of the contract's if None.
        """
        for entry in self.refusals if refusals is None else refusals:
            if self.holds(entry.versions):
                entry.check(configuration, f"{self.engine} {self.version()}")


def _targets(entry: Name | Attributes) -> list[str]:
    if isinstance(entry, Name):
        return [entry.target]
    return [f"{entry.owner}.{name}" for name in entry.names]


def _exists(target: str) -> bool:
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        *parents, last = path.split(".")
        for name in parents:
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return hasattr(found, last) or (inspect.isclass(found) and last in instance_attributes(found))


@cache
def instance_attributes(owner: type) -> frozenset[str]:
    """The attributes that instances of a class have by its source: annotated in its body, fields of
    a struct, or assigned to ``self`` in a method, of the class or one of its bases."""
    found: set[str] = set()
    for base in owner.__mro__:
        found.update(base.__dict__.get("__annotations__", {}))
        found.update(base.__dict__.get("__struct_fields__", ()))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                found.add(node.attr)
    return frozenset(found)
