"""The wheel: what is in it, what it says of itself, and that it loads where little else is."""

import configparser
import email.message
import email.parser
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[1]
ENV_SH = REPO / ".ci" / "env.sh"

LOAD_C = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kt_kernel._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "torch" not in sys.modules
print(sys.version_info[:2], module.kernel_tables(), module.cpu_brand())
assert "avx2" in module.kernel_tables()
"""


def wheel_path(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set: no such wheel was built (run through `make test`)")
    return Path(os.environ[variable])


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    with zipfile.ZipFile(wheel_path("KT_WHEEL")) as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def extension(wheel: zipfile.ZipFile) -> str:
    found = [n for n in wheel.namelist() if n.endswith(".so")]
    assert len(found) == 1, f"one extension holds all instruction sets, got {found}"
    return found[0]


def test_contents(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert extension(wheel).startswith("kt_kernel/_C.")
    assert {n.split("/")[0] for n in names} == {"kt_kernel", names[-1].split("/")[0]}
    for source, target in (("src/kt_kernel", ""), ("plugin_entrypoints", "plugin_entrypoints/")):
        for path in (REPO / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                name = f"kt_kernel/{target}{path.relative_to(REPO / source)}"
                assert name in names, f"{name} is missing"
                assert wheel.read(name) == path.read_bytes(), f"{name} is not this checkout's"
    model = [n for n in names if n.startswith("kt_kernel/demo_model/")]
    weights = [n for n in model if n.endswith(".safetensors")]
    assert len(weights) == 1, model
    assert wheel.getinfo(weights[0]).file_size <= 32 * 2**20
    assert {"config.json", "tokenizer.json"} <= {Path(n).name for n in model}
    assert "kt_kernel/py.typed" in names
    assert any(n.endswith("/LICENSE") for n in names)


def test_no_build_path_in_the_extension(wheel: zipfile.ZipFile) -> None:
    binary = wheel.read(extension(wheel))
    folder = os.environ["KT_CMAKE_DIR"].encode()
    assert folder not in binary


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "kt-moe"
    version = metadata["Version"]
    assert re.search(rf"^## \[?{re.escape(version)}\b", (REPO / "CHANGELOG.md").read_text(), re.M)
    assert metadata["License-Expression"] == "Apache-2.0"
    python = metadata["Requires-Python"]
    assert ">=3.11" in python and "<3.14" in python
    assert set(metadata.get_all("Provides-Extra")) >= {"sglang", "vllm", "sft", "dev"}

    base, extras = set(), {}
    for line in metadata.get_all("Requires-Dist"):
        name = re.match(r"[\w-]+", line).group()
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        (extras.setdefault(extra.group(1), set()) if extra else base).add(name)
    assert base == {"torch", "numpy", "safetensors", "huggingface-hub", "typer", "rich"}
    assert "sglang" in extras["sglang"]
    assert "vllm" in extras["vllm"]


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    parsed = configparser.ConfigParser(delimiters=("=",))
    parsed.read_string(wheel.read(name).decode())
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        for target in parsed[group].values():
            module, function = target.split(":")
            source = REPO / module.replace("kt_kernel.", "", 1).replace(".", "/")
            path = source.with_suffix(".py")
            if source.is_dir():  # the package takes the function from one of its modules
                imports = (source / "__init__.py").read_text()
                (inside,) = re.findall(rf"^from \.(\w+) import {function}$", imports, re.MULTILINE)
                path = source / f"{inside}.py"
            assert re.search(rf"^def {function}\(\)", path.read_text(), re.MULTILINE), target


def _of_dev(requirement: Requirement) -> bool:
    """Whether it comes with the extra, on a machine that kt-moe runs on."""
    marker = requirement.marker
    machine = {"sys_platform": "linux", "platform_machine": "x86_64"}
    return marker is not None and all(
        marker.evaluate({**machine, "extra": extra}) == (extra == "dev") for extra in ("", "dev")
    )


def test_dev_extra_agrees_with_the_pins(metadata: email.message.Message) -> None:
    """constraints.txt has each development tool of pyproject.toml, in a version that it takes."""
    pins = dict(
        line.split("==")
        for line in (REPO / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    tools = [r for r in map(Requirement, metadata.get_all("Requires-Dist")) if _of_dev(r)]
    assert {"clang-format", "pytest", "triton"} <= {tool.name for tool in tools}
    for tool in tools:
        assert tool.specifier.contains(pins[tool.name]), tool


def test_constraints_pin_each_package_once() -> None:
    names = []
    for line in (REPO / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==[\w.]+", line)
            assert match, f"not an exact pin: {line}"
            names.append(re.sub(r"[-_.]+", "-", match.group(1)).lower())
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


@pytest.mark.parametrize("variable", ["KT_WHEEL", "KT_WHEEL_ABI3"])
def test_links_nothing_of_torch_or_cuda(variable: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_path(variable)) as file:
        library = file.extract(extension(file), tmp_path)
    listing = subprocess.run(["ldd", library], check=True, capture_output=True, text=True).stdout
    linked = {line.split()[0] for line in listing.splitlines()}
    allowed = r"(linux-vdso|libstdc\+\+|libm|libgcc_s|libc|libpthread)\.so[.\d]*|.*/ld-linux.*"
    assert not [name for name in linked if not re.fullmatch(allowed, name)], listing


def python_of(version: str) -> str:
    found = subprocess.run([ENV_SH, "python", version], capture_output=True, text=True)
    if found.returncode == 3:
        pytest.skip(f"no Python {version} here")
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_wheel_is_found_from_any_folder(tmp_path: Path) -> None:
    """By the hash of the checkout's files, whose names are relative to its root."""
    built = wheel_path("KT_WHEEL")
    version = "{}.{}".format(*sys.version_info)
    environments = {"KT_ENVS": str(built.parents[3])}  # tests have a cache folder of their own
    found = subprocess.run(
        [ENV_SH, "wheel", version],
        cwd=tmp_path,
        env=os.environ | environments,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout.strip()) == (0, str(built)), found.stderr


def test_this_wheel_loads_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_path("KT_WHEEL")) as file:
        library = file.extract(extension(file), tmp_path)
    result = subprocess.run(
        [sys.executable, "-S", "-c", LOAD_C, library], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_abi3_wheel_loads_alone(version: str, tmp_path: Path) -> None:
    """One wheel, built with 3.12 against the stable ABI, serves 3.12 and later."""
    path = wheel_path("KT_WHEEL_ABI3")
    assert "-cp312-abi3-" in path.name
    python = python_of(version)
    with zipfile.ZipFile(path) as file:
        assert extension(file) == "kt_kernel/_C.abi3.so"
        library = file.extract(extension(file), tmp_path)
    result = subprocess.run([python, "-S", "-c", LOAD_C, library], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
