"""`make demo`: serves the small model of this package with vLLM on the CPU, completes one prompt.

Runs in an environment where vLLM and this package are installed: ``python -m kt_kernel.demo``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from .runtime.signals import left_by_signals
from .serving.flags import exit_with
from .serving.option_table import AUTO, OptionError
from .serving.report import STATS_FILE_VARIABLE
from .serving.server_process import (
    ServerFailed,
    free_port,
    local_http,
    process_group,
    wait_until_healthy,
)

MODEL = Path(__file__).parent / "demo_model"
PROMPT = "In the beginning God created the heaven and the earth. And "
LOG_LINES = 25  # shown when the server does not start


def main(arguments: list[str] | None = None) -> int:
    """Starts the server, sends one request, prints the result, stops the server; 0 on success."""
    args = _arguments(arguments)
    if not (args.model / "config.json").exists():
        raise exit_with(OptionError(f"--model {args.model}: not a model (config.json is missing)"))
    if find_spec("vllm") is None:
        raise exit_with(OptionError("vLLM is not installed here; `make demo` installs it"))
    port = args.port or free_port()
    with tempfile.TemporaryDirectory(prefix="kt-demo-") as folder:
        stats, log = Path(folder) / "stats.json", Path(folder) / "server.log"
        command = _command(args, port)
        print("$ vllm " + " ".join(command[3:]), flush=True)
        with process_group(command, log, _environment(stats)) as server:
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
    parser.add_argument("--method", default=AUTO, help="--kt-method of the server")
    parser.add_argument("--hot", type=int, default=4, help="--kt-num-gpu-experts of the server")
    parser.add_argument("--lora", type=Path, help="--kt-expert-lora-path of the server: an adapter")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--port", type=int, default=0, help="port of the server; 0: any free port")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for the server")
    return parser.parse_args(arguments)


def _command(args: argparse.Namespace, port: int) -> list[str]:
    # vLLM's command through this interpreter: its script need not be on PATH.
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(args.model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager"),
        *("--kt-method", args.method, "--kt-num-gpu-experts", str(args.hot)),
        *(("--kt-expert-lora-path", str(args.lora)) if args.lora else ()),
    ]


def _environment(stats: Path) -> dict[str, str]:
    environment = os.environ | {
        STATS_FILE_VARIABLE: str(stats),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return environment


def _wait(server: subprocess.Popen[bytes], url: str, log: Path, timeout: float) -> bool:
    """True once the server answers; if it does not, prints the end of its log and returns False."""
    if not sys.stdout.isatty():
        print("waiting for the server (a minute or two)", flush=True)

    def waiting(seconds: float) -> None:
        _progress(f"waiting for the server: {seconds:.0f} s")

    try:
        seconds = wait_until_healthy(server, url, timeout, waiting)
    except ServerFailed as problem:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"\nkt: error: {problem}; its log ends with:", file=sys.stderr)
        print("\n".join(lines), file=sys.stderr)
        return False
    _progress(f"server ready after {seconds:.0f} s", end="\n")
    return True


def _progress(text: str, end: str = "") -> None:
    """Overwrites the line on a terminal; otherwise prints only the last text."""
    if sys.stdout.isatty():
        print(f"\r{text}\033[K", end=end, flush=True)
    elif end:
        print(text, flush=True)


def _complete(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.6,
        "seed": 1,
    }
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


def run(program: Callable[[], int]) -> NoReturn:
    """Exits with a program's code, or tidily at Ctrl-C and SIGTERM."""
    try:
        with left_by_signals():
            sys.exit(program())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run(main)
