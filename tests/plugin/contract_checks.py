"""Compares a plugin's contract with the installed engine. Imported only in an engine's environment,
by vllm_hooks.py and sglang_hooks.py."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kt_kernel.plugin_entrypoints.contract import Contract, Refusal, _find
from kt_kernel.serving.option_table import OptionError

_OTHER = "a value that no engine has"


def check_table(contract: Contract) -> None:
    """The installed engine, a tested version, has everything that the table names, and the table
    names nothing that it should not."""
    assert contract.lacks() == [], contract.lacks()
    assert contract.misses() == [], contract.misses()
    assert contract.untested() == "", contract.untested()
    assert contract.unknown() == [], contract.unknown()
    for operations in contract.operations:
        known = {*operations.accepted, *(entry.name for entry in operations.refused)}
        found = set(_public_methods(_find(operations.owner)))
        assert found <= known, found - known


def check_flags(contract: Contract, parser: ArgumentParser, refusals: Iterable[Refusal]) -> None:
    """The engine's parser has the flags that refusals name."""
    for entry in refusals:
        for word in entry.named.split() if contract.holds(entry.versions) else ():
            assert not word.startswith("--") or word in parser._option_string_actions, entry


def check_refusals(contract: Contract, configuration: Any) -> None:
    """Every refusal reads an attribute that a real configuration has, and accepts its value. It
    refuses another value, and a configuration without the attribute."""
    for entry in contract.refusals:
        if not contract.holds(entry.versions):
            continue
        entry.check(configuration, contract.engine)
        with changed(configuration, entry.path, _OTHER) as possible:
            if possible:
                line = error_of(entry, configuration)
                assert line.startswith(f"{entry.named} {_OTHER}: "), entry
        renamed = replace(entry, path=f"{entry.path}_of_another_version")
        assert f"has no {renamed.path}" in error_of(renamed, configuration)


def error_of(entry: Refusal, configuration: Any) -> str:
    try:
        entry.check(configuration, "the engine")
    except OptionError as error:
        return str(error)
    raise AssertionError(f"{entry} was not refused")


@contextmanager
def changed(configuration: Any, path: str, value: Any) -> Any:
    """Gives the attribute at ``path`` another value inside. Yields False if it cannot be set."""
    *parents, name = path.split(".")
    owner = configuration
    for parent in parents:
        owner = getattr(owner, parent)
    before = getattr(owner, name)
    if isinstance(inspect.getattr_static(owner, name, None), property):
        yield False
        return
    object.__setattr__(owner, name, value)
    try:
        yield True
    finally:
        object.__setattr__(owner, name, before)


def _public_methods(owner: type) -> Iterable[str]:
    for name in dir(owner):
        if not name.startswith("_") and inspect.isroutine(inspect.getattr_static(owner, name)):
            yield name
