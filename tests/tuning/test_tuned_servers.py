"""The servers that kt tune starts: their commands, their failures, and what their times say."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_time_model import LAYERS, SHAPE
from transformers import AutoConfig

from kt_kernel.serving import server_process
from kt_kernel.serving.server_process import ServerFailed
from kt_kernel.tuning.arguments import changes_of, check_arguments, not_predicted, ranks_of
from kt_kernel.tuning.engine import USUAL, Server, ServerPlan, measure_engine, serving
from kt_kernel.tuning.model import Load, Setting, TimeModel
from kt_kernel.tuning.rates import CpuRates, EngineRates, GpuRates
from kt_kernel.tuning.shape import as_config, shape_of
from kt_kernel.tuning.small_engine import first_layers, small_shape


def test_commands() -> None:
    options = {"num_gpu_experts": 32, "method": "AMXINT8"}
    plan = ServerPlan("vllm", "org/my model", 4096, 4, options=options, more=("--enforce-eager",))
    assert plan.shown() == (
        "vllm serve 'org/my model' --max-model-len 4096 --max-num-seqs 4 --kt-num-gpu-experts 32 "
        "--kt-method AMXINT8 --enforce-eager"
    )
    setting = ("--compilation-config", '{"mode": 0, "sizes": [1, 4]}')  # keeps its quotes
    assert shlex.split(replace(plan, more=setting).shown())[-2:] == list(setting)
    shown = plan.command(8123)
    assert shown[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    assert shown[shown.index("--port") + 1] == "8123" and "--load-format" not in shown
    # What an earlier run saved must not change what is measured.
    assert shown[shown.index("--kt-tuned") + 1] == "off" and "--kt-tuned" not in plan.shown()
    # Nor may the place that users give their servers: this one is asked here.
    others = "--port 80 --host 0.0.0.0 --served-model-name a b --api-key secret"
    at_home = replace(plan, more=tuple(others.split()))
    assert at_home.command(8123)[-8:] == shown[-8:] and at_home.shown().endswith(others)
    assert shlex.join(shown[-8:]).startswith("--host 127.0.0.1 --port 8123 --served-model-name ")
    small = ServerPlan(
        "sglang", "m", 4096, 16, "cpu", memory=0.5, overrides={"num_hidden_layers": 2}
    ).command(1)
    assert small[small.index("--json-model-override-args") + 1] == '{"num_hidden_layers": 2}'
    assert small[small.index("--load-format") + 1] == "dummy"
    assert small[small.index("--mem-fraction-static") + 1] == "0.500"
    assert small[small.index("--device") + 1] == "cpu" and "--kt-tuned" not in small


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")]
)
def test_the_users_changes_of_a_model_stay_with_fewer_layers(engine: str, flag: str) -> None:
    changes = {"max_position_embeddings": 1 << 20, "num_hidden_layers": 9}
    text, first = json.dumps(changes), {"num_hidden_layers": 3}
    for more in ([flag, text], [f"{flag}={text}"], [flag, "{}", "--other", flag, text]):
        command = ServerPlan(engine, "m", 64, 1, overrides=first, more=tuple(more)).command(1)
        assert json.loads(last(command, flag)) == changes | first
    command = ServerPlan(engine, "m", 64, 1, overrides=first).command(1)
    assert json.loads(last(command, flag)) == first
    for given, said in (([flag], "valid JSON"), ([flag, "{"], "JSON"), ([flag, "[1]"], "object")):
        with pytest.raises(ValueError, match=f"^--engine-args {flag} .*{said}"):
            changes_of(engine, given)


def last(command: list[str], flag: str) -> str:
    """The value that counts."""
    return command[len(command) - command[::-1].index(flag)]


def overrides_of_vllm(command: list[str]) -> dict[str, Any]:
    """What vLLM makes of --hf-overrides.KEY: an object of all of them, behind all arguments."""
    found: dict[str, Any] = {}
    words = iter(command)
    for word in words:
        name, sign, value = word.partition("=")
        if name.replace("_", "-").startswith("--hf-overrides.") and "." in name:
            *path, key = name.partition(".")[2].removesuffix("+").split(".")
            value = value if sign else next(words)
            place = found
            for part in path:
                place = place.setdefault(part, {})
            new = value.split(",") if name.endswith("+") else json.loads(value)
            place[key] = place[key] + new if isinstance(place.get(key), list) else new
    return found or json.loads(last(command, "--hf-overrides"))


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--hf-overrides.max_position_embeddings", "99"], {"max_position_embeddings": 99}),
        (["--hf_overrides.rope.factor=2.5"], {"rope": {"factor": 2.5}}),
        (["--hf-overrides.num_hidden_layers", "9", "--enforce-eager"], {}),
        (["--hf-overrides.layer_types", '["a"]', "--hf-overrides.layer_types+=b"], {}),
        (["--hf-overrides.a+", "b,c", "--hf-overrides.a+=d"], {"a": ["b", "c", "d"]}),
        (["--hf-overrides", '{"dropped": 1}', "--hf-overrides.a=1", "-x"], {"a": 1}),
        (["--hf-overrides", '{"a": 1.5}', "--other.a", "1"], {"a": 1.5}),
    ],
)
def test_changes_by_single_keys(more: list[str], wanted: dict[str, Any]) -> None:
    """They took the place of the changes that make the model small."""
    first = {"num_hidden_layers": 2, "layer_types": ["x", "y"]}
    command = ServerPlan("vllm", "m", 64, 1, overrides=first, more=tuple(more)).command(1)
    assert overrides_of_vllm(command) == first | wanted
    assert changes_of("vllm", more) == overrides_of_vllm(more)
    assert changes_of("sglang", more) == {}
    for word in ("--enforce-eager", "-x", "--other.a"):
        assert (word in command) == (word in more)


@pytest.mark.parametrize(
    ("engine", "given", "reason"),
    [
        ("vllm", "--max-model 9", "an abbreviation; write --max-model-len"),
        ("vllm", "--hf_over={}", "an abbreviation; write --hf-overrides"),
        ("vllm", "--hf-o.key 9", "an abbreviation; write --hf-overrides"),
        (
            "vllm",
            "--max-num 9",
            "an abbreviation; write --max-num-batched-tokens or --max",
        ),
        ("vllm", "--model other", "kt tune gives it by its own argument MODEL"),
        ("vllm", "--config file", "kt tune does not read it"),
        ("vllm", '--additional-config.kt.method="BF16"', "kt tune chooses kt options"),
        ("sglang", "--context-l=9", "an abbreviation; write --context-length"),
        ("sglang", "--chunked 9", "an abbreviation; write --chunked-prefill-size"),
        ("sglang", "--model-path other", "kt tune gives it by its own argument MODEL"),
        ("sglang", "--config file", "kt tune does not read it"),
        ("sglang", "--device cpu -- --tp 2 --model-impl x --chunked-prefill-size 9", ""),
        ("vllm", "--model-impl x --config-format y --hf-overrides.key 9 --max-logprobs 9", ""),
    ],
)
def test_arguments_that_kt_tune_cannot_have(engine: str, given: str, reason: str) -> None:
    words = given.split()
    if not reason:
        check_arguments(engine, words)
        return
    with pytest.raises(ValueError, match=f"^--engine-args {re.escape(words[0])}: {reason}"):
        check_arguments(engine, words)


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_oss", "qwen3_moe"])
def test_the_first_layers_of_a_model(model_type: str) -> None:
    """transformers accepts the configuration with fewer layers, also when it is read again."""
    config = AutoConfig.for_model(model_type)
    changes = first_layers(config.to_dict(), 3)
    config.update(changes)
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.num_hidden_layers == 3
    types = getattr(again, "layer_types", None)
    assert types is None or types == type(config)().layer_types[:3]
    assert set(changes) <= {"num_hidden_layers", "layer_types", "mlp_only_layers"}


def test_the_first_layers_of_a_model_whose_kinds_are_a_text() -> None:
    """As Nemotron-H's are published."""
    content = {"hybrid_override_pattern": "M*EM", "num_hidden_layers": 4, "num_layers": 4}
    changes = first_layers(content, 3)
    config = AutoConfig.for_model("nemotron_h", **content | changes)
    assert config.num_hidden_layers == 3 and config.hybrid_override_pattern == "M*E"
    assert changes.keys() == {"hybrid_override_pattern", "num_hidden_layers"}


