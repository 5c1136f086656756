"""The contracts with the engines: how they are checked, and that the plugins keep to them.

That an installed engine keeps to them is checked inside its environment, see contract_checks.py.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import collections
import functools
import gc
import inspect
import io
import json
import logging
import multiprocessing.process
import os
import pkgutil
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

import kt_kernel
from kt_kernel import plugin_entrypoints
from kt_kernel.plugin_entrypoints.contract import (
    Arguments,
    Attributes,
    Contract,
    Name,
    Operation,
    Operations,
    Refusal,
    exists,
)
from kt_kernel.plugin_entrypoints.installed import differences
from kt_kernel.plugin_entrypoints.sglang.contract import BESIDE_COLD
from kt_kernel.plugin_entrypoints.sglang.contract import CONTRACT as SGLANG
from kt_kernel.plugin_entrypoints.vllm.contract import CONTRACT as VLLM
from kt_kernel.serving.option_table import OptionError

_log = logging.getLogger("kt test")
_PLUGINS = Path(plugin_entrypoints.__file__).parent

# ---- the checks, on the standard library in place of an engine


@dataclass
class Shape:
    """What an engine's model may ask of a layer."""

    size: int
    beta: float = 0.0
    gamma: float | None = None


SHAPE = f"{__name__}:Shape"


def concealing(method: Any) -> Any:
    """A decorator that does not say what it wraps."""
    return lambda self: method(self)


class Made:
    """Instances get attributes in several ways."""

    noted: int

    def __init__(self, given: int, *, only: int = 0) -> None:
        self.given = given

    def stores(self) -> None:
        self.one, self.other = 1, 2

    def stores_later(self) -> Any:
        def inside() -> None:
            self.inner = 1

        return inside

    @functools.lru_cache  # noqa: B019 - never called
    def wrapped(self) -> None:
        self.cached = 1

    @concealing
    def concealed(self) -> None:
        self.hidden = 1

    def reads(self) -> Any:
        return self.read  # type: ignore[attr-defined]


class Heir(Made):
    def more(self) -> None:
        self.own = 1


HEIR = f"{__name__}:Heir"
OF_HEIRS = "noted given only one other inner cached hidden own"


def contract(**entries: Any) -> Contract:
    made = Contract("JSON", "json", ">=2", {"2.0.0": "", "2.0.9": ""}, (), (), ())
    return replace(made, **entries)


@pytest.mark.parametrize(
    ("target", "there"),
    [
        ("json", True),
        ("json.encoder", True),
        ("json.missing", False),
        ("json:dumps", True),
        ("json:JSONEncoder.encode", True),
        ("json:JSONEncoder.sort_keys", True),  # set in __init__
        ("json:JSONEncoder.missing", False),
        ("json:Missing.encode", False),
        (f"{SHAPE}.beta", True),
        (f"{SHAPE}.size", True),
        *((f"{HEIR}.{name}", True) for name in OF_HEIRS.split()),
        (f"{HEIR}.read", False),
    ],
)
def test_existence(target: str, there: bool) -> None:
    assert exists(target) == there


def test_what_is_needed_and_absent_is_an_error() -> None:
    made = contract(
        names=(Name("json:dumps", "called", "x"), Name("json:dumped", "called", "x")),
        attributes=(Attributes("json:JSONEncoder", ("indent", "margin"), "x"),),
        arguments=(Arguments(SHAPE, (Refusal("alpha", (None,), "an alpha"),), ()),),
        operations=(Operations("json:JSONDecoder", (Operation("undecode", "x"),), ()),),
    )
    lacks = [
        "json:dumped",
        "json:JSONEncoder.margin",
        f"{SHAPE}.alpha",
        "json:JSONDecoder.undecode",
    ]
    assert made.lacks() == lacks
    with pytest.raises(OptionError) as caught:
        made.check(_log)
    assert str(caught.value) == (
        f"JSON {json.__version__} lacks {', '.join(lacks)}, which kt-moe needs; install a tested "
        "version (2.0.0, 2.0.9), or remove the kt options"
    )


def test_arguments_that_no_tested_version_has() -> None:
    """What `kt doctor` is told of them, and of the rest."""
    made = contract(
        names=(Name("json:dumped", "called", "x", without="it is slower"),),
        arguments=(Arguments(SHAPE, (Refusal("beta", (0.0,), "a beta"),), ("size",)),),
    )
    unknown = (
        "Shape has arguments that kt-moe does not know: gamma; models that use them are refused"
    )
    assert made.unknown() == [unknown]
    assert differences(made) == {
        "version": json.__version__,
        "lacks": [],
        "notes": ["this JSON lacks json:dumped: it is slower", unknown],
    }
    made = contract(names=(Name("json:dumped", "called", "x"),), arguments=made.arguments)
    assert differences(made) == {"version": json.__version__, "lacks": ["json:dumped"], "notes": []}


