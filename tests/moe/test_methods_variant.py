import subprocess
import sys

import pytest

import kt_kernel
from kt_kernel import methods, variant


def test_tables_of_methods():
    assert len(set(kt_kernel.INFERENCE_METHODS)) == 16
    assert len(set(kt_kernel.SFT_METHODS)) == 17
    assert not set(kt_kernel.INFERENCE_METHODS) & set(kt_kernel.SFT_METHODS)
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


def test_import_is_light_and_names_resolve():
    code = (
        "import sys, kt_kernel; assert 'torch' not in sys.modules; "
        "assert all(hasattr(kt_kernel, n) for n in kt_kernel.__all__ if 'cpu' not in n)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = kt_kernel.nothing
    with pytest.raises(ImportError):
        from kt_kernel import nothing  # noqa: F401
