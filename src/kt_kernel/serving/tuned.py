"""What ``kt tune`` recommended for a model on this machine: saved, and read at the next start."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..runtime.files import need_folder, need_replaceable, replace_file
from ..runtime.gpu import GpuMemory
from ..runtime.machine import machine_key
from ..runtime.machine_cache import read_cache
from ..runtime.text import shown_size
from ..runtime.variant import kernel_kind
from .model_config import routed_model
from .option_table import AUTO, HOT_OPTIONS, PACKED, OptionError
from .options import KTOptions

FLAG = "--kt-tuned"
ENGINES_PART = 0.9  # of a GPU's memory: what an engine takes if it is not told otherwise
_VERSION = 1
_GPUS = Path("/proc/driver/nvidia/gpus")
# The options that are saved. Only the first one leaves results as they are.
_SAVED = (
    "cpuinfer",
    "num_gpu_experts",
    "method",
    "hot_format",
    "max_deferred_experts_per_token",
)
_NUMBER = "num_gpu_experts", "hot_format"  # of hot experts; the format belongs to the number


@dataclass(frozen=True)
class Need:
    """What saved hot experts need of a GPU.

    Attributes:
        engine: which was tuned; engines divide the memory differently.
        method: of the cold experts; the size of packed hot ones depends on it.
        total: bytes of the GPU's memory.
        fixed: bytes of hot experts and everything else of fixed size, in the engine's share.
        token: bytes of the KV cache for each token of a context.
        context: tokens of a request that were asked for.
    """

    engine: str
    method: str
    total: int
    fixed: int
    token: int
    context: int


@dataclass(frozen=True)
class Start:
    """What the start of an engine says of the memory that saved hot experts need.

    Attributes:
        engine: vllm or sglang.
        context: most tokens of a request.
        share: of the GPU that the engine may take; None: its own choice.
        beside: a setting that takes memory which was not tuned, such as a draft model; or "".
        look: what the GPU has now; None: unknown. It takes seconds, and is only asked where the
            answer counts.
    """

    engine: str
    context: int
    share: float | None = None
    beside: str = ""
    look: Callable[[], GpuMemory | None] = lambda: None

    def why_not(self, need: Need) -> str:
        """Why hot experts might not fit; "" if they do."""
        if self.engine != need.engine:
            return f"they were tuned for {need.engine}"
        if self.beside:
            return f"{self.beside} takes memory, too"
        wanted = need.fixed + need.token * self.context
        gpu = self.look() or GpuMemory(need.total, need.total)
        share = self.share
        if share is None and gpu.total < need.total:
            share = ENGINES_PART
        given = math.inf if share is None else share * gpu.total
        if self.context > need.context and wanted > given:
            return f"they leave room for {need.context} tokens of context, and not {self.context}"
        if gpu.total < need.total and wanted > given:
            return (
                f"they need {shown_size(wanted)}, and the engine may take {share:.1%} of "
                f"{shown_size(gpu.total, down=True)}; they were tuned for a GPU of "
                f"{shown_size(need.total, down=True)}"
            )
        if wanted > given:
            return f"they need more than {share:.1%} of the GPU"
        if wanted > gpu.free:
            return (
                f"they need {shown_size(wanted)} of the GPU, and "
                f"{shown_size(gpu.free, down=True)} are free"
            )
        return ""


def config_folder() -> Path:
    """``$XDG_CONFIG_HOME/kt-moe``, else ``~/.config/kt-moe``. Raises RuntimeError if there is no
    home folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    if base and os.path.isabs(base):  # the XDG specification ignores relative paths
        return Path(base) / "kt-moe"
    return Path.home() / ".config" / "kt-moe"


def model_key(config: Any, whole: Any = None) -> dict[str, Any]:
    """What identifies a model: its sizes and quantisation, not its name, because engines may serve
    a local copy.

    whole: a multimodal model's configuration, of which `config` is a part; None: it is no part. Its
    quantisation is in either of them.
    """
    key = asdict(routed_model(config))
    key.pop("name")
    # Where the language model's part of config.json has no type, kt tune sees the whole model's,
    # and engines see that of the part's class, which has this suffix.
    key["model_type"] = key["model_type"].removesuffix("_text")
    return key | {"quantisation": quantisation_of(config) or quantisation_of(whole)}


def quantisation_of(config: Any) -> str:
    """The name of a model's quantisation in its configuration; "" for 16- and 32-bit weights."""
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, Mapping):
        found = getattr(found, "__dict__", {})
    method = found.get("quant_method", "")
    return str(getattr(method, "value", method))  # transformers' objects have an Enum


