"""The types of an engine's contract: what a plugin relies on in the engine, and how it is checked.

``vllm/contract.py`` and ``sglang/contract.py`` hold the two tables. A table names every function
that the plugin hooks, every name that it imports, every attribute that it reads or sets, and every
configuration value and request that the hybrid layer does not support. Each entry states the engine
versions that it holds for. If the installed engine lacks something that an entry names, a start
with kt options fails. Nothing is assumed to be compatible.
"""

import ast
import dataclasses
import inspect
import logging
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType
from typing import Any, Literal

from kt_kernel.serving.option_table import OptionError

Use = Literal["wrapped", "subclassed", "replaced", "called", "read"]

_ABSENT = object()


@dataclass(frozen=True)
class Name:
    """A module, a module-level name, or an attribute of a class, in the engine's code.

    Attributes:
        target: ``module`` or ``module:attribute.path`` as it is in the engine.
        use: what the plugin does with it.
        why: what it is needed for.
        versions: PEP 440 specifier of the engine versions that are known to have it; "" means all
            supported ones. Only in these versions is its absence an error.
        until: what would let the plugin do without it.
        without: for an optional name, what is lost if it is absent, as a clause for the log; ""
            means that the plugin needs it.
    """

    target: str
    use: Use
    why: str
    versions: str = ""
    until: str = "stays"
    without: str = ""

    def targets(self) -> list[str]:
        return [self.target]


@dataclass(frozen=True)
class Attributes:
    """Attributes of the instances of one class in the engine that the plugin reads or sets.

    Attributes:
        owner: ``module:Class`` as it is in the engine.
        names: the attributes.
        why: what they are needed for.
        versions, without: as in `Name`.
    """

    owner: str
    names: tuple[str, ...]
    why: str
    versions: str = ""
    without: str = ""

    def targets(self) -> list[str]:
        return [f"{self.owner}.{name}" for name in self.names]


@dataclass(frozen=True)
class Refusal:
    """A value of the engine's configuration that the hybrid layer does not support.

    Attributes:
        path: attributes from the configuration object on, separated by dots. A part of it that is
            None has no further attributes: None is then the value.
        accepted: the values that are supported. An enumeration's member counts as its value.
        reason: why others are not, as a clause.
        flag: the command-line flag, if it is not named after the last attribute; or, if there is
            none, what users call the setting.
        versions: as in `Name`.
    """

    path: str
    accepted: tuple[Any, ...]
    reason: str
    flag: str = ""
    versions: str = ""

    @property
    def named(self) -> str:
        """The flag, for messages."""
        return self.flag or "--" + self.path.rpartition(".")[2].replace("_", "-")

    def accepts(self, value: Any) -> bool:
        return value in self.accepted or getattr(value, "value", _ABSENT) in self.accepted

    def check(self, configuration: Any, engine: str) -> None:
        """Raises OptionError, one line, if the value is not accepted or cannot be found."""
        value = configuration
        for name in self.path.split("."):
            if value is None:
                break
            value = getattr(value, name, _ABSENT)
            if value is _ABSENT:
                raise OptionError(
                    f"{engine} has no {self.path}, which kt-moe must check before it starts; "
                    "install a tested version of the engine, or remove the kt options"
                )
        if self.accepts(value):
            return
        flag = self.named
        if isinstance(value, (int, float, str)) and value is not True:
            flag += f" {value}"
        choices = [str(choice) for choice in self.accepted if type(choice) in (int, str)]
        advice = f"accepted: {', '.join(choices)}" if choices else "remove it"
        raise OptionError(f"{flag}: {self.reason}; {advice}")


