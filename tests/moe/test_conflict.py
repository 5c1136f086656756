import json
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


@pytest.mark.parametrize(
    ("direct_url", "found"),
    [
        ({"url": "file://{folder}/a%20b/kt_moe.whl"}, True),
        ({"url": "file://{folder}/a%20b", "dir_info": {}}, True),
        ({"url": "file://{folder}/gone"}, False),
        ({"url": "https://user:secret@files.example/kt_moe.whl"}, False),
        ({"url": 7}, False),
        ([], False),
        (None, False),  # from an index, or an installer that does not say
    ],
)
def test_the_repair_can_be_done(alone, monkeypatch, tmp_path, direct_url, found):
    """It names what kt-moe was installed from, not a package that no index may have."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "kt_moe.whl").touch()
    text = None
    if direct_url is not None:
        text = json.dumps(direct_url).replace("{folder}", str(tmp_path))

    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return text

    monkeypatch.setattr(_conflict.metadata, "distribution", lambda name: Distribution())
    monkeypatch.setattr(_conflict, "__file__", str(tmp_path / "_conflict.py"))
    line = _conflict.overwritten()
    assert "pip uninstall kt-kernel" in line and "\n" not in line
    assert not line.endswith("kt-moe") and "example" not in line
    if found:
        assert f"--no-deps '{tmp_path}/a b" in line
    else:
        assert "checkout or wheel" in line
