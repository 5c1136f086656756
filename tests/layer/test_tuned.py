"""What `kt tune` saves, and that starts use it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kt_kernel
from kt_kernel.serving import tuned
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare

DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
CONFIG = SimpleNamespace(**json.loads((DEMO_MODEL / "config.json").read_text()))
OPTIONS = {
    "num_gpu_experts": 5,
    "cpuinfer": 1,
    "method": "AMXINT8",
    "max_deferred_experts_per_token": 1,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "kt-moe" / "tuned"


def save(**options: Any) -> Path:
    return tuned.save(CONFIG, "cuda", options or OPTIONS, {"predicted": {"decode": 1.0}})


def start(device: str = "cuda", config: Any = CONFIG, **given: Any) -> KTOptions:
    return prepare(KTOptions.from_mapping(given), config, ServedModel("org/copy", device=device))


def used(options: KTOptions) -> dict[str, Any]:
    return {name: value for name, value in options.to_mapping().items() if name in OPTIONS}


def test_a_start_uses_what_is_saved(folder: Path) -> None:
    plain = start()
    path = save()
    assert path.parent == folder and path.name.startswith("qwen3_moe-")
    options = start()
    assert used(options) == OPTIONS and used(plain) == {"method": "INT4_G32"}
    assert str(path) in options.describe() and "num_gpu_experts 5" in options.describe()
    assert "kt tune" not in plain.describe()


def test_given_options_come_first() -> None:
    save()
    options = start(method="BF16", cpuinfer=2)
    assert used(options) == OPTIONS | {"method": "BF16", "cpuinfer": 2}
    for given in (
        {"num_gpu_experts": 0},
        {"gpu_experts_ratio": 0.5},
        {"gpu_experts_memory": "1GB"},
    ):
        assert start(**given).num_gpu_experts == given.get("num_gpu_experts")


def test_it_can_be_turned_off_and_required(folder: Path) -> None:
    with pytest.raises(OptionError, match="--kt-tuned on: nothing is saved .* run kt tune MODEL"):
        start(tuned="on")
    save()
    assert used(start(tuned="on")) == OPTIONS
    assert used(start(tuned="off")) == {"method": "INT4_G32"}


def test_results_that_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    save()
    fixed = ServedModel("org/copy", fixed_results=True)
    assert used(prepare(KTOptions(), CONFIG, fixed)) == {"method": "INT4_G32", "cpuinfer": 1}
    monkeypatch.setenv("KT_KERNEL_KIND", "vector")
    assert used(start()) == {"method": "INT4_G32", "cpuinfer": 1}


def test_another_model_machine_or_device(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path = save()
    none = {"method": "INT4_G32"}
    assert used(start(device="cpu")) == none
    other = SimpleNamespace(**vars(CONFIG) | {"num_hidden_layers": 7})
    assert used(start(config=other)) == none
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "machine_fingerprint", lambda: "another machine")
        assert used(start()) == none
    assert used(start()) == OPTIONS
    for damaged in ("", "[]", path.read_text().replace('"cpuinfer"', '"allow_untested"')):
        path.write_text(damaged)
        assert used(start()) == none


def test_what_contradicts_given_options_is_left_out() -> None:
    save(cpuinfer=1)
    assert start(threadpool_count=2, tuned="auto").cpuinfer is None


def test_quantised_models_have_their_own_file() -> None:
    quantised = SimpleNamespace(**vars(CONFIG) | {"quantization_config": {"quant_method": "fp8"}})
    assert tuned.path_of(CONFIG) != tuned.path_of(quantised)
    as_object = SimpleNamespace(
        **vars(CONFIG) | {"quantization_config": SimpleNamespace(quant_method="fp8")}
    )
    assert tuned.path_of(as_object) == tuned.path_of(quantised)


def test_only_known_options_are_saved() -> None:
    with pytest.raises(ValueError, match="allow_untested: not among"):
        save(allow_untested=True)
    with pytest.raises(OptionError, match="expected an integer"):
        save(cpuinfer=0)