def test_the_first_layers_of_a_model_without_their_number() -> None:
    """As transformers 5 writes Nemotron-H's."""
    written = AutoConfig.for_model("nemotron_h", hybrid_override_pattern="M*EM").to_diff_dict()
    assert "num_hidden_layers" not in written and "hybrid_override_pattern" not in written
    config = AutoConfig.for_model(**written | first_layers(written, 3))
    assert config.num_hidden_layers == 3 and config.hybrid_override_pattern == "M*E"


def test_a_server_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "print('ValueError: the reason');"
        "print('RuntimeError: Engine core initialization failed. See root cause above.');"
        "print('WARNING 11-30 16:43:58 [utils.py:255] This can cause OSError: too many files');"
        "raise SystemExit(3)"
    )
    monkeypatch.setattr(ServerPlan, "command", lambda plan, port: [sys.executable, "-c", program])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plan = ServerPlan("vllm", "m", 64, 1)
    with (
        pytest.raises(ServerFailed, match="exited with code 3: ValueError: the reason; its log is"),
        serving(plan, 256, tmp_path / "log", {}),
    ):
        pass
    (kept,) = tmp_path.glob("kt-tune-vllm-*.log")
    assert "Engine core" in kept.read_text()


def test_arguments_that_an_engine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser's line says why, and not what follows it."""
    program = (
        "print('main.py serve: error: argument --number: invalid value');"
        "print('    For further information, see the manual');"
        "raise SystemExit(2)"
    )
    monkeypatch.setattr(ServerPlan, "command", lambda plan, port: [sys.executable, "-c", program])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(ServerFailed, match="code 2: main.py serve: error: argument --number: inv"),
        serving(ServerPlan("vllm", "m", 64, 1), 256, tmp_path / "log", {}),
    ):
        pass


