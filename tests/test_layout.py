"""The rules that keep the source tree in shape: who may include and import what, and file sizes."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
KERNELS = REPO / "kernels"
CPP = (".cpp", ".h", ".inl")
ISAS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
ENGINES = {"vllm", "sglang"}
MAX_LINES = 600

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
PYTHON_HEADER = re.compile(r"^(nanobind|pybind11)/|^Python\.h$")
FOREIGN_HEADER = re.compile(r"^(torch|ATen|c10|cuda|cub|thrust)\b|^(cuda|nccl|nvml)\w*\.h$")
# Allowed in files that are compiled once per instruction set: C headers and intrinsics only. Others
# bring inline functions that the linker could share between objects of different instruction sets.
ISA_HEADERS = re.compile(
    r"^(c?(stdint|stddef|stdio|stdlib|string|limits)(\.h)?|immintrin\.h|simde/.+)$"
)


def sources(*suffixes: str) -> list[Path]:
    """Files of the checkout that git tracks or would track, relative to its root."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    found = [Path(n) for n in names if n.endswith(suffixes) and (REPO / n).is_file()]
    assert found, f"no file ends with {suffixes}"
    return found


def includes(*folders: str) -> Iterator[tuple[Path, str]]:
    for path in sources(*CPP):
        if path.parts[0] == "kernels" and (not folders or path.parts[1] in folders):
            for header in INCLUDE.findall((REPO / path).read_text()):
                yield path, header


def test_python_stays_in_bind() -> None:
    bad = [
        f"{path}: {header}"
        for path, header in includes()
        if PYTHON_HEADER.search(header) and path.parts[1] != "bind"
    ]
    assert not bad, bad


def test_no_torch_or_cuda_headers() -> None:
    bad = [f"{path}: {header}" for path, header in includes() if FOREIGN_HEADER.search(header)]
    assert not bad, bad


def test_isa_files_include_only_plain_headers() -> None:
    """Also what they reach: our own headers are followed."""
    seen: set[Path] = set()
    waiting = [REPO / p for p in sources(*CPP) if p.parts[:2] == ("kernels", "isa")]
    waiting = [p for p in waiting if p.name != "tables.cpp"]  # compiled once, for every CPU
    bad = []
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for header in INCLUDE.findall(path.read_text()):
            candidates = (
                path.parent / header,
                KERNELS / "isa" / header,
                KERNELS / "include" / header,
            )
            own = next((c.resolve() for c in candidates if c.is_file()), None)
            if own is not None:
                waiting.append(own)
            elif not ISA_HEADERS.match(header):
                bad.append(f"{path.relative_to(REPO)}: {header}")
    assert len(seen) > len(ISAS)
    assert not bad, bad


@pytest.mark.parametrize("isa", ISAS)
def test_isa_objects_share_no_symbol(isa: str) -> None:
    """A weak symbol could be taken from the object of an instruction set that the CPU lacks."""
    if "KT_CMAKE_DIR" not in os.environ:
        pytest.skip("KT_CMAKE_DIR is not set: run through `make test`")
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed (Debian: binutils)")
    build = Path(os.environ["KT_CMAKE_DIR"])
    objects = list(build.glob(f"CMakeFiles/kt_isa_{isa}.dir/**/*.o"))
    assert objects, f"no object of {isa} in {build}"
    for file in objects:
        listing = subprocess.run(["nm", file], check=True, capture_output=True, text=True).stdout
        symbols = [line.split()[-2:] for line in listing.splitlines()]
        weak = [name for kind, name in symbols if kind in "WVwvu"]
        assert not weak, f"{file.name}: {weak}"
        exported = [name for kind, name in symbols if kind.isupper() and kind != "U"]
        assert len(exported) == 1, f"{file.name} exports more than its table: {exported}"


def test_objects_of_the_floor_share_no_symbol() -> None:
    """Those compiled for AVX2 must not give baseline code, which decides whether the CPU will do,
    an inline function of theirs."""
    if "KT_CMAKE_DIR" not in os.environ:
        pytest.skip("KT_CMAKE_DIR is not set: run through `make test`")
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed (Debian: binutils)")
    build = Path(os.environ["KT_CMAKE_DIR"])
    for name in ("blocks", "dense", "quantised", "scale_search"):
        (file,) = build.glob(f"CMakeFiles/_C.dir/pack/{name}.cpp.o")
        listing = subprocess.run(["nm", file], check=True, capture_output=True, text=True).stdout
        symbols = [line.split()[-2:] for line in listing.splitlines()]
        assert not [symbol for kind, symbol in symbols if kind in "WVwvu"], file.name


def imported(path: Path) -> set[str]:
    """Top-level names that a Python file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse((REPO / path).read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def test_only_plugins_import_an_engine() -> None:
    bad = [
        f"{path}: {sorted(engines)}"
        for path in sources(".py")
        if path.parts[0] == "src" and (engines := imported(path) & ENGINES)
    ]
    assert not bad, bad


def test_import_rules() -> None:
    """The contracts of pyproject.toml, on the installed package."""
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run([tool, "--no-cache"], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_are_short() -> None:
    long = {}
    for path in sources(".py", ".sh", ".cmake", *CPP):
        lines = (REPO / path).read_text().count("\n")
        if lines > MAX_LINES:
            long[str(path)] = lines
    assert not long, f"more than {MAX_LINES} lines, so more than one job: {long}"


def test_no_path_of_a_machine() -> None:
    """Files speak of the project only, not of where somebody had it checked out."""
    place = re.compile(r"(?<![\w.$}~*:/-])/(?:root|work|home/[a-z]\w*|Users/\w+|opt/\w+)/")
    bad = []
    for path in sources(""):
        text = (REPO / path).read_bytes()
        if b"\0" in text or path.name == "heldout.txt" or "corpus" in path.parts:
            continue
        for number, line in enumerate(text.decode().splitlines(), 1):
            if place.search(line) and path != Path(__file__).relative_to(REPO):
                bad.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not bad, bad


def test_basenames_of_tests_are_unique() -> None:
    """pytest imports test files by their name."""
    names = [p.name for p in sources(".py") if p.parts[0] == "tests" and p.name.startswith("test_")]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
