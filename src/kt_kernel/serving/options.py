"""The server options of the hybrid layer: one table, from which the engine plugins make flags.

Independent of the engines. Options travel as a plain mapping ``{"method": "AMXINT8", ...}`` (from
flags, from the engine's Python arguments, or from the environment variable ``KT_CONFIG``).
``KTOptions.from_mapping`` checks the whole mapping before an engine starts work;
`kt_kernel.serving.preflight` then fills in the options that were not given and checks all of them
against the model. An empty mapping counts as given: all options have their defaults.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..weights.methods import METHODS, QUANTISED_TO
from .repository import Repository

ENVIRONMENT_VARIABLE = "KT_CONFIG"
_UNITS = {"MB": 1 << 20, "GB": 1 << 30}
STRATEGIES = ("uniform", "frequency", "front-loading", "random")
ROUTES_TOKENS = 16384  # default of --kt-expert-routes-tokens
AUTO = "auto"  # as a method: chosen by the format of the stored weights
SWITCH = (AUTO, "on", "off")
ENGINE, BF16, PACKED = HOT_FORMATS = ("engine", "bf16", "packed")


class OptionError(ValueError):
    """An invalid option or value; the message is one line that names both."""


@dataclass(frozen=True)
class Option:
    """One server option. ``kind`` is the kind of its value: int, tokens (an int or `AUTO`), ratio,
    size, method, strategy, hot format, path, file, new file, flag, switch (`SWITCH`) or text."""

    flag: str
    kind: str
    help: str
    minimum: int = 0
    why_not: str = ""  # not empty: recognised, but refused with this reason

    @property
    def dest(self) -> str:
        """Attribute in an argparse namespace: ``--kt-method`` is ``kt_method``."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def name(self) -> str:
        """Key in a mapping and field of KTOptions: ``--kt-method`` is ``method``."""
        return self.dest.removeprefix("kt_")

    @property
    def supported(self) -> bool:
        return not self.why_not