@pytest.fixture
def requests() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            key = self.headers["Authorization"]
            asked.append(json.loads(self.rfile.read(size)) | {"path": self.path, "key": key})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests(requests: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = requests
    server = Server(url, vocabulary=256, group=0)
    assert server.prefill(20) > 0
    assert {(len(one["prompt"]), one["max_tokens"]) for one in asked} == {(20, 1)}
    command = ServerPlan("vllm", "m", 64, 1).command(1)
    assert {one["key"] for one in asked} == {f"Bearer {last(command, '--api-key')}"}
    prompts = [tuple(one["prompt"]) for one in asked]
    assert len(set(prompts)) == len(prompts)  # none is in a prefix cache
    assert all(3 <= token < 256 for prompt in prompts for token in prompt)
    asked.clear()
    server.decode(streams=3, context=5, steps=10)
    assert [one["max_tokens"] for one in asked] == [8] * 3 + ([1] * 3 + [11] * 3) * 3
    assert all(one["ignore_eos"] and one["path"] == "/v1/completions" for one in asked)


_ENGINE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("ValueError: out of luck", flush=True)
        {then}
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An engine that answers /health, and does something else with requests."""
    started: list[int] = []

    def ready(then: str) -> ServerPlan:
        program = _ENGINE.format(then=then)
        monkeypatch.setattr(
            ServerPlan, "command", lambda plan, port: [sys.executable, "-c", program, str(port)]
        )
        return ServerPlan("vllm", "m", 64, 1)

    popen = server_process.subprocess.Popen

    def watched(*given: Any, **named: Any) -> Any:
        process = popen(*given, **named)
        started.append(process.pid)
        return process

    monkeypatch.setattr(server_process.subprocess, "Popen", watched)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield ready
    assert len(started) == 1 and not Path(f"/proc/{started[0]}").exists()


@pytest.mark.parametrize(
    ("then", "said"),
    [
        # The second one, if the server had not read all of the request.
        ("os._exit(1)", "(Remote end closed connection|Connection reset by peer)"),
        ("self.send_error(400, 'Bad', 'too <long')", "HTTP Error 400: Bad: .*too &lt;long"),
    ],
)
def test_an_engine_that_fails_while_it_is_timed(
    engine: Any, then: str, said: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ServerFailed, match=f"{said}.*: ValueError: out of luck; its log is"),
        serving(engine(then), 256, tmp_path / "log", {}) as server,
    ):
        server.prefill(4)


def test_a_server_that_takes_long_to_start(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each minute says what is waited for."""
    said: list[str] = []

    def wait(process: Any, url: str, timeout: float, waiting: Any) -> None:
        for second in range(200):
            waiting(second + 0.5)

    monkeypatch.setattr("kt_kernel.tuning.engine.wait_until_healthy", wait)
    with serving(engine("pass"), 256, tmp_path / "log", {}, said.append):
        pass
    assert [line.split(";")[0] for line in said] == [
        f"waiting for vllm for {seconds} s" for seconds in (60, 120, 180)
    ]


def test_an_interrupt_does_not_wait_for_requests(engine: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        serving(engine("__import__('time').sleep(60)"), 256, tmp_path / "log", {}) as server,
    ):
        main = threading.main_thread().ident
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        server.decode(2, 4)
    assert time.monotonic() - begin < 30


def test_an_engine_measured_with_few_layers() -> None:
    """A host with 1 ms for a step and 4.5 for each layer, and a GPU at a fifth of its rate."""

    class Known:
        def decode(self, streams: int, context: int) -> float:
            return 1e-3 + 1e-5 * streams

        def prefill(self, tokens: int) -> float:
            return self.decode(1, 32) + max(9e-3, 2 * sum(flops(tokens)) / (0.2 * 5e14))

    def flops(tokens: int) -> tuple[float, float]:
        return 0.7e9 * tokens, 0.3e9 * tokens

    server: Any = Known()
    # A long prompt that takes as long as a short one says nothing of the GPU.
    found = measure_engine("vllm", server, 2, flops, 5e14, lambda n: 1e-4 * n, 400)
    assert found.share == USUAL["vllm"].share
    # With 16 streams the GPU takes longer, and nothing is known of the host.
    assert [n for n, _ in found.step] == [1, 4]
    found = measure_engine("vllm", server, 2, flops, 5e14, lambda n: 0.0, 8192)
    assert found.measured and found.share == pytest.approx(0.2)
    # Attention that grows as the rest does, or that there is none of, has no rate of its own.
    found = measure_engine("vllm", server, 2, flops, 5e14, lambda n: 0.0, 32768)
    assert found.share == pytest.approx(0.2) and found.attention is None
    alone = measure_engine(
        "vllm", server, 2, lambda n: (sum(flops(n)), 0.0), 5e14, lambda n: 0.0, 32768
    )
    assert alone == found
    assert found.host_step(1) == pytest.approx(1.01e-3)
    assert found.host_step(16) == pytest.approx(1.16e-3)
    assert found.launch == pytest.approx(4.5e-3)


def test_an_engine_is_measured_once_its_steps_are_short() -> None:
    """The first steps take longer: 2.4, 2.0, 1.9 ms and then 1.8."""

    class Settling:
        steps = [1.8e-3] * 20 + [1.9e-3, 2e-3, 2.4e-3]

        def decode(self, streams: int, context: int) -> float:
            return self.steps.pop() + 1e-5 * streams

        def prefill(self, tokens: int) -> float:
            return 5e-3

    server: Any = Settling()
    found = measure_engine("sglang", server, 2, lambda n: (1.0, 0.0), 5e14, lambda n: 0.0, 400)
    assert found.host_step(1) == pytest.approx(1.81e-3)
    assert found.host_step(4) == pytest.approx(1.84e-3)


def test_attention_has_a_rate_of_its_own() -> None:
    """A GPU that reaches 40% of its rate, and 10% in attention: what is predicted for other lengths
    is what such a GPU takes, added up batch by batch and token by token."""
    gpu = GpuRates("GPU", 80 << 30, ((1, 0.0),), 0.0, 2e12, 5e14, 50e9, ((1, 0.0),))
    shape = replace(SHAPE, moe_layers=tuple(range(LAYERS)), attention=4096.0)
    weights = shape.layer_bytes / 2 / LAYERS + shape.top_k * shape.expert_weights
    step, launch = 1e-3, 1e-5

    def taken(tokens: int) -> float:
        seconds = 0.0
        for begin in range(0, tokens, 8192):
            batch = range(begin, min(begin + 8192, tokens))
            attention = 4 * 4096 * sum(before + 0.5 for before in batch) / (0.1 * 5e14)
            products = 2 * weights * len(batch) / (0.4 * 5e14)
            seconds += step + LAYERS * max(launch, products + attention)
        return seconds

    class Known:
        def decode(self, streams: int, context: int) -> float:
            return step

        prefill = staticmethod(taken)

    def measured(longest: int) -> EngineRates:
        server: Any = Known()
        model = TimeModel(shape, gpu, USUAL["vllm"], 0)
        return measure_engine(
            "vllm", server, LAYERS, model.operations, gpu.flops, lambda n: 0.0, longest
        )

    found = measured(32768)
    assert found.attention is not None
    assert (found.share, found.attention) == pytest.approx((0.4, 0.1), rel=1e-3)
    nothing = CpuRates("", None, 0, ((1, 0.0),), ((1, 0.0),))
    hot = Setting(Load.uniform(shape, shape.experts), nothing, 0.0)
    for tokens in (2048, 8192, 20000, 32768, 131072):
        predicted = TimeModel(shape, gpu, found, 0).prefill(hot, tokens)
        assert predicted == pytest.approx(taken(tokens), rel=1e-3), tokens
    # One rate for both says too little of a long prompt, and is right where it was measured.
    one = measured(8192)
    assert one.attention is None
    single = TimeModel(shape, gpu, one, 0)
    assert single.prefill(hot, 8192) == pytest.approx(taken(8192), rel=1e-3)
    assert single.prefill(hot, 131072) < 0.8 * taken(131072)


def test_usual_times_of_a_long_prompt() -> None:
    """vLLM with all experts on an H200, as it was timed."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    saved = json.loads((results / "tune" / "2026-11-30-vllm-h200.json").read_text())
    rates = {
        name: tuple(map(tuple, value)) if isinstance(value, list) else value
        for name, value in saved["device"].items()
    }
    rows = json.loads((results / "2026-11-29-prompts-vllm-h200.json").read_text())["rows"]
    (stock,) = (row for row in rows if row["method"] == "stock")
    content = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32768,
        "decoder_sparse_step": 1,
    }
    shape = shape_of("model", as_config(content))
    model = TimeModel(shape, GpuRates(**rates), USUAL["vllm"])
    nothing = CpuRates("", None, 0, ((1, 0.0),), ((1, 0.0),))
    hot = Setting(Load.uniform(shape, 128), nothing, 0.0)
    for tokens in (8192, 32768):
        took = sorted(stock["prompts"][str(tokens)]["shared"]["seconds"])[1]
        assert model.prefill(hot, tokens) == pytest.approx(took, rel=0.05), tokens


@pytest.mark.parametrize(("layers_that_fit", "with_experts"), [(0, 2), (4.5, 4), (100, 5)])
def test_layers_of_the_measured_engine(layers_that_fit: float, with_experts: int) -> None:
    """As many as fit into half of the memory: two to eight, or all that the model has."""
    layer = 2 * SHAPE.expert_weights * SHAPE.experts
    part = small_shape(SHAPE, 2 * layers_that_fit * layer)
    dense = SHAPE.layers - len(SHAPE.moe_layers)
    assert part.layers == dense + with_experts
    assert part.moe_layers == SHAPE.moe_layers[:with_experts]
    assert part.layer_bytes / part.layers == SHAPE.layer_bytes / SHAPE.layers


def test_layers_with_experts_between_others() -> None:
    every_other = replace(SHAPE, layers=20, moe_layers=tuple(range(1, 20, 2)))
    layer = 2 * SHAPE.expert_weights * SHAPE.experts
    part = small_shape(every_other, 6 * layer)
    assert (part.layers, part.moe_layers) == (6, (1, 3, 5))


@pytest.mark.parametrize(
    ("engine", "given", "ranks", "said"),
    [
        ("vllm", "", 1, []),
        ("vllm", "-tp 4", 4, ["--tensor-parallel-size 4 ("]),
        ("vllm", "--tensor_parallel_size=2 -tp 1", 1, []),
        ("vllm", "--tensor-parallel-size two", 1, []),
        ("vllm", "--spec-method ngram", 1, ["--spec-method ("]),
        ("vllm", "--speculative-config.method=mtp", 1, ["--speculative-config.method ("]),
        ("sglang", "--tp 2", 2, ["--tensor-parallel-size 2 ("]),
        ("sglang", "--speculative-draft-attention-backend triton", 1, []),
        (
            "sglang",
            "--tp-size 8 --speculative-algorithm EAGLE",
            8,
            ["--tensor-parallel-size 8 (", "--speculative-algorithm ("],
        ),
    ],
)
def test_what_predictions_leave_out(engine: str, given: str, ranks: int, said: list[str]) -> None:
    words = given.split()
    check_arguments(engine, words)
    assert ranks_of(engine, words) == ranks
    found = not_predicted(engine, words)
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found