def machine_fingerprint() -> str:
    """The package's version, the CPUs and the GPUs, without touching CUDA: engines start processes
    afterwards that must be the first to do that."""
    gpus = []
    for path in sorted(_GPUS.glob("*/information")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        gpus += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = ", ".join(gpus) or "none"
    if visible is not None:
        shown += f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"{machine_key()}, GPUs {shown}"


def path_of(key: Mapping[str, Any]) -> Path:
    """The file for a model. Raises RuntimeError if there is no home folder."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    # config.json may have any text there, and it must not lead to another folder.
    kind = re.sub(r"[^\w.-]", "_", key["model_type"]).lstrip(".") or "model"
    return config_folder() / "tuned" / f"{kind}-{digest}.json"


def check_place(config: Any) -> None:
    """Raises what `save` would raise because of its folder, before anything is measured for it.
    Nothing is created."""
    path = path_of(model_key(config))
    if path.parent.is_dir():
        need_replaceable(path)
    else:
        need_folder(str(path.parent))


def save(
    config: Any,
    device: str,
    options: Mapping[str, Any],
    about: Mapping[str, Any],
    need: Need | None = None,
) -> Path:
    """Saves recommended options.

    Args:
        config: the model's configuration.
        device: the engine's type of device, cuda or cpu.
        options: by name, such as {"num_gpu_experts": 32}.
        about: what was assumed, predicted and measured, for readers of the file; "disturbed": what
            was measured on a busy machine.
        need: of hot experts; None: there are none.

    Raises:
        OSError, RuntimeError: the file cannot be written.
    """
    unknown = set(options) - set(_SAVED)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: not among the options that are saved")
    KTOptions.from_mapping(options)
    key = model_key(config)
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": _VERSION,
        "model": key,
        "machine": machine_fingerprint(),
        "device": device,
        "options": dict(options),
        "need": None if need is None else asdict(need),
        **about,
    }
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return path


def with_tuned(
    options: KTOptions,
    config: Any,
    device: str,
    fixed_results: bool = False,
    start: Start | None = None,
    whole: Any = None,
) -> KTOptions:
    """The options, and those saved for this model and machine that were not given.

    Left out is what could make a start fail that succeeds without it: hot experts that might not
    fit on the GPU of this start, and what contradicts given options. ``from_tuned`` then says why.

    With KT_KERNEL_KIND, or if the user asked the engine for the same (fixed_results), results must
    not depend on the machine: only the number of threads is used, which does not change them.

    Args:
        start: None: hot experts are not checked.
        whole: see `model_key`.

    Raises:
        OptionError: the option --kt-tuned is "on", and nothing is saved for this model, machine,
            device and version, or what is saved cannot be used.
    """
    if options.tuned == "off":
        return options
    key = model_key(config, whole)
    try:
        path = path_of(key)
    except RuntimeError:
        path = None
    found = None if path is None else _saved(path, key, device)
    if found is None:
        if options.tuned == "on":
            raise OptionError(
                f"{FLAG} on: nothing is saved for this model and machine"
                f"{'' if path is None else f' ({path})'}; run kt tune MODEL, or remove the flag"
            )
        return options
    saved, need, disturbed = found
    given = options.to_mapping()
    left, why = _left_out(options, saved, need, key["quantisation"], start)
    if kernel_kind() or fixed_results:
        left, why = {*_SAVED[1:]}, ""
    if why and options.tuned == "on":
        raise OptionError(f"{FLAG} on: the saved hot experts ({path}) are not used: {why}")
    taken = {k: value for k, value in saved.items() if k not in given and k not in left}
    try:
        merged = KTOptions.from_mapping(given | taken)
    except OptionError as problem:
        return without_tuned(options, problem)
    said = [f"no saved hot experts: {why}"] if why else []
    if taken:
        said.insert(0, "taken: " + ", ".join(f"{k} {value}" for k, value in taken.items()))
    if said and disturbed:
        said.append("measured on a busy machine")
    return replace(merged, from_tuned=f"{'; '.join(said)} (kt tune, {path})" if said else "")


def without_tuned(options: KTOptions, problem: OptionError) -> KTOptions:
    """The given options, as what is saved cannot be used with them. Raises OptionError if the user
    requires that it is."""
    if options.tuned == "on":
        raise OptionError(f"{FLAG} on: the saved options cannot be used: {problem}") from problem
    return replace(options, from_tuned=f"nothing taken of what kt tune saved, because of {problem}")


def _left_out(
    options: KTOptions,
    saved: Mapping[str, Any],
    need: Need | None,
    quantisation: str,
    start: Start | None,
) -> tuple[set[str], str]:
    """The saved options that are not used, and why hot experts are not, unless given options say
    how many are hot."""
    left: set[str] = set()
    if options.weight_path is not None:  # other files, which the saved method may not suit
        left = {"method"}
    if any(getattr(options, name) is not None for name in HOT_OPTIONS):
        return left | {*_NUMBER}, ""
    if not saved.get("num_gpu_experts"):
        return left, ""
    why = ""
    if need is None:
        why = "the file does not say how much memory they need"
    elif quantisation or saved.get("hot_format") == PACKED:
        # The method and the files decide how large a hot expert is.
        if options.weight_path is not None:
            why = "--kt-weight-path is given"
        elif options.method not in (AUTO, need.method):
            why = f"they were tuned with --kt-method {need.method}"
    if not why and need is not None and start is not None:
        why = start.why_not(need)
    return (left | {*_NUMBER} if why else left), why


def _saved(
    path: Path, key: Mapping[str, Any], device: str
) -> tuple[dict[str, Any], Need | None, bool] | None:
    """The options in a file, what their hot experts need, and whether something disturbed the
    measurements. None if it is missing, damaged, or of another model or machine."""
    content = read_cache(path)
    wanted = {
        "version": _VERSION,
        "model": key,
        "machine": machine_fingerprint(),
        "device": device,
    }
    options = content.get("options")
    if any(content.get(name) != value for name, value in wanted.items()):
        return None
    if not isinstance(options, dict) or not set(options) <= set(_SAVED):
        return None
    return options, _need(content.get("need")), bool(content.get("disturbed"))


def _need(found: Any) -> Need | None:
    """None if the file has none, or it is damaged."""
    kinds = {"engine": str, "method": str, "total": int, "fixed": int, "token": int, "context": int}
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        return None
    return Need(**found) if all(isinstance(found[k], kinds[k]) for k in kinds) else None
