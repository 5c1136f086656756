"""Server options as flags of an engine's parser, and from the environment variable KT_CONFIG."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from .option_table import OPTIONS, SWITCH, Option, OptionError
from .option_values import checked_value

ENVIRONMENT_VARIABLE = "KT_CONFIG"


def add_arguments(parser: argparse.ArgumentParser, *, negated: bool = False) -> dict[str, Any]:
    """Adds the options to an engine's parser.

    A flag that the parser already has is taken over: its default becomes None, so that a value
    equal to the engine's default still counts as given. An invalid value ends the process during
    parsing with one line, without argparse's usage page. Returns the engine's defaults of the flags
    taken over, by namespace attribute, for `restore_defaults`.
    """
    group = parser.add_argument_group(
        "kt-moe", "hot experts on the device, cold experts on the CPU"
    )
    known = parser._option_string_actions
    replaced: dict[str, Any] = {}
    for option in OPTIONS:
        action = known.get(option.flag)
        if action is not None:
            replaced[action.dest] = action.default
        if action is not None and option.kind == "switch":  # an engine's flag may take no value
            parser._handle_conflict_resolve(action, [(option.flag, action)])
            action = None
        if action is not None:
            action.default = action.choices = None
            action.help = _help(option)
            if option.kind != "flag":
                action.type = _parser(option)
        elif option.kind == "flag":
            group.add_argument(
                option.flag, dest=option.dest, action="store_true", default=None, help=_help(option)
            )
        else:
            switch = option.kind == "switch"
            if switch and negated:
                group.add_argument(
                    option.flag.replace("--", "--no-", 1),
                    dest=option.dest,
                    action="store_const",
                    const="off",
                    default=None,
                    help=f"the same as {option.flag} off",
                )
            group.add_argument(
                option.flag,
                dest=option.dest,
                type=_parser(option),
                default=None,
                help=_help(option),
                metavar="{" + ",".join(SWITCH) + "}" if switch else option.kind.split()[-1].upper(),
                nargs="?" if switch else None,
                const="on" if switch else None,
            )
    return replaced


def collect(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options given on the command line, by option name, unchecked; {} if there are none."""
    return {
        option.name: getattr(namespace, option.dest)
        for option in OPTIONS
        if getattr(namespace, option.dest, None) is not None
    }


def restore_defaults(namespace: argparse.Namespace, replaced: Mapping[str, Any]) -> None:
    """Resets flags that `add_arguments` took over and that were not given to the engine's
    defaults."""
    for dest, default in replaced.items():
        if getattr(namespace, dest, None) is None:
            setattr(namespace, dest, default)


def from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The options in KT_CONFIG, unchecked; None if it is unset or empty.

    "{}" counts as given: it turns the hybrid layer on with all options at their defaults, like an
    engine's ``additional_config={"kt": {}}``. Raises OptionError if it is not a JSON object.
    """
    text = environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None
    place = f"{ENVIRONMENT_VARIABLE} {text[:200]!r}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{place}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise OptionError(
            f"{place}: expected a JSON object of option names and values, "
            'such as {"method": "AMXINT8", "num_gpu_experts": 4}'
        )
    return value


def exit_with(error: Exception) -> SystemExit:
    """To be raised: prints one line to stderr and ends the process with code 1."""
    return SystemExit("kt: error: " + " ".join(str(error).split()))


def _parser(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return checked_value(option, text)
        except OptionError as error:
            raise exit_with(error) from None  # argparse does not catch SystemExit

    return parse


def _help(option: Option) -> str:
    return option.help if option.supported else f"not supported yet: {option.why_not}"
