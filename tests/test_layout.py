"""The rules that keep the source tree in shape: who may include and import what, and file sizes."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
CPP = (".cpp", ".h", ".inl")
ISAS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
ENGINES = {"vllm", "sglang"}
MAX_LINES = 600
# Whose headers a folder of kernels/ may include beside its own: includes point down.
MAY_INCLUDE = {
    "include": set(),
    "isa": {"include", "sys"},  # plain headers only, see ISA_HEADERS
    "sys": set(),
    "cache": {"sys"},
    "ref": set(),
    "pack": {"include"},
    "moe": {"include", "sys", "pack"},
    "sft": {"include", "sys", "pack", "moe"},
    "stream": {"include", "sys", "moe"},
    "testing": {"include", "sys", "pack", "moe"},
    "bind": {"include", "sys", "pack", "ref", "moe", "sft", "stream", "cache", "testing"},
}
# The files of kernels/moe, from the bottom to the top: each may include what is below it.
MOE_LAYERS = (
    {"form", "timings"},
    {"act_rows", "plan"},
    {"workspace"},
    {"config"},
    {"state"},
    {"pass", "weight_jobs"},
    {"h_rows", "x_rows"},
    {"drivers", "phases"},
    {"decode", "prefill"},
    {"forward"},
    {"layer"},
)

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


def own_header(path: Path, header: str) -> Path | None:
    """The file of ours that an include names, as the compiler looks it up; paths as sources()."""
    folders = (path.parent, *map(Path, ("kernels", "kernels/include", "kernels/isa")))
    found = (Path(os.path.normpath(folder / header)) for folder in folders)
    return next((file for file in found if (REPO / file).is_file()), None)


def own_includes() -> Iterator[tuple[Path, Path]]:
    """(file, header) of all files in kernels/."""
    for path, header in includes():
        if (target := own_header(path, header)) is not None:
            yield path, target


def test_folders_include_what_is_below() -> None:
    bad = []
    for path, target in own_includes():
        folder, other = path.parts[1], target.parts[1]
        assert folder in MAY_INCLUDE, f"{path}: kernels/{folder} has no rule in MAY_INCLUDE"
        if other != folder and other not in MAY_INCLUDE[folder]:
            bad.append(f"{path}: {target}")
    assert not bad, bad


def test_layer_files_include_what_is_below() -> None:
    level = {stem: i for i, stems in enumerate(MOE_LAYERS) for stem in stems}
    stems = {p.stem for p in sources(*CPP) if p.parts[:2] == ("kernels", "moe")}
    assert set(level) == stems, "MOE_LAYERS names other files than kernels/moe has"
    bad = [
        f"{path}: {target}"
        for path, target in own_includes()
        if path.parts[1] == target.parts[1] == "moe"
        and path.stem != target.stem
        and level[target.stem] >= level[path.stem]
    ]
    assert not bad, bad


def test_no_header_includes_itself() -> None:
    """Not by way of others either."""
    graph: dict[Path, set[Path]] = {}
    for path, target in own_includes():
        graph.setdefault(path, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(map(str, error.args[1])))


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
    waiting = [p for p in sources(*CPP) if p.parts[:2] == ("kernels", "isa")]
    waiting = [p for p in waiting if p.name != "tables.cpp"]  # compiled once, for every CPU
    bad = []
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for header in INCLUDE.findall((REPO / path).read_text()):
            own = own_header(path, header)
            if own is not None:
                waiting.append(own)
            elif not ISA_HEADERS.match(header):
                bad.append(f"{path}: {header}")
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


def test_the_formatter_has_its_way() -> None:
    directive = re.compile(r"^[^\"]*# fmt: (skip|off)", re.MULTILINE)
    found = {str(p) for p in sources(".py", ".pyi") if directive.search((REPO / p).read_text())}
    assert not found, found


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
