"""The fuzz targets of this folder without a fuzzer: on the corpus, and on some random inputs.

They are linked with the objects of the sanitized build (KT_SANITIZED_MODULE; `make test` builds
it), so with AddressSanitizer, UndefinedBehaviorSanitizer and the emulated kernels. CONTRIBUTING.md
says how to search for more with libFuzzer; an input that found a fault goes into corpus/.
"""

import os
import subprocess
from pathlib import Path

import pytest
from grid import examples
from kernels.compiling import WARNINGS, build, build_objects

HERE = Path(__file__).parent
FLAGS = [*WARNINGS, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def objects() -> list[Path]:
    """Of the core and its kernels, but for the memory that exact_memory.cpp stands in for."""
    built = os.environ.get("KT_SANITIZED_MODULE")
    if not built:
        pytest.skip("KT_SANITIZED_MODULE is not set (make test sets it)")
    root = Path(built).parent / "CMakeFiles"
    core = [
        p for part in ("isa", "moe", "pack", "sys") for p in root.glob(f"_C_emul.dir/{part}/*.o")
    ]
    found = [*core, *root.glob("kt_isa_*.dir/isa/*.o")]
    assert found, f"no object in {root}"
    return [p for p in found if p.name != "numa_memory.cpp.o"]


@pytest.mark.parametrize(
    ("target", "inputs"),
    [("pack", examples(3000, full=30_000)), ("layer", examples(150, full=3000))],
    ids=["pack", "layer"],
)
def test_corpus_and_random_inputs(tmp_path: Path, target: str, inputs: int) -> None:
    program = tmp_path / target
    sources = [HERE / f"fuzz_{target}.cpp", HERE / "run_corpus.cpp", HERE / "exact_memory.cpp"]
    compiled = build_objects(tmp_path, [(source, FLAGS) for source in sources])
    build(program, [*compiled, *objects()], FLAGS)
    files = sorted((HERE / "corpus" / target).iterdir())
    assert files
    done = subprocess.run(
        [program, str(inputs), "1", *files],
        capture_output=True,
        text=True,
        timeout=examples(300, full=3600),
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{len(files)} files, {inputs} inputs" in done.stdout
