"""What the plugins do without an engine: registering under faults, choosing, refusing."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import DEMO_MODEL, environment

import kt_kernel
import kt_kernel.plugin_entrypoints
from kt_kernel.options import KTOptions, OptionError
from kt_kernel.plugin_entrypoints import common, patches, sglang, vllm

CONFIG = SimpleNamespace(**json.loads((DEMO_MODEL / "config.json").read_text()))


# ---- faults of the installation

# An engine's way to load a plugin: it logs an exception and goes on.
LOAD = """
import importlib, sys, types
engine, module = sys.argv[1], {"vllm": "vllm.plugins", "sglang": "sglang.srt.plugins"}[sys.argv[1]]
if "ordinary" not in sys.argv:
    sys.modules[module] = types.ModuleType(module)
try:
    plugin = importlib.import_module(f"kt_kernel.plugin_entrypoints.{engine}")
    plugin.register()
except Exception as error:
    print("SWALLOWED", type(error).__name__)
print("SERVES")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's Python files, to be damaged."""
    home = tmp_path / "kt_kernel"
    for source, target in (
        (Path(kt_kernel.__file__).parent, home),
        (Path(kt_kernel.plugin_entrypoints.__file__).parent, home / "plugin_entrypoints"),
    ):
        target.mkdir()
        for file in (*source.glob("*.py"), *source.glob("_kt_moe_marker")):
            shutil.copyfile(file, target / file.name)
    return home


def load(package: Path, engine: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r})"
         + LOAD, engine, *arguments],
        capture_output=True, text=True, env=environment(PYTHONPATH="", **env), timeout=60,
    )  # fmt: skip


def replace_init(package: Path) -> str:
    (package / "__init__.py").write_text("")
    return "were replaced or removed by another distribution"


def remove_init(package: Path) -> str:
    (package / "__init__.py").unlink()
    return "were replaced or removed by another distribution"


def remove_marker(package: Path) -> str:
    (package / "_kt_moe_marker").unlink()
    return "were replaced or removed by another distribution"


def old_cpu(package: Path) -> str:
    text = "def check_platform():\n    raise ImportError('kt-moe needs\\na CPU with AVX2')\n"
    (package / "variant.py").write_text(text)
    return "kt-moe needs a CPU with AVX2"


def broken_options(package: Path) -> str:
    (package / "methods.py").write_text("")
    return "cannot import name"


FAULTS = [replace_init, remove_init, remove_marker, old_cpu, broken_options]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_start(fault: Callable, engine: str, package: Path) -> None:
    line = fault(package)
    for done in (
        load(package, engine, "--kt-num-gpu-experts", "3"),
        load(package, engine, "--kt_method=BF16"),
        load(package, engine, KT_CONFIG="{}"),
    ):
        assert done.returncode == 1 and "SERVES" not in done.stdout, done
        (last,) = [text for text in done.stderr.splitlines() if text.startswith("kt: error: ")]
        assert line in last, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", FAULTS)
def test_without_kt_options_a_fault_does_no_harm(
    fault: Callable, engine: str, package: Path
) -> None:
    fault(package)
    done = load(package, engine)
    assert done.returncode == 0 and "SERVES" in done.stdout, done


def test_an_ordinary_import_gets_an_ordinary_error(package: Path) -> None:
    old_cpu(package)
    done = load(package, "vllm", "ordinary", KT_CONFIG="{}")
    assert done.stdout.split() == ["SWALLOWED", "ImportError", "SERVES"], done


