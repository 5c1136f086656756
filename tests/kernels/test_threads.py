"""The C++ tests of threads: kernels/sys and kernels/cache with sanitizers, and plain in full runs;
passes over a layer, training and kernels/stream with ThreadSanitizer.

What the tests write is deliberately not atomic, so that a missing synchronisation is a data race. A
sleep on a futex is no synchronisation to the sanitizer, nor to the code: the atomic words are.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from grid import FULL

from .compiling import CPP, KERNELS, WARNINGS, build, build_objects

# No -m flags: nothing of kernels/sys may need more than plain x86-64.
SYS = [KERNELS / "sys" / f"{name}.cpp" for name in ("fork", "sysfs", "team", "topology")]
CACHE = [KERNELS / "sys" / f"cuda_{name}.cpp" for name in ("driver", "work")]
CACHE += (KERNELS / "cache").glob("*.cpp")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
BUILDS = {
    "plain": ["-O2"],  # the others are at the level that compiles fast
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    "address_undefined": ["-O0", "-g", "-fsanitize=address,undefined"],
}
PROGRAMS = ["team_test", "reserves_test", "task_queue_test"]


def core() -> list[tuple[Path, list[str]]]:
    """What a program links beside SYS: kernels/stream, the layer, its training and its AVX2
    kernels."""
    flags = [*BUILDS["thread"], "-w"]
    parts = [
        path for folder in ("moe", "stream", "sft") for path in (KERNELS / folder).glob("*.cpp")
    ]
    parts += [KERNELS / "sys" / "numa_memory.cpp", KERNELS / "isa" / "tables.cpp"]
    found = [(path, flags) for path in parts]
    # -O0: of the instruction sets' intrinsics, whose optimisation takes long.
    slow = [*flags, "-O0", *AVX2, f"-I{KERNELS}/isa"]
    packing = [*(KERNELS / "pack").glob("*.cpp"), KERNELS / "isa" / "avx2.cpp"]
    return [(path, slow) for path in reversed(packing)] + found


@pytest.mark.parametrize("kind", [kind for kind in BUILDS if FULL or kind != "plain"])
def test_threads(tmp_path: Path, kind: str) -> None:
    flags = [*BUILDS[kind], *WARNINGS]
    shared = build_objects(tmp_path, [(source, flags) for source in SYS])
    linked = dict.fromkeys(PROGRAMS, shared)
    linked["cache_test"] = [*shared, *build_objects(tmp_path, [(path, flags) for path in CACHE])]
    if kind == "thread":
        linked["layer_test"] = [*shared, *build_objects(tmp_path, core())]
        linked["stream_test"] = linked["training_test"] = linked["layer_test"]
    env = {
        **os.environ,
        # The tests fork a process with threads on purpose, and the child starts some.
        "TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    for name, objects in linked.items():
        # -rdynamic: cache_test.cpp has the CUDA driver's entry points.
        test = build(tmp_path / f"{name}.o", [CPP / f"{name}.cpp"], flags)
        program = build(tmp_path / name, [test, *objects], [*flags, "-rdynamic"])
        result = subprocess.run([program], capture_output=True, text=True, timeout=300, env=env)
        print(result.stdout)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