def test_what_can_be_done_without_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    contract(
        names=(Name("json:dumped", "called", "x", without="it is slower"),),
        attributes=(Attributes("json:JSONEncoder", ("margin",), "x", without="less is known"),),
    ).check(_log)
    assert [record.getMessage() for record in caplog.records] == [
        "kt: this JSON lacks json:dumped: it is slower",
        "kt: this JSON lacks json:JSONEncoder.margin: less is known",
    ]


@pytest.mark.parametrize(
    ("version", "lacks", "untested"),
    [
        ("2.0.0", [], False),
        ("2.0.9+cpu", ["json:dumped"], False),
        ("2.0.10", ["json:dumped"], True),
        ("1.9", [], True),
        ("3.0.dev1+g123", ["json:dumped"], True),
        ("nightly", ["json:dumped"], True),  # as the newest one
    ],
)
def test_entries_hold_for_versions(
    version: str,
    lacks: list[str],
    untested: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(json, "__version__", version)
    made = contract(names=(Name("json:dumped", "called", "x", ">=2.0.5"),))
    assert made.lacks() == lacks
    contract().check(_log)
    said = f"kt: JSON {version} is not tested with kt-moe; tested: 2.0.0, 2.0.9"
    assert (said in caplog.text) == untested


@pytest.mark.parametrize(
    ("path", "accepted", "line"),
    [
        ("beta", (0.0,), ""),
        ("beta", (1.0,), "--beta 0.0: it cannot be; remove it"),
        ("beta", (1, "auto"), "--beta 0.0: it cannot be; accepted: 1, auto"),
        ("gamma", (None,), ""),
        ("size", (1,), "--size 3: it cannot be; accepted: 1"),
        ("size.real", (3,), ""),
        ("gamma.delta", (None, 1), ""),  # a part that was not given
        ("gamma.delta", (1,), "--delta: it cannot be; accepted: 1"),
        ("delta", (None,), "JSON has no delta, which kt-moe must check before it starts; install"),
        ("beta.delta", (None,), "JSON has no beta.delta, which kt-moe must check"),
    ],
)
def test_a_value_is_refused(path: str, accepted: tuple, line: str) -> None:
    """One that cannot be found, too."""
    entry = Refusal(path, accepted, "it cannot be")
    if not line:
        entry.check(Shape(3), "JSON")
        return
    with pytest.raises(OptionError) as caught:
        entry.check(Shape(3), "JSON")
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"size": 3, "beta": 0.0}, ""),
        ({"size": 3, "beta": 1.0}, "layer 1: a beta is not supported with kt options"),
        ({"gamma": None}, ""),  # not known, and its default
        ({"gamma": 0.5}, "layer 1: Shape has gamma=0.5, which kt-moe does not know; install"),
        ({"delta": None}, "layer 1: Shape has delta=None, which kt-moe does not know"),
    ],
)
def test_an_argument_is_refused(given: dict[str, Any], line: str) -> None:
    known = Arguments(SHAPE, (Refusal("beta", (0.0,), "a beta"),), ("size",))
    if not line:
        known.check(given, "layer 1")
        return
    with pytest.raises(ValueError) as caught:
        known.check(given, "layer 1")
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


# ---- the tables, against the plugins' source


@dataclass(frozen=True)
class Plugin:
    contract: Contract
    more: tuple[Refusal, ...] = ()

    @property
    def package(self) -> str:
        return self.contract.package

    def files(self) -> list[Path]:
        found = sorted((_PLUGINS / self.package).glob("*.py"))
        assert len(found) > 3
        return [path for path in found if path.name != "contract.py"]

    def targets(self) -> set[str]:
        entries = (*self.contract.names, *self.contract.attributes)
        found = {target for entry in entries for target in entry.targets()}
        for arguments in self.contract.arguments:
            found |= {f"{arguments.owner}.{entry.path}" for entry in arguments.refused}
        for operations in self.contract.operations:
            found |= {f"{operations.owner}.{entry.name}" for entry in operations.refused}
        return found