def test_conflict_is_told_by_the_engine_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that cannot be seen at registration still meet the problem."""

    def check() -> None:
        raise ImportError("replaced")

    monkeypatch.setattr(common._conflict, "check", check)
    installed: list[str] = []
    problem = common.install(
        "vLLM", lambda: installed.append("layer"), lambda: installed.append("arguments"), "x", _log
    )
    assert installed == ["arguments"] and "replaced" in problem


def test_arguments_that_cannot_be_hooked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(common.patches, "missing", lambda engine: [])

    def broken() -> None:
        raise AttributeError("from_cli_args")

    assert "(AttributeError: from_cli_args)" in common.install(
        "vLLM", lambda: None, broken, "x", _log
    )
    assert "vLLM runs without it" in caplog.text
    monkeypatch.setenv("KT_CONFIG", "{}")
    with pytest.raises(SystemExit, match="^kt: error: .*AttributeError: from_cli_args"):
        common.install("vLLM", lambda: None, broken, "x", _log)


@pytest.mark.parametrize(
    ("path", "device", "said"),
    [("t.json", "cpu", True), ("t.json", "cuda", False), ("", "cpu", False)],
)
def test_no_trace_of_a_cpu(
    path: str, device: str, said: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("KT_TRACE", path)
    common.warn_of_trace(device, _log)
    assert ("KT_TRACE: only a GPU's batches are traced" in caplog.text) == said


def test_missing_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "missing", lambda engine: ["a:b"])
    problem = common.install("SGLang", lambda: None, lambda: None, "c:", _log)
    assert "this SGLang lacks a:b, which the plugin needs" in problem


_log = logging.getLogger("kt test")


# ---- where the options come from


def test_choice_of_options(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    some = {"method": "BF16"}
    assert common.choose(None, _log) is None
    assert common.choose({}, _log) == KTOptions()
    monkeypatch.setenv("KT_CONFIG", "{}")
    assert common.choose(None, _log) == KTOptions()
    monkeypatch.setenv("KT_CONFIG", json.dumps(some))
    assert common.choose(None, _log) == common.choose(some, _log) == KTOptions(method="BF16")
    assert not caplog.text
    assert common.choose({"method": "AMXINT8"}, _log) == KTOptions(method="AMXINT8")
    assert "KT_CONFIG does not count beside the options given" in caplog.text
    monkeypatch.setenv("KT_CONFIG", "method=BF16")
    with pytest.raises(OptionError, match="KT_CONFIG 'method=BF16': not JSON"):
        common.choose(some, _log)


@pytest.mark.parametrize("text", ["{}", '{"method": "BF16"}'])
def test_environment_reaches_the_engine(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KT_CONFIG='{}' means what additional_config={"kt": {}} means."""
    monkeypatch.setenv("KT_CONFIG", text)
    arguments = SimpleNamespace(additional_config={"other": 1})
    vllm._take_environment(arguments)
    assert arguments.additional_config == {"other": 1, "kt": json.loads(text)}
    vllm._take_environment(arguments)  # a second time
    assert vllm.options_of(arguments) == KTOptions.from_mapping(json.loads(text))


# ---- configurations that are refused


def vllm_config(path: str = "", value: Any = None) -> SimpleNamespace:
    """What refuse_unsupported reads, with one attribute changed."""
    found = SimpleNamespace(
        model_config=SimpleNamespace(architectures=CONFIG.architectures, hf_text_config=CONFIG),
        device_config=SimpleNamespace(device_type="cuda"),
        **{
            name: SimpleNamespace()
            for name in ("parallel_config", "cache_config", "load_config", "offload_config")
        },
    )
    found.offload_config = SimpleNamespace(uva=SimpleNamespace(), prefetch=SimpleNamespace())
    *parents, name = path.split(".")
    place = found
    for parent in parents:
        place = getattr(place, parent)
    setattr(place, name, value)
    return found


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size 2: of several "),
        ("parallel_config.enable_eplb", True, "--enable-eplb: not supported together"),
        ("parallel_config.ubatch_size", 2, "--ubatch-size 2: not supported together"),
        ("lora_config", object(), "--enable-lora: not supported together"),
        ("speculative_config", object(), "--speculative-config: not supported together"),
        ("weight_transfer_config", object(), "--weight-transfer-config: the cold experts'"),
        ("model_config.enable_sleep_mode", True, "--enable-sleep-mode: the cold experts' weights"),
        ("model_config.model_impl", "transformers", "--model-impl transformers: only vLLM's own"),
        ("model_config.model_impl", "terratorch", "--model-impl terratorch: only vLLM's own"),
        ("model_config.quantization", "fp8", "a model quantised with fp8: name its folder with"),
        (
            "model_config.quantization",
            "awq",
            "a model quantised with awq: the hot experts' kernels",
        ),
        ("offload_config.uva.cpu_offload_gb", 0.5, "--cpu-offload-gb 0.5: both decide"),
        ("cache_config.cpu_offload_gb", 4, "--cpu-offload-gb 4: both decide"),
        ("offload_config.prefetch.offload_group_size", 8, "--offload-group-size 8: both decide"),
        ("offload_config.offload_backend", "prefetch", "--offload-backend prefetch: both decide"),
        ("load_config.load_format", "dummy", "--load-format dummy: the cold experts need"),
        ("load_config.load_format", "sharded_state", "--load-format sharded_state: the cold"),
        ("load_config.load_format", "tensorizer", "--load-format tensorizer: the cold experts"),
        ("model_config.architectures", ["Other"], "model class Other: not tested with kt-moe"),
        (
            "model_config.hf_text_config",
            SimpleNamespace(architectures=["Dense"], hidden_size=8),
            "model class Dense: its configuration has no number of experts",
        ),
    ],
)
def test_vllm_refuses(path: str, value: Any, line: str) -> None:
    error = error_of(vllm.refuse_unsupported, vllm_config(path, value), KTOptions())
    assert error.startswith(line) and "\n" not in error, error


