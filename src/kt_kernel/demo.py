"""`make demo`: serves the small model of this package with vLLM on the CPU, completes one prompt.

Runs in an environment where vLLM and this package are installed: ``python -m kt_kernel.demo``.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .options import OptionError, exit_with
from .report import STATS_FILE_VARIABLE

MODEL = Path(__file__).parent / "demo_model"
PROMPT = "In the beginning God created the heaven and the earth. And "
LOG_LINES = 25  # shown when the server does not start
# The server is on this machine: a proxy named in the environment has no business with it.
local_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(arguments: list[str] | None = None) -> int:
    """Serves, sends one request, prints what came of it, stops the server; 0 when all went well."""
    args = _arguments(arguments)
    if not (args.model / "config.json").exists():
        raise exit_with(
            OptionError(f"--model {args.model}: no model there (config.json is missing)")
        )
    if find_spec("vllm") is None:
        raise exit_with(OptionError("vLLM is not installed here; `make demo` installs it"))
    port = args.port or free_port()
    with tempfile.TemporaryDirectory(prefix="kt-demo-") as folder:
        stats, log = Path(folder) / "stats.json", Path(folder) / "server.log"
        command = _command(args, port)
        print("$ vllm " + " ".join(command[3:]), flush=True)
        with _server(command, stats, log) as server:
            url = f"http://127.0.0.1:{port}"
            if not _wait(server, url, log, args.timeout):
                return 1
            before = _read(stats)
            start = time.monotonic()
            answer = _complete(url, args.prompt, args.max_tokens)
            seconds = time.monotonic() - start
            after = _settled(stats, before)
    _show(args, answer, seconds, before, after)
    if _calls(after) == _calls(before) and any(_cold(after)):
        print("kt: error: no expert call ran in our kernels", file=sys.stderr)
        return 1
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kt_kernel.demo", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder to serve")
    parser.add_argument("--method", default="AMXINT8", help="--kt-method of the server")
    parser.add_argument("--hot", type=int, default=4, help="--kt-num-gpu-experts of the server")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for the server")
    return parser.parse_args(arguments)


def _command(args: argparse.Namespace, port: int) -> list[str]:
    # vLLM's command through this interpreter: its script need not be on PATH.
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(args.model),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo",
            "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager",
            "--kt-method", args.method, "--kt-num-gpu-experts", str(args.hot)]  # fmt: skip


@contextmanager
def _server(command: list[str], stats: Path, log: Path) -> Iterator[subprocess.Popen]:
    """The server in a process group of its own, which is gone afterwards whatever happens."""
    environment = os.environ | {
        STATS_FILE_VARIABLE: str(stats),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with open(log, "wb") as output:
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield server
        finally:
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has to wait
            _stop(server)
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, previous)


def _stop(server: subprocess.Popen) -> None:
    for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        # The leader is gone; its engine process may need the stronger signal.
        time.sleep(0.5)


def _wait(server: subprocess.Popen, url: str, log: Path, timeout: float) -> bool:
    """True when the server answers; False, with the end of its log shown, when it does not."""
    start = time.monotonic()
    if not sys.stdout.isatty():
        print("waiting for the server (a minute or two)", flush=True)
    while True:
        elapsed = time.monotonic() - start
        if server.poll() is not None:
            problem = f"the server ended with code {server.returncode}"
        elif elapsed > timeout:
            problem = f"the server did not answer within {timeout:.0f} s"
        else:
            problem = ""
        if problem:
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            print(f"\nkt: error: {problem}; the end of its log:", file=sys.stderr)
            print("\n".join(lines), file=sys.stderr)
            return False
        try:
            with local_http.open(f"{url}/health", timeout=2) as response:
                if response.status == 200:
                    _progress(f"server ready after {elapsed:.0f} s", end="\n")
                    return True
        except (urllib.error.URLError, OSError):
            pass
        _progress(f"waiting for the server: {elapsed:.0f} s")
        time.sleep(1)


def _progress(text: str, end: str = "") -> None:
    """Overwrites the line on a terminal; elsewhere only the last text is printed."""
    if sys.stdout.isatty():
        print(f"\r{text}\033[K", end=end, flush=True)
    elif end:
        print(text, flush=True)


def free_port() -> int:
    """A TCP port of this machine that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _complete(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens,
            "temperature": 0.6, "seed": 1}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with local_http.open(request, timeout=300) as response:
        return json.load(response)


def _read(stats: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(stats.read_text())["models"]
    except FileNotFoundError:
        return []


def _settled(stats: Path, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The counters after the request; they are written twice a second."""
    for _ in range(10):
        found = _read(stats)
        time.sleep(0.6)
        if _calls(found) > _calls(before) and _calls(_read(stats)) == _calls(found):
            break
    return _read(stats)


def _calls(models: list[dict[str, Any]]) -> int:
    return sum(model.get("expert_calls", 0) for model in models)


def _cold(models: list[dict[str, Any]]) -> list[list[int]]:
    return [layer["cold_experts"] for model in models for layer in model["layers"]]


def _show(
    args: argparse.Namespace,
    answer: dict[str, Any],
    seconds: float,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
) -> None:
    usage = answer["usage"]
    print(f"\nprompt:      {args.prompt}")
    print(f"completion:  {answer['choices'][0]['text']}\n")
    print(f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out, {seconds:.2f} s")
    for model in after:
        layer = model["layers"][0]
        print(f"{len(model['layers'])} layers; in each, experts")
        print(f"  hot, in vLLM's kernels:  {layer['hot_experts']}")
        print(f"  cold, in our kernels:    {layer['cold_experts']}")
        print(model["description"])
    print(f"expert calls in our kernels for this request: {_calls(after) - _calls(before)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
