"""Platform check, choice of the kernel table, and the environment switches of the kernels."""

from __future__ import annotations

import functools
import os
import platform
import sys
from types import ModuleType

#: Kernel tables from best to worst, and the family that each is reported as.
TABLES: dict[str, str] = {
    "amx": "amx",
    "avx512_bf16": "avx512",
    "avx512_vnni": "avx512",
    "avx512": "avx512",
    "avx2": "avx2",
}
KINDS: dict[str, int] = {"vector": 1, "tile": 2}

_FLOOR = ("avx2", "fma", "f16c", "bmi2")


def debugging() -> bool:
    """Whether KT_KERNEL_DEBUG=1."""
    return os.environ.get("KT_KERNEL_DEBUG") == "1"


def debug(message: str) -> None:
    """Prints a line to stderr when KT_KERNEL_DEBUG=1."""
    if debugging():
        print(f"kt_kernel: {message}", file=sys.stderr, flush=True)


def check_platform() -> None:
    """Raises ImportError, one line, if the package cannot run here."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise ImportError(f"kt-moe runs on Linux x86-64 only; this is {system} {machine}")
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), None)
    except OSError:
        flags = None
    if flags is None:  # no cpuinfo: the compiled core checks again with cpuid
        return
    present = set(flags.split(":", 1)[1].split())
    missing = [name for name in _FLOOR if name not in present]
    if missing:
        raise ImportError(
            "kt-moe needs a CPU with AVX2, FMA, F16C and BMI2; this one lacks "
            + ", ".join(name.upper() for name in missing)
        )


def check_environment() -> None:
    """Checks KT_KERNEL_CPU_VARIANT and KT_KERNEL_KIND. Prints what was detected and selected if
    KT_KERNEL_DEBUG=1. Called at import.

    If none of them is set, the compiled core is not loaded, because engines import this package in
    every process, even if it is not used.

    Raises:
        ImportError: a variable has an invalid value; one line that names both.
    """
    variables = ("KT_KERNEL_CPU_VARIANT", "KT_KERNEL_KIND")
    given = {name: os.environ[name] for name in variables if os.environ.get(name, "").strip()}
    if not given and not debugging():
        return
    try:
        table, kind = kernel_table(), kernel_kind()
    except ValueError as error:
        raise ImportError(str(error)) from None
    kinds = next((name for name, number in KINDS.items() if number == kind), "vector and tile")
    chosen = ", ".join(f"{name}={value}" for name, value in given.items()) or "automatically"
    debug(f"selected {table} kernels, {kinds} ({chosen})")


@functools.cache
def native() -> ModuleType:
    """The compiled core, imported at first use, so that option parsing does not need it."""
    from .. import _C

    if not _C.kernel_tables():
        raise ImportError(
            f"kt-moe needs a CPU with AVX2, FMA, F16C and BMI2; this is {_C.cpu_brand()}"
        )
    if debugging():
        debug(
            f"{_C.cpu_brand()}; kernel tables {', '.join(_C.kernel_tables())}; NUMA (node, CPUs, "
            f"cores) {_C.topology()}; quota {_C.cpu_quota()} CPUs"
        )
    return _C


def kernel_table() -> str:
    """Exact name of the kernel table to use: the best one, or that of KT_KERNEL_CPU_VARIANT.

    Raises:
        ValueError: KT_KERNEL_CPU_VARIANT is not a table, or this CPU cannot run it.
    """
    usable = native().kernel_tables()
    wanted = os.environ.get("KT_KERNEL_CPU_VARIANT", "").strip()
    if not wanted:
        return usable[0]
    if wanted in usable:
        return wanted
    accepted = f"accepted on this CPU: {', '.join(usable)}"
    if wanted in TABLES:
        raise ValueError(f"KT_KERNEL_CPU_VARIANT={wanted} is above this CPU; {accepted}")
    raise ValueError(f"KT_KERNEL_CPU_VARIANT={wanted} is not an instruction set; {accepted}")


def cpu_variant() -> str:
    """Family of the table in use: "amx", "avx512" or "avx2"."""
    return TABLES[kernel_table()]


def kernel_kind() -> int:
    """0 (selected by tokens per expert), 1 (vector) or 2 (tile), from KT_KERNEL_KIND.

    Raises:
        ValueError: another value than "", "vector" or "tile".
    """
    wanted = os.environ.get("KT_KERNEL_KIND", "").strip()
    if not wanted:
        return 0
    if wanted not in KINDS:
        raise ValueError(f"KT_KERNEL_KIND={wanted}; accepted: vector, tile, or unset")
    return KINDS[wanted]


def cpu_features() -> dict[str, bool]:
    """Instruction sets that the CPU and the operating system support, by name."""
    return dict(native().cpu_features())
