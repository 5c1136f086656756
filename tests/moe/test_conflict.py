import warnings
from importlib import metadata

import pytest

from kt_kernel import _conflict


@pytest.fixture
def alone(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_conflict.metadata, "version", version)


def test_silent_when_all_is_well(alone):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _conflict.check()


def test_the_other_distribution_is_named(monkeypatch):
    monkeypatch.setattr(_conflict.metadata, "version", lambda name: "0.7.2")
    with pytest.warns(RuntimeWarning, match=r"kt-kernel 0\.7\.2 .*uninstall kt-kernel"):
        _conflict.check()


@pytest.mark.parametrize("gone", ["marker", "init"])
def test_replaced_files(alone, monkeypatch, tmp_path, gone):
    (tmp_path / "__init__.py").write_text("" if gone == "init" else "_conflict.check()\n")
    if gone != "marker":
        (tmp_path / "_kt_moe_marker").write_text("")
    monkeypatch.setattr(_conflict, "__file__", str(tmp_path / "_conflict.py"))
    with pytest.raises(ImportError, match="pip uninstall kt-kernel"):
        _conflict.check()
