"""Looks at the package's kernels, the CPUs, the memory, the GPUs and the user's folders."""

from __future__ import annotations

import os
import resource
import shutil
import sysconfig
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .. import _conflict
from ..runtime.machine import (
    allowed_cpus,
    available_memory,
    cpu_model,
    cpu_times,
    disturbance,
    most_memory,
    usable_cores,
)
from ..runtime.machine_cache import cache_folder
from ..runtime.text import shown_size
from ..runtime.variant import kernel_table, native
from ..serving.tuned import config_folder
from .finding import Finding, note, ok, problem

_SECONDS = 0.5  # for which others' use of the CPUs is measured
_COMPILERS = ("gcc", "clang", "cc")  # that Triton tries, unless CC names one


def package() -> list[Finding]:
    """Of the installed distribution and its kernels."""
    name = "kt-moe"
    if (both := _conflict.both_installed()) is not None:
        return [problem(name, both)]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return [problem(name, "not installed with pip, so no engine finds its plugin")]
    best, table = native().kernel_tables()[0], kernel_table()
    text = f"{version}, {table} kernels"
    if table != best:
        text += f"; KT_KERNEL_CPU_VARIANT keeps it from {best}, which this CPU has"
        return [note(name, text)]
    return [ok(name, f"{text}, the best ones that this CPU runs")]


def cpus() -> list[Finding]:
    """Of the CPUs that this process may use, and who else uses them."""
    nodes = native().topology()
    allowed, cores, everything = len(allowed_cpus()), usable_cores(nodes), os.cpu_count() or 1
    text = f"{cpu_model()}: CPUs {allowed}, cores {cores}, NUMA nodes {len(nodes)}"
    findings = [ok("CPUs", text)]
    if allowed < everything or native().cpu_quota() < allowed:
        text = (
            f"the affinity mask and the control group leave {cores} cores of {everything} CPUs; "
            "experts run on these only"
        )
        findings.append(note("CPUs", text))
    before = cpu_times()
    time.sleep(_SECONDS)
    if (busy := disturbance(before, cpu_times(), allowed)) is not None:
        text = busy.replace("during the measurement", f"for {_SECONDS} s")
        findings.append(note("CPUs", f"{text}; experts are slower beside other programs"))
    return findings


def memory() -> list[Finding]:
    """Of host memory."""
    free, most = available_memory(), most_memory()
    text = f"{shown_size(free)} available, at most {shown_size(most)} with swap"
    return [ok("memory", text)]


def gpus() -> list[Finding]:
    """Of the GPUs, and of what kernels need that are compiled at the first use."""
    import torch

    if torch.version.cuda is None:
        return [note("GPU", "PyTorch's build for CPUs is installed, which uses no GPU")]
    if not torch.cuda.is_available():
        text = f"PyTorch's CUDA {torch.version.cuda} finds no usable GPU or driver"
        return [problem("GPU", text)]
    findings = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        text = f"{name}: {shown_size(free)} of {shown_size(total)} free"
        findings.append(ok(f"GPU {index}", text))
    return [*findings, *_triton(), *_pinning()]


def _triton() -> list[Finding]:
    """kt-moe's kernels for GPUs are Triton's, which needs a C compiler and Python's headers."""
    if find_spec("triton") is None:
        return [problem("Triton", "not installed; kt-moe's kernels for GPUs need it")]
    given = os.environ.get("CC")
    tried = (given,) if given else _COMPILERS
    if not any(shutil.which(name) for name in tried):
        text = f"no C compiler ({', '.join(tried)}), which Triton needs; install gcc, or set CC"
        return [problem("Triton", text)]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        text = f"{header} is missing, which Triton needs; install Python's development package"
        return [problem("Triton", text)]
    return [ok("Triton", "installed, with a C compiler and Python's headers")]


def _pinning() -> list[Finding]:
    """Of how much memory may be locked, as some drivers and containers limit registered memory."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= available_memory():
        return []
    text = (
        f"ulimit -l allows {shown_size(limit)}; where the driver obeys it, experts are neither "
        "streamed to the GPU nor moved there"
    )
    return [note("memory", text)]


def folders() -> list[Finding]:
    """Of the folders for measurements and for the options that `kt tune` saves."""
    findings = []
    for what, look in (("measurements", cache_folder), ("tuned options", config_folder)):
        try:
            folder = look()
        except RuntimeError:  # no home folder
            folder = None
        if folder is None:
            findings.append(note("folders", f"no home folder: {what} are not kept"))
        elif not os.access(_existing(folder), os.W_OK | os.X_OK):
            findings.append(note("folders", f"{folder} is not writable: {what} are not kept"))
        else:
            findings.append(ok("folders", f"{folder}: {what}"))
    return findings


def _existing(path: Path) -> Path:
    """The path, or the nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