@dataclass(frozen=True)
class Arguments:
    """The arguments of one engine constructor, with which a model describes what a layer computes.

    An argument in neither list belongs to a version that kt-moe does not know. It is refused unless
    it has its default value.

    Attributes:
        owner: ``module:Class`` as it is in the engine; dataclass fields count as arguments.
        refused: what the layer does not compute. The path is the argument's name; the reason is the
            requested feature, as a noun.
        accepted: arguments that the plugin honours, or that change nothing for the experts.
    """

    owner: str
    refused: tuple[Refusal, ...]
    accepted: tuple[str, ...]

    def check(self, values: Mapping[str, Any], place: str) -> None:
        """Raises ValueError, one line that begins with ``place``, for the first value that the
        layer does not support. values: the arguments given, by name."""
        refused = {entry.path: entry for entry in self.refused}
        for name, value in values.items():
            if name in refused:
                if not refused[name].accepts(value):
                    raise ValueError(
                        f"{place}: {refused[name].reason} is not supported with kt options"
                    )
            elif name not in self.accepted and not _same(value, self.defaults().get(name, _ABSENT)):
                raise ValueError(
                    f"{place}: {self.owner.partition(':')[2]} has {name}={value!r}, which "
                    "kt-moe does not know; install a tested version of the engine, or remove the "
                    "kt options"
                )

    def defaults(self) -> dict[str, Any]:
        """The arguments that the installed engine has, and their default values."""
        owner = _find(self.owner)
        if dataclasses.is_dataclass(owner):
            return {
                field.name: _ABSENT if field.default is dataclasses.MISSING else field.default
                for field in dataclasses.fields(owner)
            }
        return {
            name: _ABSENT if parameter.default is parameter.empty else parameter.default
            for name, parameter in inspect.signature(owner.__init__).parameters.items()
            if name != "self"
        }

    def unknown(self) -> set[str]:
        """The arguments that the installed engine has, and that are in neither list."""
        return set(self.defaults()) - {*self.accepted, *(entry.path for entry in self.refused)}

    def targets(self, contract: "Contract") -> list[str]:
        return [
            f"{self.owner}.{entry.path}" for entry in self.refused if contract.holds(entry.versions)
        ]


@dataclass(frozen=True)
class Operation:
    """A method of a running engine that requests something the hybrid layer does not support.

    Attributes:
        name: the method.
        reason: why it is refused, as a clause.
        versions: as in `Name`.
    """

    name: str
    reason: str
    versions: str = ""


@dataclass(frozen=True)
class Operations:
    """The methods of one class that requests to a running engine can reach.

    A public method in neither list belongs to a version that kt-moe does not know.

    Attributes:
        owner: ``module:Class`` as it is in the engine.
        refused: methods that change, move or write weights.
        accepted: methods that leave the weights alone.
    """

    owner: str
    refused: tuple[Operation, ...]
    accepted: tuple[str, ...]

    def targets(self, contract: "Contract") -> list[str]:
        return [
            f"{self.owner}.{entry.name}" for entry in self.refused if contract.holds(entry.versions)
        ]


