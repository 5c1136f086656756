"""The table of the server options of the hybrid layer, from which the engine plugins make flags."""

from dataclasses import dataclass

from ..weights.methods import QUANTISED_TO

STRATEGIES = ("uniform", "frequency", "front-loading", "random")
ROUTES_TOKENS = 16384  # default of --kt-expert-routes-tokens
AUTO = "auto"  # as a method: chosen by the format of the stored weights
SWITCH = (AUTO, "on", "off")
# Names of the options that say how many experts are hot. Only one of them can be given.
HOT_OPTIONS = ("num_gpu_experts", "gpu_experts_ratio", "gpu_experts_memory", "gpu_experts_mask")
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
        "--kt-gpu-experts-memory",
        "size",
        "memory for hot experts on each GPU, such as 20GB, instead of a number or a ratio",
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
        "memory on the GPU for experts that are copied there, such as 1536MB or 2GB (default: 2GB, "
        "or an eighth of what the engine has left if that is less, or half of it with "
        "--kt-gpu-prefill-token-threshold)",
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
        "what is measured, of which they take a part by what they gain)",
    ),
    Option(
        "--kt-tuned",
        "switch",
        "whether options that are not given are those that kt tune saved for this model and "
        f"machine: on, off, or {AUTO}: if there are any (default {AUTO})",
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


def find_option(key: str) -> Option:
    """The option with this name, with or without dashes and "kt". Raises OptionError."""
    name = str(key).lstrip("-").replace("-", "_")
    option = _BY_NAME.get(name.removeprefix("kt_")) or _BY_NAME.get(name)
    if option is None:
        raise OptionError(
            f"unknown kt option {key!r}; accepted: "
            + ", ".join(option.name for option in OPTIONS if option.supported)
        )
    return option