OPTIONS: tuple[Option, ...] = (
    Option(
        "--kt-method",
        "method",
        f"format of the cold experts (default {AUTO}: the checkpoint's own format; {QUANTISED_TO} "
        "for 16- and 32-bit weights)",
    ),
    Option(
        "--kt-weight-path",
        "path",
        "where to read the cold experts: a file, a folder, or a repository as org/name[/file]"
        "[@revision] (default: the served model)",
    ),
    Option("--kt-cpuinfer", "int", "CPU threads in total (default: as many as saturate memory)", 1),
    Option("--kt-threadpool-count", "int", "thread pools (default: one per NUMA node in use)", 1),
    Option(
        "--kt-num-gpu-experts",
        "int",
        "hot experts per layer, which stay on the engine's device (default 0)",
    ),
    Option(
        "--kt-gpu-experts-ratio",
        "ratio",
        "hot experts as a fraction of all, from 0 to 1, instead of --kt-num-gpu-experts",
    ),
    Option(
        "--kt-hot-format",
        "hot format",
        f"weights of hot experts: {ENGINE}, as the engine loads them; {BF16}, quantised ones as "
        f"16-bit values; {PACKED}, 4 or 8 bits, on a GPU (default {AUTO}: {ENGINE} for 16-bit "
        f"and FP8 models, {PACKED} for models of 4-bit integers, else {BF16})",
    ),
    Option(
        "--kt-gpu-experts-mask",
        "file",
        "file that names the hot experts of each layer, instead of a number and a strategy",
    ),
    Option(
        "--kt-expert-placement-strategy",
        "strategy",
        "which experts are hot: uniform, the first N of each layer; frequency, the most used ones "
        "of --kt-expert-stats; front-loading, all experts of the first layers; random, N of each "
        "layer (default frequency with --kt-expert-stats, else uniform)",
    ),
    Option(
        "--kt-expert-stats",
        "file",
        "statistics that --record-kt-gpu-expert-distribution wrote, for --kt-expert-placement-"
        "strategy frequency",
    ),
    Option(
        "--record-kt-gpu-expert-distribution",
        "new file",
        "file to which the server writes how often each expert was selected",
    ),
    Option(
        "--record-kt-expert-routes",
        "new file",
        "file to which the server writes the experts of each token",
    ),
    Option(
        "--kt-expert-routes-tokens",
        "int",
        f"tokens after which --record-kt-expert-routes ends (default {ROUTES_TOKENS})",
        1,
    ),
    Option(
        "--kt-max-deferred-experts-per-token",
        "int",
        "experts per token, those with the lowest router weights, that may be added one MoE layer "
        "later (default 0: off)",
    ),
    Option(
        "--kt-expert-lora-path",
        "path",
        "folder or repository with a LoRA adapter of the experts, as PEFT saves it; it is merged "
        "into the weights while they load (default: none)",
    ),
    Option("--kt-allow-untested", "flag", "serve model classes that are not on the tested list"),
    Option(
        "--kt-numa-nodes",
        "text",
        "NUMA nodes to use",
        why_not="pools use all allowed NUMA nodes; remove it, or start the server under numactl",
    ),
    Option(
        "--kt-gpu-prefill-token-threshold",
        "tokens",
        "tokens in a batch from which cold experts are copied to the GPU and computed there, "
        f"shared with the CPU; 0: never (default {AUTO}: measured at the start)",
    ),
    Option(
        "--kt-gpu-prefill-memory",
        "size",
        "memory on the GPU for experts that are copied there, such as 1536MB or 2GB (default: 1GB, "
        "or an eighth of what the engine has left)",
    ),
    Option(
        "--kt-enable-dynamic-expert-update",
        "switch",
        f"move experts between the CPU and the GPU while serving: {AUTO}, on or off; without a "
        f"value on. {AUTO}: where it is possible (default off)",
    ),
    Option(
        "--kt-expert-update-rate",
        "size",
        "bytes per second that experts moving to the GPU may take of the bus, such as 8GB (default "
        "a quarter of what is measured)",
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class KTOptions:
    """Checked options. None means not given: the layer selects a value and logs it.

    `kt_kernel.serving.preflight.prepare` replaces the method `AUTO` by the one that it selects
    (``reason`` then states why), the hot format `AUTO` likewise if experts are hot, and
    repositories in the paths by their local folders.
    """

    method: str = AUTO
    weight_path: str | None = None
    cpuinfer: int | None = None
    threadpool_count: int | None = None
    num_gpu_experts: int | None = None
    gpu_experts_ratio: float | None = None
    gpu_experts_mask: str | None = None
    hot_format: str = AUTO
    expert_placement_strategy: str | None = None
    expert_stats: str | None = None
    record_kt_gpu_expert_distribution: str | None = None
    record_kt_expert_routes: str | None = None
    expert_routes_tokens: int | None = None
    max_deferred_experts_per_token: int | None = None
    expert_lora_path: str | None = None
    gpu_prefill_token_threshold: int | str | None = None  # tokens, or AUTO, the default
    gpu_prefill_memory: int | None = None  # bytes
    enable_dynamic_expert_update: str | None = None  # one of `SWITCH`
    expert_update_rate: int | None = None  # bytes per second
    allow_untested: bool = False
    reason: str = field(default="", compare=False)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "KTOptions":
        """Checks a mapping of option names to values (strings are converted).

        A name may be spelled ``method``, ``kt_method`` or ``--kt-method``. A value of None counts
        as not given. Raises OptionError, one line, for an unknown or refused option or a bad value.
        """
        if not isinstance(mapping, Mapping):
            raise OptionError(
                f"kt options {mapping!r}: expected a mapping of option names to values"
            )
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            option = _find(key)
            if value is None:
                continue
            if option.name in values:
                raise OptionError(f"{option.flag} is given twice")
            values[option.name] = _checked(option, value)
        options = cls(**values)
        options._check_placement()
        if options.hot_format != AUTO and options.hot_option is None:
            raise OptionError(
                f"--kt-hot-format {options.hot_format}: no expert is hot; add "
                "--kt-num-gpu-experts, --kt-gpu-experts-ratio or --kt-gpu-experts-mask, or remove "
                "this"
            )
        if options.gpu_prefill_memory is not None and options.gpu_prefill_token_threshold == 0:
            raise OptionError(
                "--kt-gpu-prefill-memory: with --kt-gpu-prefill-token-threshold 0 no expert is "
                "copied to the GPU; remove one of them"
            )
        options._check_moving()
        threads, pools = options.cpuinfer, options.threadpool_count
        if threads is not None and pools is not None and threads < pools:
            raise OptionError(
                f"--kt-cpuinfer {threads}: fewer threads than pools; accepted: at least "
                f"{pools} (--kt-threadpool-count {pools})"
            )
        return options

    def to_mapping(self) -> dict[str, Any]:
        """The values that differ from the defaults; from_mapping gives the same options back."""
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.compare and getattr(self, option.name) != option.default
        }

    def _check_placement(self) -> None:
        """Raises OptionError if options of the placement or of recording contradict each other."""
        number, ratio, mask = self.num_gpu_experts, self.gpu_experts_ratio, self.gpu_experts_mask
        strategy, stats = self.expert_placement_strategy, self.expert_stats
        given = [
            f"--kt-{name} {value}"
            for name, value in (
                ("num-gpu-experts", number),
                ("gpu-experts-ratio", ratio),
                ("gpu-experts-mask", mask),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise OptionError(f"{given[0]} and {given[1]}: give only one of them")
        if stats is not None and self.strategy != "frequency":
            raise OptionError(
                f"--kt-expert-stats {stats}: --kt-expert-placement-strategy {strategy} does not "
                "use statistics; accepted: frequency"
            )
        if strategy == "frequency" and stats is None:
            raise OptionError(
                "--kt-expert-placement-strategy frequency needs --kt-expert-stats: a file that "
                "--record-kt-gpu-expert-distribution wrote"
            )
        if strategy is not None or stats is not None:
            which = f"--kt-expert-placement-strategy {strategy}"
            if strategy is None:
                which = f"--kt-expert-stats {stats}"
            if mask is not None:
                raise OptionError(f"{which} and {given[0]}: give only one of them")
            if not given:
                raise OptionError(
                    f"{which}: without --kt-num-gpu-experts or --kt-gpu-experts-ratio no expert "
                    "is hot; add one of them"
                )
        counts, routes = self.record_kt_gpu_expert_distribution, self.record_kt_expert_routes
        if counts and routes and os.path.realpath(counts) == os.path.realpath(routes):
            raise OptionError(
                f"--record-kt-gpu-expert-distribution and --record-kt-expert-routes {routes}: give "
                "two different files"
            )
        if self.expert_routes_tokens is not None and self.record_kt_expert_routes is None:
            raise OptionError(
                f"--kt-expert-routes-tokens {self.expert_routes_tokens}: without "
                "--record-kt-expert-routes no routes are recorded; add that, or remove this"
            )

    def _check_moving(self) -> None:
        """Raises OptionError for options that cannot be combined with moving experts."""
        if not self.moves_experts:
            if self.expert_update_rate is not None:
                raise OptionError(
                    "--kt-expert-update-rate: without --kt-enable-dynamic-expert-update no expert "
                    "moves; add that, or remove this"
                )
            return
        flag = f"--kt-enable-dynamic-expert-update {self.enable_dynamic_expert_update}"
        if not self.hot_option:
            raise OptionError(
                f"{flag}: no expert is hot; add --kt-num-gpu-experts, --kt-gpu-experts-ratio or "
                "--kt-gpu-experts-mask, which say how many slots there are"
            )
        if self.expert_lora_path is not None:
            raise OptionError(
                f"{flag} and --kt-expert-lora-path {self.expert_lora_path}: not supported together"
            )

    @property
    def moves_experts(self) -> bool:
        """Whether experts are to move while serving."""
        return self.enable_dynamic_expert_update in (AUTO, "on")

    @property
    def given_threshold(self) -> int | None:
        """The number of tokens from which batches are to be streamed; None if it is measured."""
        tokens = self.gpu_prefill_token_threshold
        return tokens if isinstance(tokens, int) else None

    @property
    def strategy(self) -> str:
        """The strategy of placement: the one given, or that which follows from the others."""
        default = "uniform" if self.expert_stats is None else "frequency"
        return self.expert_placement_strategy or default

    @property
    def records(self) -> bool:
        """Whether statistics or routes are written to a file."""
        files = self.record_kt_gpu_expert_distribution, self.record_kt_expert_routes
        return any(path is not None for path in files)

    @property
    def hot_option(self) -> str | None:
        """The option that asks for hot experts, with its value; None if none does."""
        for name in ("num_gpu_experts", "gpu_experts_ratio", "gpu_experts_mask"):
            if value := getattr(self, name):
                return f"--kt-{name.replace('_', '-')} {value}"
        return None

    @property
    def reads_hot(self) -> bool:
        """Whether kt-moe reads the hot experts, too, instead of the engine."""
        return self.hot_format in (BF16, PACKED) and self.weight_path is not None

    def hot_count(self, num_experts: int) -> int:
        """Hot experts of a layer with num_experts, on average if layers may differ. Rounded down.
        OptionError if the layer has fewer than requested."""
        if self.gpu_experts_ratio is not None:
            return self.share_of(num_experts)
        hot = self.num_gpu_experts or 0
        if hot > num_experts:
            raise OptionError(
                f"--kt-num-gpu-experts {hot}: the model has {num_experts} experts per layer; "
                f"accepted: 0 to {num_experts}"
            )
        return hot

    def share_of(self, experts: int) -> int:
        """The ratio of this many experts, rounded down; 0.29 of 100 are 29."""
        return int((self.gpu_experts_ratio or 0) * experts + 1e-9)

    def _hot(self) -> str:
        if self.gpu_experts_mask is not None:
            return f"of {self.gpu_experts_mask}"
        of = f", {self.strategy}" + (f" by {self.expert_stats}" if self.expert_stats else "")
        if self.hot_format in (BF16, PACKED):
            of += f", {'packed' if self.hot_format == PACKED else 'in 16 bits'}"
        if self.gpu_experts_ratio is not None:
            return f"{self.gpu_experts_ratio:.1%} of all{of}"
        number = self.num_gpu_experts
        return "per layer 0 (not given)" if number is None else f"per layer {number}{of}"

    def describe(self) -> str:
        """One line for the log: every option, and whether its value was given or chosen."""

        def shown(value: int | None, default: str) -> str:
            return f"{default} (not given)" if value is None else str(value)

        adapter = self.expert_lora_path
        method = f"{self.method} ({AUTO}: {self.reason})" if self.reason else self.method
        tokens = self.gpu_prefill_token_threshold
        number = "a measured number of" if tokens == AUTO else tokens
        moving = f"experts move ({self.enable_dynamic_expert_update}), " * self.moves_experts
        streamed = f"experts streamed from {number} tokens on, " if tokens else ""
        return (
            f"kt: method {method}, hot experts {self._hot()}, "
            f"threads {shown(self.cpuinfer, 'by probe')}, "
            f"pools {shown(self.threadpool_count, 'one per NUMA node')}, "
            f"deferred experts per token {shown(self.max_deferred_experts_per_token, '0')}, "
            f"{streamed}{moving}"
            f"cold weights from {self.weight_path or 'the served checkpoint'}"
            f"{'' if adapter is None else f', adapter {adapter}'}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> dict[str, Any]:
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
    try:
        value = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{ENVIRONMENT_VARIABLE} {text!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE} {text!r}: expected a JSON object of option names and values, "
            'such as {"method": "AMXINT8", "num_gpu_experts": 4}'
        )
    return value


def exit_with(error: Exception) -> SystemExit:
    """To be raised: prints one line to stderr and ends the process with code 1."""
    return SystemExit("kt: error: " + " ".join(str(error).split()))


def _find(key: str) -> Option:
    name = str(key).lstrip("-").replace("-", "_")
    option = _BY_NAME.get(name.removeprefix("kt_")) or _BY_NAME.get(name)
    if option is None:
        raise OptionError(
            f"unknown kt option {key!r}; accepted: "
            + ", ".join(option.name for option in OPTIONS if option.supported)
        )
    return option


def _parser(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return _checked(option, text)
        except OptionError as error:
            raise exit_with(error) from None  # argparse does not catch SystemExit

    return parse


def _checked(option: Option, value: Any) -> Any:
    flag = option.flag
    if not option.supported:
        raise OptionError(f"{flag} is not supported by this version: {option.why_not}")
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise OptionError(f"{flag} {value!r}: expected true or false")
        return value
    if option.kind == "switch":
        return _switch(flag, value)
    if option.kind == "tokens" and value == AUTO:
        return AUTO
    if option.kind in ("int", "tokens"):
        try:
            number = None if isinstance(value, (bool, float)) else int(value)
        except (TypeError, ValueError):
            number = None
        if number is None or not option.minimum <= number < 2**31:
            accepted = f" or {AUTO}" if option.kind == "tokens" else ""
            raise OptionError(
                f"{flag} {value}: expected an integer of at least {option.minimum}{accepted}"
            )
        return number
    if option.kind == "ratio":
        return _ratio(flag, value)
    if option.kind == "size":
        return _bytes_of(flag, value)
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{flag} {value!r}: expected text")
    text = os.fspath(value)
    if option.kind == "path":
        _check_exists(flag, text)
    if option.kind == "file" and not os.path.isfile(text):
        raise OptionError(f"{flag} {text}: no such file")
    if option.kind == "new file":
        _check_writable(flag, text)
    if option.kind == "strategy" and text not in STRATEGIES:
        raise OptionError(f"{flag} {text}: unknown; accepted: {', '.join(STRATEGIES)}")
    if option.kind == "hot format" and text not in (AUTO, *HOT_FORMATS):
        raise OptionError(f"{flag} {text}: unknown; accepted: {', '.join((AUTO, *HOT_FORMATS))}")
    if option.kind == "method" and text not in (AUTO, *METHODS):
        accepted = ", ".join((AUTO, *METHODS))
        raise OptionError(f"{flag} {text}: unknown method; accepted: {accepted}")
    return text


def _switch(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value not in SWITCH:
        raise OptionError(f"{flag} {value}: expected {', '.join(SWITCH)}")
    return str(value)


def _bytes_of(flag: str, value: Any) -> int:
    """A size in bytes: an integer of bytes, or a number with a unit."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = (
        re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB)", value.strip()) if isinstance(value, str) else None
    )
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 0 < size < 2**50:
        raise OptionError(f"{flag} {value}: expected a size in MB or GB, such as 1536MB or 2GB")
    return size


def _ratio(flag: str, value: Any) -> float:
    try:
        ratio = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise OptionError(f"{flag} {value}: expected a number from 0 to 1")
    return ratio


def _check_writable(flag: str, text: str) -> None:
    folder = os.path.dirname(os.path.abspath(text)) if text else ""
    if not os.path.isdir(folder):
        raise OptionError(f"{flag} {text}: its folder does not exist")
    if os.path.exists(text) and not os.path.isfile(text):
        raise OptionError(f"{flag} {text}: exists and is not a file")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{flag} {text}: its folder cannot be written to")


def _check_exists(flag: str, text: str) -> None:
    try:
        found = bool(text) and Path(text).exists()
    except (OSError, ValueError) as error:  # a name that is too long, an unreadable folder
        raise OptionError(f"{flag} {text}: {getattr(error, 'strerror', None) or error}") from None
    if not found and Repository.parse(text) is None:
        raise OptionError(
            f"{flag} {text}: no such file or folder, and not a repository name (org/name)"
        )


def _help(option: Option) -> str:
    return option.help if option.supported else f"not supported yet: {option.why_not}"