def test_vllm_accepts() -> None:
    options = KTOptions(weight_path=str(DEMO_MODEL), num_gpu_experts=4)
    assert error_of(vllm.refuse_unsupported, vllm_config("x"), options) == ""
    graphs = vllm_config("model_config.enforce_eager", False)
    assert error_of(vllm.refuse_unsupported, graphs, options) == ""
    for format in common.LOAD_FORMATS:
        config = vllm_config("load_config.load_format", format)
        assert error_of(vllm.refuse_unsupported, config, options) == ""


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("pp_size", 2, "--pp-size 2: of several ranks kt-moe serves those of tensor parallelism"),
        ("attn_cp_size", 2, "--attn-cp-size 2: of several ranks"),
        ("moe_dp_size", 2, "--moe-dp-size 2: of several ranks"),
        ("enable_prefill_cp", True, "--enable-prefill-cp: of several ranks"),
        ("enable_lora", True, "--enable-lora: LoRA is not supported"),
        ("lora_paths", ["a=b"], "--lora-paths: LoRA is not supported"),
        ("cpu_offload_gb", 1, "--cpu-offload-gb 1: both decide"),
        ("model_impl", "transformers", "--model-impl transformers: only SGLang's own"),
        ("load_format", "dummy", "--load-format dummy: the cold experts need their weights"),
        ("load_format", "remote_instance", "--load-format remote_instance: the cold experts"),
        ("load_format", type("Loader", (), {}), "--load-format: the cold experts need"),
        ("weight_cache_mode", "daemon", "--weight-cache-mode daemon: the cache does not know"),
        ("startup_weight_load_mode", "overlap", "--startup-weight-load-mode overlap: the cold"),
        ("custom_weight_loader", ["a.b"], "--custom-weight-loader: the cold experts' weights"),
        ("enable_memory_saver", True, "--enable-memory-saver: the cold experts' weights"),
        ("enable_weights_cpu_backup", True, "--enable-weights-cpu-backup: the cold experts'"),
    ],
)
def test_sglang_refuses(field: str, value: Any, line: str) -> None:
    arguments = SimpleNamespace(**{"device": "cpu", field: value})
    error = error_of(sglang.refuse_unsupported, arguments, CONFIG, KTOptions())
    assert error.startswith(line) and "\n" not in error, error


@pytest.mark.parametrize("way", ["declared", "overridden", "published"])
@pytest.mark.parametrize("given", [False, True])
def test_shared_experts_stay_apart(
    way: str, given: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decided in the way of each version of SGLang, and only if it was not given."""
    decided: list[Any] = []

    def record(*arguments: Any, **fields: Any) -> None:
        decided.append((arguments, fields))

    class Context:
        override = staticmethod(record)

        @property
        def server_args(self) -> Any:
            if way != "published":
                raise ValueError("not set yet")
            return server_args

    server_args = SimpleNamespace(disable_shared_experts_fusion=given, override=record)
    overrides = SimpleNamespace(**{"declare_resolution": record} if way == "declared" else {})
    for name, module in {
        "sglang.srt.arg_groups": SimpleNamespace(overrides=overrides),
        "sglang.srt.runtime_context": SimpleNamespace(get_context=Context),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    caplog.set_level(logging.INFO)
    sglang._separate_shared_experts(server_args, server_args)
    arguments = (server_args, "kt") if way == "declared" else ("kt",)
    found = [] if given else [(arguments, {"disable_shared_experts_fusion": True})]
    assert decided == found
    assert caplog.text.count("--disable-shared-experts-fusion is set") == len(found)


@pytest.mark.parametrize(("hot", "refused"), [(0, True), (4, True), (16, False)])
def test_fusion_is_not_enforced_beside_cold_experts(hot: int, refused: bool) -> None:
    arguments = SimpleNamespace(device="cpu", enforce_shared_experts_fusion=True)
    options = KTOptions(num_gpu_experts=hot)
    error = error_of(sglang.refuse_unsupported, arguments, CONFIG, options)
    assert error.startswith("--enforce-shared-experts-fusion: a shared expert") == refused, error
    assert refused or not error


def test_sglang_checks_the_model(tmp_path: Path) -> None:
    arguments = SimpleNamespace(device="cpu")

    def error(options: KTOptions, config: Any = CONFIG) -> str:
        return error_of(sglang.refuse_unsupported, arguments, config, options)

    assert error(KTOptions(weight_path=str(DEMO_MODEL))) == ""
    assert error(KTOptions(weight_path=str(tmp_path))).startswith(f"--kt-weight-path {tmp_path}: ")
    nameless = SimpleNamespace(architectures=CONFIG.architectures, experts=8)
    assert "has no number of experts" in error(KTOptions(num_gpu_experts=9), nameless)
    inner = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"], text_config=CONFIG)
    assert "the model has 16 experts" in error(KTOptions(num_gpu_experts=99), inner)


# ---- the demo


def test_a_proxy_has_no_business_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    from kt_kernel import demo

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.handle_request, daemon=True).start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    url = f"http://127.0.0.1:{server.server_port}/health"
    with demo.local_http.open(url, timeout=10) as answer:
        assert answer.status == 200
    server.server_close()
