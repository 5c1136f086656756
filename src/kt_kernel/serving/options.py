"""The server options of the hybrid layer: one table, from which the engine plugins make flags.

Independent of the engines. Options travel as a plain mapping ``{"method": "AMXINT8", ...}`` (from
flags, from the engine's Python arguments, or from the environment variable ``KT_CONFIG``).
``KTOptions.from_mapping`` checks the whole mapping before an engine starts work;
`kt_kernel.serving.preflight` then fills in the options that were not given and checks all of them
against the model. An empty mapping counts as given: all options have their defaults.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..runtime.text import shown_size
from .option_table import AUTO, BF16, HOT_OPTIONS, PACKED, OptionError, find_option
from .option_values import checked_value


@dataclass(frozen=True)
class KTOptions:
    """Checked options. None means not given: the layer selects a value and logs it.

    `kt_kernel.serving.preflight.prepare` replaces the method `AUTO` by the one that it selects
    (``reason`` then states why), the hot format `AUTO` likewise if experts are hot, a memory for
    hot experts by the ratio that fits into it, and repositories in the paths by their local
    folders. ``from_tuned`` says which options were taken from what `kt tune` saved, and why others
    were not.
    """

    method: str = AUTO
    weight_path: str | None = None
    cpuinfer: int | None = None
    threadpool_count: int | None = None
    num_gpu_experts: int | None = None
    gpu_experts_ratio: float | None = None
    gpu_experts_memory: int | None = None  # bytes on each rank
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
    tuned: str | None = None  # one of `SWITCH`; None is `AUTO`
    allow_untested: bool = False
    from_tuned: str = field(default="", compare=False)
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
            option = find_option(key)
            if value is None:
                continue
            if option.name in values:
                raise OptionError(f"{option.flag} is given twice")
            values[option.name] = checked_value(option, value)
        options = cls(**values)
        options._check_placement()
        if options.hot_format != AUTO and options.hot_option is None:
            raise OptionError(
                f"--kt-hot-format {options.hot_format}: no expert is hot; add "
                "--kt-num-gpu-experts, --kt-gpu-experts-ratio, --kt-gpu-experts-memory or "
                "--kt-gpu-experts-mask, or remove this"
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
        strategy, stats = self.expert_placement_strategy, self.expert_stats
        given = [self._shown(name) for name in HOT_OPTIONS if getattr(self, name) is not None]
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
            if self.gpu_experts_mask is not None:
                raise OptionError(f"{which} and {given[0]}: give only one of them")
            if not given:
                raise OptionError(
                    f"{which}: without --kt-num-gpu-experts, --kt-gpu-experts-ratio or "
                    "--kt-gpu-experts-memory no expert is hot; add one of them"
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
                f"{flag}: no expert is hot; add --kt-num-gpu-experts, --kt-gpu-experts-ratio, "
                "--kt-gpu-experts-memory or --kt-gpu-experts-mask, which say how many slots there "
                "are"
            )
        # `moving.decide_moving` turns `AUTO` off.
        if self.expert_lora_path is not None and self.enable_dynamic_expert_update != AUTO:
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
        return next((self._shown(name) for name in HOT_OPTIONS if getattr(self, name)), None)

    def _shown(self, name: str) -> str:
        """An option of `HOT_OPTIONS` as it was given."""
        value = getattr(self, name)
        shown = shown_size(value) if name == "gpu_experts_memory" else value
        return f"{find_option(name).flag} {shown}"

    @property
    def converts_hot(self) -> bool:
        """Whether kt-moe fills the engine's tensors of hot experts, from files or from what the
        engine delivers."""
        return self.hot_format in (BF16, PACKED)

    @property
    def reads_hot(self) -> bool:
        """Whether kt-moe reads the hot experts, too, instead of the engine. Opens the weight path
        if they are packed: `hot_format` admits files without readable values only where the engine
        delivers the hot experts."""
        if self.weight_path is None or not self.converts_hot:
            return False
        from ..checkpoint import open_checkpoint  # only workers need it

        return self.hot_format == BF16 or not open_checkpoint(self.weight_path).unconvertible

    def hot_count(self, num_experts: int) -> int:
        """Hot experts of a layer with num_experts, on average if layers may differ. Rounded down.
        At least one stands for a memory, until `budget.with_ratio` has replaced it. OptionError if
        the layer has fewer than requested."""
        if self.gpu_experts_memory is not None:
            return 1
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
        if self.converts_hot:
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
            f"{f'; {self.from_tuned}' if self.from_tuned else ''}"
        )
