"""Builds the C++ programs of tests from the sources of the core."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

REPO = Path(__file__).resolve().parents[2]
KERNELS = REPO / "kernels"
CPP = Path(__file__).resolve().parent / "cpp"

COMPILER = os.environ.get("CXX", "g++")  # as CMake
FLAGS = ["-std=c++20", "-pthread", f"-I{KERNELS}", f"-I{KERNELS}/include"]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]


def missing(what: str) -> NoReturn:
    """Skips the test, or fails it if nothing may be missing (CI)."""
    if os.environ.get("KT_REQUIRE") == "1":
        pytest.fail(what)
    pytest.skip(what)


def build(out: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Builds a program or, if ``out`` is an object file, the object of one source."""
    compiler = shutil.which(COMPILER)
    if compiler is None:
        missing(f"no {COMPILER} to build the test programs")
    launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")
    kind = ["-c"] if out.suffix == ".o" else []
    command = [*filter(None, [launcher]), compiler, *FLAGS, *flags, *kind, *sources, "-o", out]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode and re.search(r"cannot find \S*lib(tsan|asan|ubsan)", result.stderr):
        missing(f"{' '.join(flags)}: the sanitizer's library is not installed")
    assert result.returncode == 0, result.stderr
    return out


def build_objects(
    folder: Path, sources: Iterable[tuple[Path, Sequence[str]]], at_once: int = 2
) -> list[Path]:
    """Compiles sources with their flags. Returns the objects."""

    def one(given: tuple[Path, Sequence[str]]) -> Path:
        source, flags = given
        return build(folder / f"{source.parent.name}_{source.stem}.o", [source], flags)

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(one, sources))


def build_fake_driver(folder: Path) -> str:
    """Builds a library that stands in for the CUDA driver: tests/stream/fake_cuda.c."""
    compiler = shutil.which("gcc")
    if compiler is None:
        missing("no gcc to build the stand-in of the CUDA driver")
    out = folder / "libfake.so"
    source = REPO / "tests" / "stream" / "fake_cuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", out], check=True)
    return str(out)
