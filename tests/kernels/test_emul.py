"""The emulated AVX-512 and AMX intrinsics (kernels/isa/emul) against the real instructions and
against scalar definitions. The comparisons are in cpp/emul_test.cpp and cpp/emul/, one translation
unit; this compiles it once per side, links both and runs the program.
"""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .compiling import COMPILER, build

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "kernels" / "cpp" / "emul_test.cpp"
EMUL = ROOT / "kernels" / "isa" / "emul"
COMMON = ["-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
EMULATED = ["-DKT_EMULATE", "-mavx2", "-mfma", "-mf16c", "-mbmi2", f"-I{EMUL}"]
# GCC 12's own AVX-512 headers warn at -O2.
REAL = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler: {COMPILER} not found")
    probe = subprocess.run(
        [COMPILER, "-E", "-x", "c++", "-"],
        input="#include <simde/x86/avx512.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip("SIMDe headers not found (Debian package libsimde-dev)")
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def emulated_object(folder: Path) -> Path:
    return build(folder / "emulated.o", [SOURCE], [*COMMON, *EMULATED])


@pytest.fixture(scope="module")
def program(folder: Path, emulated_object: Path) -> Path:
    real = build(folder / "real.o", [SOURCE], [*COMMON, *REAL])
    return build(folder / "emul_test", [emulated_object, real], [])


def test_emulated_equals_real_and_defined(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run([str(program)])
    with capsys.disabled():  # what was skipped on this CPU must be seen
        print("\n" + done.stdout, end="")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("unconfigured", "tiles are not configured"),
        ("reserved", "reserved byte set"),
        ("too_large", "tile too large"),
        ("unused_tile", "this tile is not configured"),
        ("same_tile", "the three tiles must differ"),
        ("mismatch", "columns of a do not match rows of b"),
    ],
)
def test_tiles_refuse_what_the_processor_refuses(program: Path, fault: str, message: str) -> None:
    done = run([str(program), "--fault", fault])
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert message in done.stderr


def test_no_weak_symbols(emulated_object: Path) -> None:
    """A weak symbol of an emulated object could replace the real kernels' or be replaced."""
    if shutil.which("nm") is None:
        pytest.skip("nm not found (binutils)")
    done = run(["nm", "-C", str(emulated_object)])
    assert done.returncode == 0, done.stderr
    weak = [line for line in done.stdout.splitlines() if line[17:18] in "WVuvw"]
    assert not [line for line in weak if "DW.ref" not in line], weak
