import os
import subprocess
import sys
from pathlib import Path

import pytest

import kt_kernel
from kt_kernel.runtime import variant
from kt_kernel.weights import methods


def test_tables_of_methods():
    assert len(kt_kernel.INFERENCE_METHODS) == 17 and len(kt_kernel.SFT_METHODS) == 18
    assert not kt_kernel.INFERENCE_METHODS & kt_kernel.SFT_METHODS
    assert methods.METHODS.keys() == kt_kernel.INFERENCE_METHODS
    for name in kt_kernel.INFERENCE_METHODS:
        assert methods.get_method(name).name == name


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("AMXBF16_SFT", ValueError, "mode='sft'"),
        ("amxint4", ValueError, "unknown method 'amxint4'; supported: BF16, AMXINT8"),
        (None, TypeError, "NoneType"),
    ],
)
def test_refused_methods(name, error, text):
    with pytest.raises(error, match=text):
        methods.get_method(name)


class FakeCore:
    def __init__(self, tables):
        self.kernel_tables = lambda: tables


@pytest.fixture
def usable(monkeypatch):
    monkeypatch.setattr(variant, "native", lambda: FakeCore(["avx512_vnni", "avx512", "avx2"]))


def test_best_table_or_the_one_asked_for(usable, monkeypatch):
    assert (variant.kernel_table(), variant.cpu_variant()) == ("avx512_vnni", "avx512")
    monkeypatch.setenv("KT_KERNEL_CPU_VARIANT", "avx2")
    assert (kt_kernel.__cpu_kernel__, kt_kernel.__cpu_variant__) == ("avx2", "avx2")


@pytest.mark.parametrize(("name", "text"), [("amx", "above this CPU"), ("sse2", "not an instr")])
def test_variant_may_only_lower(usable, monkeypatch, name, text):
    monkeypatch.setenv("KT_KERNEL_CPU_VARIANT", name)
    with pytest.raises(ValueError, match=f"{text}.*on this CPU: avx512_vnni, avx512, avx2"):
        variant.kernel_table()


def test_kind(monkeypatch):
    assert variant.kernel_kind() == 0
    for name, kind in (("vector", 1), ("tile", 2)):
        monkeypatch.setenv("KT_KERNEL_KIND", name)
        assert variant.kernel_kind() == kind
    monkeypatch.setenv("KT_KERNEL_KIND", "both")
    with pytest.raises(ValueError, match=r"KT_KERNEL_KIND=both.*vector, tile"):
        variant.kernel_kind()


WRONG = [
    (
        {"KT_KERNEL_CPU_VARIANT": "sse2"},
        "KT_KERNEL_CPU_VARIANT=sse2 is not an instruction set; accepted on this CPU: ",
    ),
    ({"KT_KERNEL_KIND": "both"}, "KT_KERNEL_KIND=both; accepted: vector, tile, or unset"),
]
if "amx" not in variant.native().kernel_tables():
    WRONG.append(({"KT_KERNEL_CPU_VARIANT": "amx"}, "KT_KERNEL_CPU_VARIANT=amx is above this CPU"))


@pytest.mark.parametrize(("variables", "text"), WRONG)
def test_variables_are_checked_at_import(variables, text):
    """With one line in the end, and where engines would swallow it with that line alone."""
    done = python("import kt_kernel", **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {text}")
    assert "During handling" not in done.stderr and "caused" not in done.stderr
    engine = "import sys; sys.modules['vllm.plugins'] = sys; sys.argv += ['--kt-method', 'BF16']"
    plugin = "\ntry: import kt_kernel\nexcept Exception: pass"
    done = python(engine + plugin, **variables)
    assert done.returncode == 1
    unseen = engine.replace("--kt", "--no") + "\nimport kt_kernel; print('loaded')"
    assert python(unseen, **variables).stdout == "loaded\n"  # options are checked with them
    command = run(str(Path(sys.executable).with_name("kt")), "version", **variables)
    assert command.returncode == 1
    for stderr in (done.stderr, command.stderr):
        assert stderr.startswith(f"kt: error: {text}") and stderr.count("\n") == 1


def test_debug_prints_at_import():
    lowered = {"KT_KERNEL_CPU_VARIANT": "avx2", "KT_KERNEL_KIND": "tile"}
    for variables, chosen in (
        (
            {},
            f"selected {variant.native().kernel_tables()[0]} kernels, vector and tile "
            "(automatically)",
        ),
        (lowered, "selected avx2 kernels, tile (KT_KERNEL_CPU_VARIANT=avx2, KT_KERNEL_KIND=tile)"),
    ):
        done = python(
            "import kt_kernel; kt_kernel.cpu_features()", KT_KERNEL_DEBUG="1", **variables
        )
        found, *others = done.stderr.splitlines()
        assert done.returncode == 0 and done.stdout == ""
        assert found.startswith(f"kt_kernel: {variant.native().cpu_brand()}; kernel tables ")
        assert others == [f"kt_kernel: {chosen}"]


def test_platform_floor(monkeypatch, tmp_path):
    variant.check_platform()
    monkeypatch.setattr(variant.platform, "machine", lambda: "aarch64")
    with pytest.raises(ImportError, match="this is Linux aarch64"):
        variant.check_platform()
    monkeypatch.undo()
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 fma f16c\n")
    monkeypatch.setattr("builtins.open", lambda *a, _open=open, **k: _open(cpuinfo, **k))
    with pytest.raises(ImportError, match="lacks BMI2$"):
        variant.check_platform()


def run(*command, **variables):
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=120
    )


def python(code, **variables):
    return run(sys.executable, "-c", code, **variables)


def test_import_is_light_and_names_resolve():
    """It loads the compiled core only where there is something to check or to print."""
    code = (
        "import sys, kt_kernel; assert not {'torch', 'kt_kernel._C'} & sys.modules.keys(); "
        "assert all(hasattr(kt_kernel, n) for n in kt_kernel.__all__ if 'cpu' not in n)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(AttributeError, match="nothing"):
        _ = kt_kernel.nothing
    with pytest.raises(ImportError):
        from kt_kernel import nothing  # noqa: F401
