"""What `kt tune` saves, and that starts use it."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kt_kernel
from kt_kernel.runtime.gpu import GpuMemory
from kt_kernel.serving import tuned
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.serving.tuned import Need, Start
from kt_kernel.tuning.shape import as_config

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


GIB = 1 << 30
NEED = Need("vllm", "INT4_G32", total=80 * GIB, fixed=60 * GIB, token=1 << 20, context=8192)


def save(need: Need = NEED, **options: Any) -> Path:
    return tuned.save(CONFIG, "cuda", options or OPTIONS, {"predicted": {"decode": 1.0}}, need)


def start(
    device: str = "cuda",
    config: Any = CONFIG,
    start: Start | None = None,
    whole: Any = None,
    **given: Any,
) -> KTOptions:
    served = ServedModel("org/copy", device=device, start=start, whole=whole)
    return prepare(KTOptions.from_mapping(given), config, served)


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


def test_a_quantised_multimodal_model() -> None:
    """Its quantisation is beside the configuration of its language model, or in it; `kt tune` reads
    the whole file, and engines give both parts."""
    text, beside = vars(CONFIG), {"quantization_config": {"quant_method": "fp8"}}
    for content in ({"text_config": text, **beside}, {"text_config": text | beside}):
        tuned.save(as_config(content), "cuda", {"cpuinfer": 1}, {})
        language, whole = SimpleNamespace(**content["text_config"]), SimpleNamespace(**content)
        assert start(config=language, whole=whole, tuned="on").cpuinfer == 1
        other = SimpleNamespace(quantization_config={"quant_method": "awq"})
        text_alone = SimpleNamespace(**text)
        assert start(config=text_alone, whole=other).cpuinfer is None
        assert start(config=text_alone).cpuinfer is None


def test_a_language_model_without_a_type_of_its_own() -> None:
    """Engines give its part the type of its class, "..._text"."""
    text = {name: value for name, value in vars(CONFIG).items() if name != "model_type"}
    content = {"model_type": "qwen3_vl_moe", "text_config": text}
    tuned.save(as_config(content), "cuda", {"cpuinfer": 1}, {})
    language = SimpleNamespace(**text, model_type="qwen3_vl_moe_text")
    assert start(config=language, whole=SimpleNamespace(**content), tuned="on").cpuinfer == 1


def test_what_contradicts_given_options_is_left_out() -> None:
    save(cpuinfer=1)
    options = start(threadpool_count=2, tuned="auto")
    assert options.cpuinfer is None and "fewer threads than pools" in options.describe()
    with pytest.raises(OptionError, match="on: the saved options cannot be used: .*fewer threads"):
        start(threadpool_count=2, tuned="on")


def test_what_the_model_refuses_is_left_out() -> None:
    path = save()
    path.write_text(path.read_text().replace('"num_gpu_experts": 5', '"num_gpu_experts": 500'))
    options = start()
    assert used(options) == {"method": "INT4_G32"}
    assert "nothing taken of what kt tune saved, because of" in options.describe()
    assert "500" in options.describe()
    with pytest.raises(OptionError, match="on: the saved options cannot be used: .*500"):
        start(tuned="on")
    with pytest.raises(OptionError, match="--kt-num-gpu-experts 600"):  # that of the user
        start(num_gpu_experts=600)


def gpu(free: int, total: int) -> dict[str, Any]:
    """A GPU, in GiB."""
    return {"look": lambda: GpuMemory(free * GIB, total * GIB)}


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Start("vllm", 8192, 0.9), ""),
        (Start("vllm", 12 * 1024, 0.9), ""),  # 12 GiB are free beside 60
        (Start("vllm", 8192, None), ""),
        (Start("vllm", 12 * 1024 + 1, 0.9), "room for 8192 tokens of context, and not 12289"),
        (Start("vllm", 1024, 0.75), "more than 75.0% of the GPU"),
        (Start("vllm", 9000, None), ""),
        (Start("sglang", 8192, 0.9), "tuned for vllm"),
        (Start("vllm", 8192, 0.9, "--speculative-config"), "--speculative-config takes memory"),
        # 68 GiB are needed. The GPU may be another one of the same name, or a part of it, or used.
        (Start("vllm", 8192, 0.9, **gpu(79, 80)), ""),
        (Start("vllm", 8192, None, **gpu(79, 80)), ""),
        (Start("vllm", 8192, 0.9, **gpu(76, 76)), ""),
        (
            Start("vllm", 8192, 0.9, **gpu(40, 40)),
            "need 68GB, and the engine may take 90.0% of 40GB",
        ),
        (Start("vllm", 8192, None, **gpu(75, 75)), "may take 90.0% of 75GB; .* for a GPU of 80GB"),
        (Start("vllm", 8192, 0.9, **gpu(67, 80)), "need 68GB of the GPU, and 67GB are free"),
        (Start("vllm", 8192, None, **gpu(68, 80)), ""),
    ],
)
def test_hot_experts_that_might_not_fit_are_left_out(seen: Start, why: str) -> None:
    save(**OPTIONS | {"hot_format": "packed"})
    options = start(start=seen)
    assert (options.num_gpu_experts is None) == bool(why) and options.cpuinfer == 1
    assert (options.hot_format == "packed") == (not why)
    if why:
        assert re.search(why, options.describe()) and "cpuinfer 1" in options.describe()
        with pytest.raises(OptionError, match=f"on: the saved hot experts .*{why}"):
            start(start=seen, tuned="on")


def test_other_cold_experts_change_the_size_of_packed_hot_ones() -> None:
    save(**OPTIONS | {"hot_format": "packed", "method": "INT4_G32"})
    assert start(method="INT4_G32").num_gpu_experts == 5
    options = start(method="AMXINT8")
    assert options.num_gpu_experts is None and options.max_deferred_experts_per_token == 1
    assert "tuned with --kt-method INT4_G32" in options.describe()
    assert start(weight_path=str(DEMO_MODEL)).num_gpu_experts is None


def test_a_given_weight_path_has_its_own_method() -> None:
    save(method="AMXINT8")
    assert start(weight_path=str(DEMO_MODEL)).method == "INT4_G32"


def test_nothing_to_save_is_saved_too() -> None:
    tuned.save(CONFIG, "cuda", {}, {})
    assert used(start(tuned="on")) == {"method": "INT4_G32"}


@pytest.mark.parametrize("damaged", ['"total": "x"', '"totals": 1'])
def test_a_damaged_need(damaged: str) -> None:
    path = save()
    path.write_text(path.read_text().replace(f'"total": {80 * GIB}', damaged))
    assert used(start()) == {k: v for k, v in OPTIONS.items() if k != "num_gpu_experts"}


@pytest.mark.parametrize("kind", ["../../../elsewhere", "a/b", "..", ""])
def test_a_model_type_leads_to_no_other_folder(kind: str) -> None:
    config = SimpleNamespace(**vars(CONFIG) | {"model_type": kind})
    path = tuned.path_of(tuned.model_key(config))
    assert path.resolve().parent == (tuned.config_folder() / "tuned").resolve()
    assert not path.name.startswith(".")


def test_quantised_models_have_their_own_file() -> None:
    quantised = SimpleNamespace(**vars(CONFIG) | {"quantization_config": {"quant_method": "fp8"}})
    key = tuned.model_key(quantised)
    assert tuned.path_of(key) != tuned.path_of(tuned.model_key(CONFIG))
    for method in ("fp8", Enum("Method", {"FP8": "fp8"}, type=str).FP8):
        config = SimpleNamespace(quant_method=method)
        as_object = SimpleNamespace(**vars(CONFIG) | {"quantization_config": config})
        assert tuned.model_key(as_object) == key


def test_only_known_options_are_saved() -> None:
    with pytest.raises(ValueError, match="allow_untested: not among"):
        save(allow_untested=True)
    with pytest.raises(OptionError, match="expected an integer"):
        save(cpuinfer=0)
