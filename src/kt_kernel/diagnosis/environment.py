"""Looks at the variables that begin with KT_."""

from __future__ import annotations

import difflib
import os

from ..serving.flags import ENVIRONMENT_VARIABLE, from_environment
from ..serving.option_table import OptionError
from ..serving.options import KTOptions
from .finding import Finding, note, ok, problem

# Those of docs/options.md, and KT_TOPOLOGY, which tests use.
VARIABLES = (
    ENVIRONMENT_VARIABLE,
    "KT_KERNEL_CPU_VARIANT",
    "KT_KERNEL_DEBUG",
    "KT_KERNEL_KIND",
    "KT_STATS_FILE",
    "KT_TOPOLOGY",
    "KT_TRACE",
    "KT_WATCHDOG_SECONDS",
)


def environment() -> list[Finding]:
    """Of each variable that is set."""
    return [_variable(name) for name in sorted(os.environ) if name.startswith("KT_")]


def _variable(name: str) -> Finding:
    subject, value = "environment", os.environ[name]
    if name not in VARIABLES:
        near = difflib.get_close_matches(name, VARIABLES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return note(subject, f"{name}: kt-moe does not know this variable{hint}")
    if name == ENVIRONMENT_VARIABLE:
        try:
            given = from_environment()
            if given is not None:
                KTOptions.from_mapping(given)
        except OptionError as error:
            return problem(subject, str(error))
    return ok(subject, f"{name}={value}")