@dataclass(frozen=True)
class Contract:
    """The table of one engine.

    Attributes:
        engine: the engine's name, as its users write it.
        package: its import package, which has ``__version__``.
        supported: PEP 440 specifier of the versions that kt-moe supports.
        tested: the tested versions, oldest first, and where the tests ran.
        names, attributes, refusals, arguments, operations: the entries.
    """

    engine: str
    package: str
    supported: str
    tested: Mapping[str, str]
    names: tuple[Name, ...]
    attributes: tuple[Attributes, ...]
    refusals: tuple[Refusal, ...]
    arguments: tuple[Arguments, ...] = ()
    operations: tuple[Operations, ...] = ()

    def version(self) -> str:
        """The version of the installed engine."""
        return str(import_module(self.package).__version__)

    def holds(self, versions: str) -> bool:
        """Whether an entry with this specifier holds for the installed engine.

        A version that is not in PEP 440's form, such as that of a nightly build, counts as the
        newest one: all entries without an upper bound hold for it.
        """
        # A dependency of every engine.
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            version = Version(self.version()).base_version
        except InvalidVersion:
            version = "9999"
        return SpecifierSet(versions, prereleases=True).contains(version)

    def untested(self) -> str:
        """A warning if the installed version is not between two tested ones, else ""."""
        oldest, newest = list(self.tested)[0], list(self.tested)[-1]
        if self.holds(f">={oldest},<={newest}"):
            return ""
        return (
            f"{self.engine} {self.version()} is not tested with kt-moe; tested: "
            f"{', '.join(self.tested)}"
        )

    def lacks(self) -> list[str]:
        """Targets that the plugin needs and the installed engine lacks."""
        needed = [
            target for entry in self._held() if not entry.without for target in entry.targets()
        ]
        others: tuple[Arguments | Operations, ...] = (*self.arguments, *self.operations)
        for more in others:
            needed += more.targets(self)
        return [target for target in needed if not exists(target)]

    def misses(self) -> list[str]:
        """One line for each optional name that the installed engine lacks."""
        return [
            f"this {self.engine} lacks {target}: {entry.without}"
            for entry in self._held()
            if entry.without
            for target in entry.targets()
            if not exists(target)
        ]

    def unknown(self) -> list[str]:
        """One line for each constructor that has arguments which kt-moe does not know."""
        return [
            f"{entry.owner.partition(':')[2]} has arguments that kt-moe does not know: "
            f"{', '.join(sorted(found))}; models that use them are refused"
            for entry in self.arguments
            if (found := entry.unknown())
        ]

    def check(self, logger: logging.Logger) -> None:
        """Called once kt options are known. Raises OptionError, one line, if the installed engine
        lacks what the plugin needs; logs other differences from tested versions."""
        if lacks := self.lacks():
            raise OptionError(
                f"{self.engine} {self.version()} lacks {', '.join(lacks)}, which kt-moe needs; "
                f"install a tested version ({', '.join(self.tested)}), or remove the kt options"
            )
        for line in filter(None, (self.untested(), *self.misses())):
            logger.warning("kt: %s", line)

    def refuse(self, configuration: Any, refusals: Iterable[Refusal] | None = None) -> None:
        """Raises OptionError for the first value that is not accepted or not found.

        refusals: the entries to check; None: all of the contract.
        """
        for entry in self.refusals if refusals is None else refusals:
            if self.holds(entry.versions):
                entry.check(configuration, f"{self.engine} {self.version()}")

    def _held(self) -> Iterator[Name | Attributes]:
        entries: tuple[Name | Attributes, ...] = (*self.names, *self.attributes)
        for entry in entries:
            if self.holds(entry.versions):
                yield entry


def exists(target: str) -> bool:
    """Whether the installed engine has ``module`` or ``module:attribute.path``. The last part of
    the path may be an instance attribute."""
    module, colon, path = target.partition(":")
    parents, _, last = path.rpartition(".")
    try:
        found = _find(f"{module}:{parents}")
    except Exception:  # an import may fail in any way
        return False
    if not colon or hasattr(found, last):
        return True
    # The sources of whole classes take a second, so single methods are tried first.
    return isinstance(found, type) and (
        _stored_by_a_method(found, last) or last in instance_attributes(found)
    )


def _find(target: str) -> Any:
    """``module`` or ``module:attribute.path``; ImportError or AttributeError if there is none."""
    module, _, path = target.partition(":")
    found = import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


@cache
def instance_attributes(owner: type) -> frozenset[str]:
    """The attributes of a class's instances, according to its source: annotated in its body, fields
    of a struct, arguments of its constructor, or assigned to ``self`` in a method, in the class or
    one of its bases."""
    found: set[str] = set()
    for base in owner.__mro__:
        found.update(base.__dict__.get("__annotations__", {}))
        found.update(base.__dict__.get("__struct_fields__", ()))
        found |= _stored_in(base)
    return frozenset(found)


def _stored_by_a_method(owner: type, name: str) -> bool:
    """Whether the source of a method whose code has the name shows that instances have it."""
    for base in owner.__mro__:
        for method in vars(base).values():
            method = getattr(method, "__func__", method)
            if not callable(method):
                continue
            function = inspect.unwrap(method)
            if name in _names(getattr(function, "__code__", None)) and name in _stored_in(function):
                return True
    return False


def _names(code: CodeType | None) -> set[str]:
    """The names in a function, and in those inside it."""
    if code is None:
        return set()
    inside = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names, *code.co_varnames}.union(*inside)


@cache
def _stored_in(owner: Any) -> set[str]:
    """What the source of a class or a function assigns to ``self``, and the arguments of
    constructors."""
    found: set[str] = set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return found
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found.update(argument.arg for argument in node.args.args + node.args.kwonlyargs)
    return found


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return (
        type(value) is type(default) and isinstance(value, (int, float, str)) and value == default
    )
