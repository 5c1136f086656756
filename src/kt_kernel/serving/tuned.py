"""What ``kt tune`` recommended for a model on this machine: saved, and read at the next start."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..runtime.files import replace_file
from ..runtime.machine import machine_key
from ..runtime.machine_cache import read_cache
from ..runtime.variant import kernel_kind
from .model_config import routed_model
from .option_table import OptionError
from .options import KTOptions

FLAG = "--kt-tuned"
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
_HOT = ("num_gpu_experts", "gpu_experts_ratio", "gpu_experts_mask", "gpu_experts_memory")


def config_folder() -> Path:
    """``$XDG_CONFIG_HOME/kt-moe``, else ``~/.config/kt-moe``. Raises RuntimeError if there is no
    home folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    if base and os.path.isabs(base):  # the XDG specification ignores relative paths
        return Path(base) / "kt-moe"
    return Path.home() / ".config" / "kt-moe"


def model_key(config: Any) -> dict[str, Any]:
    """What identifies a model: its sizes and quantisation, not its name, because engines may serve
    a local copy."""
    key = asdict(routed_model(config))
    key.pop("name")
    quantised = getattr(config, "quantization_config", None)
    if not isinstance(quantised, Mapping):
        quantised = getattr(quantised, "__dict__", {})
    return key | {"quantisation": str(quantised.get("quant_method", ""))}


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


def path_of(config: Any) -> Path:
    """The file for a model. Raises RuntimeError if there is no home folder."""
    key = model_key(config)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    kind = key["model_type"] or "model"
    return config_folder() / "tuned" / f"{kind}-{digest}.json"


def save(config: Any, device: str, options: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Saves recommended options.

    Args:
        config: the model's configuration.
        device: the engine's type of device, cuda or cpu.
        options: by name, such as {"num_gpu_experts": 32}.
        about: what was assumed, predicted and measured, for readers of the file.

    Raises:
        OSError, RuntimeError: the file cannot be written.
    """
    unknown = set(options) - set(_SAVED)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: not among the options that are saved")
    KTOptions.from_mapping(options)
    path = path_of(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": _VERSION,
        "model": model_key(config),
        "machine": machine_fingerprint(),
        "device": device,
        "options": dict(options),
        **about,
    }
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return path


def with_tuned(
    options: KTOptions, config: Any, device: str, fixed_results: bool = False
) -> KTOptions:
    """The options, and those saved for this model and machine that were not given.

    With KT_KERNEL_KIND, or if the user asked the engine for the same (fixed_results), results must
    not depend on the machine: only the number of threads is used, which does not change them.

    Raises:
        OptionError: the option --kt-tuned is "on", and nothing is saved for this model, machine,
            device and version.
    """
    if options.tuned == "off":
        return options
    try:
        path = path_of(config)
    except RuntimeError:
        path = None
    saved = {} if path is None else _saved(path, config, device)
    if not saved:
        if options.tuned == "on":
            raise OptionError(
                f"{FLAG} on: nothing is saved for this model and machine"
                f"{'' if path is None else f' ({path})'}; run kt tune MODEL, or remove the flag"
            )
        return options
    if kernel_kind() or fixed_results:
        saved = {name: value for name, value in saved.items() if name == "cpuinfer"}
    given = options.to_mapping()
    asks_for_hot = any(getattr(options, name) is not None for name in _HOT)
    if asks_for_hot:  # the format of hot experts belongs to their number
        belongs = "num_gpu_experts", "hot_format"
        saved = {name: value for name, value in saved.items() if name not in belongs}
    taken = {name: value for name, value in saved.items() if name not in given}
    if not taken:
        return options
    try:
        merged = KTOptions.from_mapping(given | taken)
    except OptionError:  # contradicts options that were given
        return options
    shown = ", ".join(f"{name} {value}" for name, value in taken.items())
    return replace(merged, from_tuned=f"{shown} (kt tune, {path})")


def _saved(path: Path, config: Any, device: str) -> dict[str, Any]:
    """The options in a file; none if it is missing, damaged, or of another model or machine."""
    content = read_cache(path)
    wanted = {
        "version": _VERSION,
        "model": model_key(config),
        "machine": machine_fingerprint(),
        "device": device,
    }
    options = content.get("options")
    if any(content.get(name) != value for name, value in wanted.items()):
        return {}
    if not isinstance(options, dict) or not set(options) <= set(_SAVED):
        return {}
    return options
