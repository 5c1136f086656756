"""What the plugins do without an engine: registering under faults, choosing options, telling of
errors. What they do with an engine's objects is in vllm_hooks.py and sglang_hooks.py."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import environment

import kt_kernel
import kt_kernel.plugin_entrypoints
from kt_kernel.plugin_entrypoints import common, failure
from kt_kernel.plugin_entrypoints.vllm import options as vllm_options
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions

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
        for file in (*source.rglob("*.py"), *source.glob("_kt_moe_marker")):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return home


def load(package: Path, engine: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(package.parent)!r})" + LOAD,
            engine,
            *arguments,
        ],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH="", **env),
        timeout=60,
    )


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
    (package / "runtime" / "variant.py").write_text(text)
    return "kt-moe needs a CPU with AVX2"


def broken_options(package: Path) -> str:
    (package / "weights" / "methods.py").write_text("")
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
    problem = common.install("vLLM", lambda: installed.append("hooks"), _log)
    assert installed == ["hooks"] and "replaced" in problem


def test_hooks_that_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise AttributeError("from_cli_args")

    assert "(AttributeError: from_cli_args)" in common.install("vLLM", broken, _log)
    assert "vLLM runs without it" in caplog.text
    monkeypatch.setenv("KT_CONFIG", "{}")
    with pytest.raises(SystemExit, match="^kt: error: .*AttributeError: from_cli_args"):
        common.install("vLLM", broken, _log)


@pytest.mark.parametrize("variable", ["KT_TRACE", "KT_STATS_FILE"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("no/file", "its folder does not exist"), ("", "exists and is not a regular file")],
)
def test_files_of_variables_are_checked_at_the_start(
    variable: str, name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like those of options, and in the same words; without kt options, nothing is checked."""
    path = str(tmp_path / name)
    monkeypatch.setenv(variable, path)
    assert common.choose(None, _log) is None
    with pytest.raises(OptionError) as caught:
        common.choose({}, _log)
    assert str(caught.value) == f"{variable} {path}: {reason}"
    flag = "--record-kt-expert-routes"
    with pytest.raises(OptionError) as by_option:
        KTOptions.from_mapping({flag: path})
    assert str(by_option.value) == f"{flag} {path}: {reason}"
    monkeypatch.setenv(variable, str(tmp_path / "new"))
    assert common.choose({}, _log) == KTOptions() and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("path", "device", "said"),
    [("t.json", "cpu", True), ("t.json", "cuda", False), ("", "cpu", False)],
)
def test_no_trace_of_a_cpu(
    path: str,
    device: str,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KT_TRACE", path)
    common.warn_of_trace(device, _log)
    assert ("KT_TRACE is ignored: traces need a GPU" in caplog.text) == said


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
    assert "KT_CONFIG is ignored because kt options were given directly" in caplog.text
    monkeypatch.setenv("KT_CONFIG", "method=BF16")
    with pytest.raises(OptionError, match="KT_CONFIG 'method=BF16': not JSON"):
        common.choose(some, _log)


@pytest.mark.parametrize("text", ["{}", '{"method": "BF16"}'])
def test_environment_reaches_the_engine(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KT_CONFIG='{}' means what additional_config={"kt": {}} means."""
    monkeypatch.setenv("KT_CONFIG", text)
    arguments = types.SimpleNamespace(additional_config={"other": 1})
    vllm_options.take_environment(arguments)
    assert arguments.additional_config == {"other": 1, "kt": json.loads(text)}
    vllm_options.take_environment(arguments)  # a second time
    assert vllm_options.options_of(arguments) == KTOptions.from_mapping(json.loads(text))


def test_streaming_needs_a_gpu() -> None:
    common.refuse_streaming("cuda", KTOptions(gpu_prefill_memory=3 << 29))
    common.refuse_streaming("cpu", KTOptions(gpu_prefill_token_threshold=0))
    for given, flag in (
        ({"gpu_prefill_memory": 3 << 29}, "--kt-gpu-prefill-memory 1.5GB"),
        ({"gpu_prefill_token_threshold": 512}, "--kt-gpu-prefill-token-threshold 512"),
    ):
        with pytest.raises(OptionError, match=f"^{flag}: .* the engine's device is cpu"):
            common.refuse_streaming("cpu", KTOptions(**given))


def test_untested_classes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, untested = KTOptions(), KTOptions(allow_untested=True)
    monkeypatch.setitem(common.TESTED_LAYERS, "vLLM", ("AfmoeForCausalLM", "PartForCausalLM"))
    common.refuse_class(["AfmoeForCausalLM"], options, "vLLM", _log)
    assert caplog.text == ""
    common.refuse_class(["PartForCausalLM"], options, "vLLM", _log)
    assert "PartForCausalLM was tested in vLLM by its MoE layers alone" in caplog.text
    for engine, name in (("SGLang", "JambaForCausalLM"), ("vLLM", "OtherForCausalLM")):
        common.refuse_class([name], untested, engine, _log)
        with pytest.raises(OptionError) as caught:
            common.refuse_class([name], options, engine, _log)
        line = f"model class {name} was not tested with kt-moe in {engine}; tested: "
        assert str(caught.value).startswith(line + common.models_tested_in(engine)[0])
        assert "kt model check" in str(caught.value)


# ---- errors of an engine's processes


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process is the one that the user started; the file for errors."""
    monkeypatch.delenv(failure.VARIABLE, raising=False)
    failure.listen()
    path = _file()
    yield path
    path.unlink(missing_ok=True)


def _file() -> Path:
    return Path(os.environ[failure.VARIABLE].partition(":")[2])


ENGINE = types.ModuleType("fake_engine")  # its functions have its name, as an engine's do
exec(
    """
def call(function):
    function()

def fail(function=None):
    raise ValueError("the engine's own")

def wrap(function):
    try:
        function()
    except Exception as error:
        raise RuntimeError("a worker failed") from error
""",
    ENGINE.__dict__,
)


def ours(error: Exception | None = None) -> None:
    """Raises in a function of our package."""
    error = error or ValueError("bad  weights\nin layer 3")
    code = "def f(error):\n    raise error\n"
    module = {"__name__": "kt_kernel.checkpoint.made_up"}
    exec(code, module)
    module["f"](error)


def within(wrapper: Callable, function: Callable) -> Exception:
    """What comes out of ``wrapper(function)``."""
    try:
        wrapper(function)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def ending(error: Exception, line: Any) -> None:
    """In a child process: puts how it ended on a queue."""
    try:
        failure.end(error, "fake_engine")
        line.put("returned")
    except SystemExit as stopped:
        line.put(str(stopped))


def in_child(error: Exception) -> str:
    context = multiprocessing.get_context("fork")
    line = context.SimpleQueue()
    child = context.Process(target=ending, args=(error, line))
    child.start()
    child.join()
    return line.get()


LINE = "kt: error: bad weights in layer 3"


@pytest.mark.parametrize("wrapper", [ENGINE.call, ENGINE.wrap])
def test_an_error_of_ours_ends_the_first_process(
    wrapper: Callable, listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, by the first process that found one, wherever the engine caught it."""
    assert failure.reported() == ""
    failure.repeat()
    assert in_child(within(wrapper, ours)) == LINE
    assert in_child(within(wrapper, lambda: ours(OSError("later")))) == "kt: error: later"
    assert failure.reported() == LINE
    with pytest.raises(failure.StartError) as caught:
        failure.repeat()
    assert str(caught.value) == LINE
    with pytest.raises(SystemExit) as stopped, monkeypatch.context() as silence:
        silence.setattr(failure, "_say_nothing_more", lambda: None)
        failure.repeat(command_line=True)
    assert stopped.value.code == LINE
    failure.listen()  # for the next engine
    assert failure.reported() == "" and listening.exists()


def test_an_error_that_the_engine_waits_for_is_reported_only(listening: Path) -> None:
    environ = os.environ[failure.VARIABLE]
    os.environ[failure.VARIABLE] = f"1:{listening}"  # the first process is another one
    failure.end(within(ENGINE.call, ours), "fake_engine", exits=False)
    os.environ[failure.VARIABLE] = environ
    assert failure.reported() == LINE


def test_workers_confirm(listening: Path) -> None:
    assert failure.confirmed() == 0
    failure.confirm()
    failure.confirm()
    assert failure.confirmed() == 2 and failure.reported() == ""
    failure.listen()
    assert failure.confirmed() == 0
    failure.started()
    assert not listening.exists()
    failure.listen()
    failure.confirm()
    assert failure.confirmed() == 1
    _file().unlink()  # the temporary folder was cleared
    failure.listen()
    failure.confirm()
    assert failure.confirmed() == 1
    _file().unlink()


def test_an_error_of_ours_in_the_first_process_is_an_exception(listening: Path) -> None:
    cause = within(ENGINE.call, ours)
    with pytest.raises(failure.StartError) as caught:
        failure.end(cause, "fake_engine")
    assert str(caught.value) == LINE and caught.value.__cause__ is cause
    failure.end(caught.value, "fake_engine")  # further up


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (KeyError("tensor 'a' is missing"), "kt: error: tensor 'a' is missing"),
        (RuntimeError("kt: layer 3: no"), "kt: error: layer 3: no"),
        (MemoryError(), "kt: error: MemoryError"),
        (failure.StartError(LINE), "returned"),
    ],
)
def test_lines_of_errors(raised: Exception, line: str, listening: Path) -> None:
    assert in_child(within(ENGINE.call, lambda: ours(raised))) == line


@pytest.mark.parametrize("function", [ENGINE.fail, lambda: ENGINE.call(ENGINE.fail)])
def test_an_error_of_the_engine_stays_its_own(function: Callable, listening: Path) -> None:
    def through_us() -> None:
        exec("f()", {"__name__": "kt_kernel.plugin_entrypoints.made_up", "f": function})

    assert in_child(within(ENGINE.call, through_us)) == "returned"
    assert failure.reported() == ""


def test_the_file_for_errors_is_private_and_goes_with_its_process() -> None:
    code = (
        "import os; from kt_kernel.plugin_entrypoints import failure; failure.listen(); "
        "path = os.environ[failure.VARIABLE].partition(':')[2]; "
        "print(path, oct(os.stat(path).st_mode & 0o777))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    path, mode = done.stdout.split()
    assert mode == "0o600" and not os.path.exists(path), done


LEAKS = """
import logging, multiprocessing, os, sys
from kt_kernel.plugin_entrypoints import failure

def leak():
    from multiprocessing import shared_memory
    shared_memory.SharedMemory(create=True, size=8)
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    failure.listen()
    child = multiprocessing.get_context("spawn").Process(target=leak)
    child.start()
    child.join()
    try:
        failure.stop("the last line", command_line=True)
    finally:
        logging.info("the engine ends its processes")
"""


def test_the_line_is_the_last_one(tmp_path: Path) -> None:
    """Though a process was killed that had shared memory, and though the engine goes on logging."""
    (tmp_path / "leaks.py").write_text(LEAKS)
    done = subprocess.run(
        [sys.executable, tmp_path / "leaks.py"], capture_output=True, text=True, timeout=60
    )
    lines = done.stderr.splitlines()
    assert lines[-1] == "kt: error: the last line" and done.returncode == 1, done
    assert any("leaked shared_memory" in line for line in lines[:-1])


def test_without_a_place_for_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine starts all the same."""
    monkeypatch.delenv(failure.VARIABLE, raising=False)

    def full(**given: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(failure.tempfile, "mkstemp", full)
    failure.listen()
    assert failure.VARIABLE not in os.environ and failure.reported() == ""
    failure.confirm()
    assert failure.confirmed() == -1
    with pytest.raises(failure.StartError, match=LINE):
        failure.end(within(ENGINE.call, ours), "fake_engine")


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
