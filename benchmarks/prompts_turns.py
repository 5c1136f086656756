"""Times prompts in engines that are started together, and serve in turns.

    python benchmarks/prompts_turns.py PLAN.json OUT.json --seconds 400

PLAN is {"groups": [group]}, and a group {"name", "engines": [engine], "turns": n}. An engine:

- "name", "engine": "vllm" or "sglang"; "model": folder; "arguments": of the engine
- "method" and "hot", or null for one without kt-moe; "config": more options of kt-moe
- "tokens": lengths of prompts; "modes": of stream_modes.py; "rounds": in each turn
- "logprobs": whether log-probabilities of two prompts are computed in each mode; their mean
  distances are from those of the first mode of the engines whose names "beside" gives
- "environment": variables of its process; "python"; "limit": seconds for an answer

Starting takes an engine much longer than its prompts. So those of a group are started side by side.
But they measure their rates one at a time, and serve one at a time (stream_gates.py), while all
others are stopped. OUT gets rows as those of prompts.py, after each turn.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from outputs import output_file, save_result
from prompts_more import distance
from stream_gates import LOADED, MEASURE, MEASURED, SERVE
from stream_gates import VARIABLE as GATES
from stream_modes import MODES as MODE_NAMES
from stream_modes import SHARED
from stream_modes import VARIABLE as MODES

WORKER = Path(__file__).with_name("prompts_worker.py")
_REST = 0.5  # seconds after which an engine's last step is over: a kernel of a stopped engine spins
_STOPS = 2  # seconds in which a process stops at the latest
_ANSWER = 100  # seconds
_NEEDED = "name", "engine", "model", "arguments", "tokens", "modes", "rounds"
_LEAST = 20  # seconds that a group takes at least, once its engines serve


class Ended(Exception):
    """An engine that failed, or took too long."""


class Engine:
    """A process of prompts_worker.py, and the result's row."""

    def __init__(self, spec: dict[str, Any], group: str, folder: Path, port: int) -> None:
        self.spec, self.folder = spec, folder
        self.gated = spec.get("method") is not None and spec.get("gates", True)
        self.told: dict[str, list[float]] = {}  # log-probabilities, by mode
        self.row: dict[str, Any] = {
            key: spec.get(key) for key in ("name", "engine", "method", "hot", "arguments")
        } | {"group": group, "prompts": {}}
        (folder / "mode").write_text(SHARED)
        config = None
        if spec.get("method") is not None:
            config = {"method": spec["method"]} | spec.get("config", {})
        environment = os.environ | spec.get("environment", {})
        if config is not None:
            environment[MODES] = str(folder / "mode")
        if self.gated:
            environment[GATES] = str(folder)
        given = {key: spec[key] for key in ("engine", "model", "arguments")}
        if spec["engine"] == "sglang":  # engines that start together may choose the same one
            given["arguments"] = {"nccl_port": port} | given["arguments"]
        (folder / "spec").write_text(json.dumps(given | {"config": config, "folder": str(folder)}))
        self.process = subprocess.Popen(
            [spec.get("python", sys.executable), WORKER, folder / "spec"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
            start_new_session=True,
        )

    def _all(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.Error:
            return []

    def signal(self, number: int) -> None:
        for process in self._all():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def go(self) -> None:
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Returns once its processes have stopped, which takes a while on a busy machine."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + _STOPS
        while time.monotonic() < end and not all(map(_has_stopped, self._all())):
            time.sleep(0.002)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # those whose parent has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def fail(self, error: Exception) -> None:
        self.row["error"] = str(error)
        print(f"{self.row['name']} failed: {str(error).strip().splitlines()[-1][:150]}", flush=True)
        self.end()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """What it writes; None if that takes longer."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        line = self.process.stdout.readline()
        if not line:
            raise Ended(f"it ended: {self.log()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Ended(f"{found['error']}: {self.log()}")
        return found

    def ask(self, **job: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        limit = self.spec.get("limit", _ANSWER)
        found = self.answer(limit)
        if found is None:
            raise Ended(f"no answer in {limit} s: {self.log()}")
        return found["found"]

    def log(self, size: int = 3000) -> str:
        file = self.folder / "log"
        if not file.exists():
            return "it wrote no log; see the output of this command"
        return file.read_text(errors="replace")[-size:]

    def gpu_bytes(self) -> int | None:
        """What its processes use on all GPUs, by the driver."""
        query = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
        try:
            rows = subprocess.run(query.split(), capture_output=True, text=True, timeout=20).stdout
            used = [row.split(", ") for row in rows.splitlines()]
            mine = {process.pid for process in self._all()}
            return sum(int(size) << 20 for pid, size in used if int(pid) in mine) or None
        except (OSError, subprocess.TimeoutExpired, ValueError):  # some drivers do not tell
            return None


def _has_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:  # it has ended
        return True


class Group:
    """Engines that are started together."""

    def __init__(self, content: dict[str, Any], folder: Path) -> None:
        self.content, self.engines = content, []
        ports = _free_ports(len(content["engines"]))
        try:
            for number, (spec, port) in enumerate(zip(content["engines"], ports, strict=True)):
                place = folder / f"{number}"
                place.mkdir(parents=True)
                self.engines.append(Engine(spec, content["name"], place, port))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        for engine in self.alive:
            engine.end()

    @property
    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines if "error" not in engine.row]

    def each(self, work: Callable[[Engine], None], engines: list[Engine] | None = None) -> None:
        """Lets one engine after the other work, while the others are stopped."""
        for engine in self.alive if engines is None else engines:
            engine.go()
            try:
                work(engine)
            except (Ended, OSError, ValueError) as error:
                engine.fail(error)
                continue
            time.sleep(_REST)
            engine.stop()

    def start(self, until: float) -> None:
        """Returns once all engines that start in time are ready, and stopped."""
        gated = [engine for engine in self.engines if engine.gated]
        self._come([e for e in self.engines if not e.gated], gated, until)
        self.each(_measure, [engine for engine in gated if engine in self.alive])
        for engine in (waiting := [engine for engine in gated if engine in self.alive]):
            (engine.folder / SERVE).touch()
            engine.go()
        self._come(waiting, [], until)

    def _come(self, ready: list[Engine], loaded: list[Engine], until: float) -> None:
        """Waits for engines that get ready, and others that have loaded a model."""
        waiting = [engine for engine in [*ready, *loaded] if engine in self.alive]
        while waiting:
            for engine in list(waiting):
                try:
                    found = engine.answer(0)
                    if time.monotonic() > until:
                        raise Ended(f"not ready in time: {engine.log()}")
                except Ended as error:
                    engine.fail(error)
                    waiting.remove(engine)
                    continue
                if found is not None:
                    engine.row["start_seconds"] = found["ready"]
                    time.sleep(_REST)
                elif engine in ready or not (engine.folder / LOADED).exists():
                    continue
                engine.stop()
                waiting.remove(engine)
            time.sleep(0.05)


def _check(plan: dict[str, Any]) -> None:
    """Ends the command if an engine of a plan lacks something, before any engine starts."""
    for group in plan["groups"]:
        for spec in group["engines"]:
            place = f"engine {spec.get('name')!r} of group {group['name']!r}"
            if missing := [key for key in _NEEDED if key not in spec]:
                sys.exit(f"{place} lacks {', '.join(missing)}")
            unknown = [mode for mode in spec["modes"] if mode not in MODE_NAMES]
            if unknown and spec.get("method") is not None:
                accepted = ", ".join(MODE_NAMES)
                sys.exit(f"{place}: unknown modes {', '.join(unknown)}; accepted: {accepted}")


def _free_ports(count: int) -> list[int]:
    """Different ports that nobody uses now."""
    with contextlib.ExitStack() as held:
        made = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in made]


def _measure(engine: Engine) -> None:
    (engine.folder / MEASURE).touch()
    end = time.monotonic() + _ANSWER
    while not (engine.folder / MEASURED).exists():
        if time.monotonic() > end or engine.process.poll() is not None:
            raise Ended(f"its rates were not measured: {engine.log()}")
        time.sleep(0.02)
    engine.row |= json.loads((engine.folder / MEASURED).read_text())


def serve(group: Group, until: float, save: Callable[[], None]) -> None:
    """Prompts and log-probabilities of a group's engines, in turns."""

    def warm(engine: Engine) -> None:
        if time.monotonic() > until:
            return
        engine.ask(do="warm", tokens=engine.spec["tokens"], modes=engine.spec["modes"])
        engine.row["gpu_bytes"] = engine.gpu_bytes()
        if engine.spec.get("logprobs"):
            engine.told = engine.ask(do="logprobs", modes=engine.spec["modes"])

    def prompts(engine: Engine) -> None:
        if time.monotonic() > until:
            return
        given = {key: engine.spec[key] for key in ("tokens", "modes", "rounds")}
        for tokens, modes in engine.ask(do="prompts", **given).items():
            of_length = engine.row["prompts"].setdefault(tokens, {})
            for mode, found in modes.items():
                earlier = of_length.get(mode, {}).get("seconds", [])
                of_length[mode] = found | {"seconds": earlier + found["seconds"]}
        save()

    group.each(warm)
    for engine in group.alive:
        _compare(engine, group.engines)
    save()
    for turn in range(group.content.get("turns", 1)):
        group.each(prompts, group.alive[:: -1 if turn % 2 else 1])


def _compare(engine: Engine, others: list[Engine]) -> None:
    """Puts mean distances of log-probabilities into an engine's row."""
    for other in others:
        if engine.told and other.told and other.row["name"] in engine.spec.get("beside", []):
            base = next(iter(other.told.values()))
            engine.row.setdefault("distances", {})[other.row["name"]] = {
                mode: distance(base, values)
                for mode, values in engine.told.items()
                if values is not base
            }


def line(row: dict[str, Any]) -> str:
    """A short line of the printed log."""
    cells = [
        f"{tokens}: "
        + " ".join(f"{m} {1e3 * median(found['seconds']):.0f}" for m, found in modes.items())
        for tokens, modes in row["prompts"].items()
    ]
    begin = row.get("rates", {}).get("threshold")
    for name, distances in row.get("distances", {}).items():
        apart = " ".join(f"{mode} {value:.4f}" for mode, value in distances.items())
        cells.append(f"from {name}: {apart}")
    return f"{row['name']} (from {begin}) " + "; ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=output_file)
    parser.add_argument("--seconds", type=float, default=1e9, help="in which everything must end")
    parser.add_argument("--start", type=float, default=150, help="seconds for a group to start")
    parser.add_argument("--logs", type=Path, help="folder that keeps the engines' logs")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    plan = json.loads(args.plan.read_text())
    _check(plan)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{key: value for key, value in plan.items() if key != "groups"},
        "rows": [],
    }

    def save() -> None:
        save_result(args.out, result)

    with tempfile.TemporaryDirectory() as temporary:
        for content in plan["groups"]:
            left = end - time.monotonic()
            if left < content.get("least", 2 * _LEAST):
                print(f"no time left for {content['name']}", flush=True)
                continue
            begin = time.monotonic()
            group = Group(content, (args.logs or Path(temporary)) / content["name"])
            result["rows"] += [engine.row for engine in group.engines]
            try:
                if "cpu" not in result:  # while the first engines start: it imports much
                    from machine import about

                    result.update(about())
                group.start(min(begin + args.start, end - _LEAST))
                print(f"{content['name']}: started in {time.monotonic() - begin:.0f} s", flush=True)
                serve(group, end, save)
            finally:
                group.end()
            print(*(line(e.row) for e in group.alive), sep="\n", flush=True)
            print(f"{content['name']}: {time.monotonic() - begin:.0f} s", flush=True)
            save()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # with its engines
    main()