PLUGINS = [Plugin(VLLM), Plugin(SGLANG, BESIDE_COLD)]
by_package = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.package)


@by_package
def test_the_table_is_well_formed(plugin: Plugin) -> None:
    entries = (*plugin.contract.names, *plugin.contract.attributes)
    for entry in entries:
        ours = (f"{plugin.package}.", f"torch:ops.{plugin.package}.")
        assert entry.why and all(target.startswith(ours) for target in entry.targets())
    targets = [target for entry in entries for target in entry.targets()]
    assert len(targets) == len(set(targets))
    paths = [entry.path for entry in (*plugin.contract.refusals, *plugin.more)]
    assert len(paths) == len(set(paths))


@by_package
def test_every_import_of_an_engine_is_in_the_table(plugin: Plugin) -> None:
    targets = plugin.targets()
    for path in plugin.files():
        for name in _imports(path, plugin.package):
            used = any(f"{target}.".startswith((f"{name}.", f"{name}:")) for target in targets)
            assert used, f"{path.name}: {name}"


@by_package
def test_every_hooked_name_is_in_the_table(plugin: Plugin) -> None:
    """Those that the plugin spells as text."""
    targets = {target.replace(":", ".") for target in plugin.targets()}
    for path in plugin.files():
        for text in _texts(path):
            if text == f"{plugin.package}.kt":  # our logger
                continue
            names = text.split(".")
            if names[0] == plugin.package and len(names) > 1 and all(map(str.isidentifier, names)):
                assert any(f"{target}.".startswith(f"{text}.") for target in targets), text


@by_package
def test_every_attribute_of_an_engine_is_in_the_table(plugin: Plugin) -> None:
    """Attributes that neither our code nor Python nor torch has must be the engine's."""
    known = {part for target in plugin.targets() for part in target.partition(":")[2].split(".")}
    for entry in (*plugin.contract.refusals, *plugin.more):
        known |= set(entry.path.split("."))
    missing = {
        (path.name, name)
        for path in plugin.files()
        for name in _attributes(path) - known - _not_an_engine()
        if not name.lstrip("_").startswith("kt_")  # what we set on an engine's objects
    }
    assert not missing, sorted(missing)


def _imports(path: Path, package: str) -> Iterator[str]:
    """``module`` or ``module:name`` of all imports from the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _top(alias.name) == package)
        elif isinstance(node, ast.ImportFrom) and not node.level and _top(node.module) == package:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                named = any(t.partition(":")[0] == module for p in PLUGINS for t in p.targets())
                yield module if named else f"{node.module}:{alias.name}"


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _texts(path: Path) -> Iterator[str]:
    """Texts in a module; in f-strings, with the names that are assigned a text put in."""
    tree = ast.parse(path.read_text())
    values = {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else values.get(_name(part.value), "?")
                for part in node.values
            )
            yield "".join(map(str, parts))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _attributes(path: Path) -> set[str]:
    """Names of attributes that a module reads or sets, also by getattr and the like."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and _name(node.func) in ("getattr", "hasattr", "setattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            found.add(str(node.args[1].value))
    return found


@functools.cache
def _not_an_engine() -> frozenset[str]:
    """Attributes of Python's and torch's objects, and every name that our own code defines."""
    found = set(dir(torch)) | set(dir(types)) | {"__wrapped__"}
    found |= {"Context", "destroy"}  # of zmq
    for owner in (
        *(argparse.ArgumentParser, argparse.Namespace, BaseException, Path, logging.Logger),
        *(inspect.BoundArguments, inspect.Parameter, inspect.Signature, types.FunctionType),
        *(types.MethodType, collections.namedtuple("Row", ()), torch.nn.Module, torch.Tensor),
        *(dict, list, set, str, tuple, type),
        *(
            ast,
            builtins,
            functools,
            gc,
            inspect,
            json,
            logging,
            os,
            pkgutil,
            signal,
            sys,
            threading,
        ),
        weakref,
        *(multiprocessing, multiprocessing.process, multiprocessing.Process, torch.cuda),
        *(io.TextIOWrapper, types.CellType, PretrainedConfig()),
    ):
        found |= set(dir(owner))
    roots = (Path(kt_kernel.__file__).parent, _PLUGINS)
    for path in {file for root in roots for file in root.rglob("*.py")}:
        if path.parent.parent == _PLUGINS and path.name == "contract.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found.add(target.id)
                    elif isinstance(target, ast.Attribute) and _name(target.value) == "self":
                        found.add(target.attr)
    return frozenset(found)
