"""Reads arguments of an engine's command line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..runtime.files import parse_object

#: The argument of each engine that changes a model's configuration.
OVERRIDES_FLAG = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
#: The argument of each engine that says how much of the GPU it may take.
MEMORY_FLAG = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
#: The argument of each engine that says how many tokens a batch of prompts has at most.
BATCH_FLAG = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"}
#: The arguments of each engine that say which batches it captures in CUDA graphs, and that
#: `batches.captured_tokens` reads.
GRAPH_FLAGS = {
    "vllm": ("--enforce-eager", "--max-cudagraph-capture-size"),
    "sglang": (
        "--disable-cuda-graph",
        "--disable-prefill-cuda-graph",
        "--cuda-graph-max-bs-prefill",
        "--cuda-graph-max-bs-decode",
    ),
}
#: The argument of both engines that says on how many GPUs a model is served.
RANKS_FLAG = "--tensor-parallel-size"
# Arguments of each engine with which it predicts several tokens at a time.
_SPECULATION = {
    "vllm": re.compile("--spec-|--speculative-config|-sc$"),
    "sglang": re.compile("--speculative-algo"),
}
_MODEL = "kt tune gives it by its own argument MODEL"
_CONTEXT = "kt tune gives it by its own option --context"
_STREAMS = "kt tune gives it by its own option --streams"
_FILE = "kt tune does not read it; give the arguments that it has"
_KT = "kt tune chooses kt options; add others to the recommended command"
_HTTP = "kt tune asks its servers over HTTP; add it to the recommended command"
# Arguments that contradict those of `kt tune`, or with which it would measure something else than
# it predicts, and the reasons.
_REFUSED = {
    "vllm": {
        "--model": _MODEL,
        "--max-model-len": _CONTEXT,
        "--max-num-seqs": _STREAMS,
        "--config": _FILE,
        "--additional-config": _KT,
        "--uds": _HTTP,
    },
    "sglang": {
        "--model": _MODEL,
        "--model-path": _MODEL,
        "--context-length": _CONTEXT,
        "--max-running-requests": _STREAMS,
        "--config": _FILE,
    },
}
_OTHER_NAMES = {
    "--device-memory-utilization": MEMORY_FLAG["vllm"],
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
} | dict.fromkeys(("-tp", "--tp", "--tp-size"), RANKS_FLAG)
_OF_KT = re.compile(r"--(no-|record-)?kt-")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_UNITS = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20}


def check_arguments(engine: str, arguments: Sequence[str]) -> None:
    """Raises ValueError for arguments that `kt tune` cannot have, and for abbreviated names of them
    and of those that it reads: engines complete them."""
    read = {flags[engine] for flags in (OVERRIDES_FLAG, MEMORY_FLAG, BATCH_FLAG)} | {RANKS_FLAG}
    read.update(GRAPH_FLAGS[engine])
    known = read | _REFUSED[engine].keys()
    for word in arguments:
        name = name_of(word).partition(".")[0]  # vLLM has --name.key, too
        reason = _REFUSED[engine].get(name, "")
        if _OF_KT.match(name):
            reason = _KT
        elif name.startswith("--ssl-"):
            reason = _HTTP
        elif name not in known and re.match("--.", name):
            meant = sorted(flag for flag in known if flag.startswith(name))
            reason = f"an abbreviation; write {' or '.join(meant)}" if meant else ""
        if reason:
            raise ValueError(f"--engine-args {word}: {reason}")


def name_of(word: str) -> str:
    """The name in ``--name`` or ``--name=value``, with - for _, which vLLM accepts, too. Of two
    names of an argument, the usual one."""
    name = word.partition("=")[0].replace("_", "-")
    return _OTHER_NAMES.get(name, name)


def value_of(arguments: Sequence[str], flag: str) -> str:
    """The value of an argument, given as two words or with "="; the last one counts. "" if it is
    not given."""
    found = ""
    for word, following in itertools.pairwise([*arguments, ""]):
        if name_of(word) == flag:
            _, sign, value = word.partition("=")
            found = value if sign else following
    return found


def whole_number(engine: str, text: str) -> int | None:
    """The number that an engine reads; None if it is none. vLLM takes 16k for 16,000 and 16K for
    16,384."""
    unit = _UNITS.get(text[-1:], 0) if engine == "vllm" else 0
    if unit and _NUMBER.fullmatch(text[:-1]):
        return int(float(text[:-1]) * unit)
    return int(text) if text.isdecimal() else None


def ranks_of(engine: str, arguments: Sequence[str]) -> int:
    """On how many GPUs the engine serves a model. 1 for what is no number: the engine refuses
    it."""
    return whole_number(engine, value_of(arguments, RANKS_FLAG)) or 1


def not_predicted(engine: str, arguments: Sequence[str]) -> list[str]:
    """The arguments whose effects the predictions leave out, with these effects, in words."""
    found = []
    if (ranks := ranks_of(engine, arguments)) > 1:
        found.append(
            f"{RANKS_FLAG} {ranks} (times and memory are those of one GPU, which holds everything)"
        )
    names = [name_of(word) for word in arguments]
    if given := next(filter(_SPECULATION[engine].match, names), ""):
        found.append(f"{given} (a step gives one token, and no draft model takes memory)")
    return found


def changes_of(engine: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The user's changes of the model's configuration, by key.

    The last JSON object counts. vLLM also has ``--hf-overrides.KEY VALUE``: it makes one object of
    all of them, and then no other object counts.

    Raises ValueError if the value is no JSON object.
    """
    found: dict[str, Any] = {}
    for _, path, value in _parts(engine, arguments):
        if path:
            _put(found, path, _value(engine, path, value))
    flag = OVERRIDES_FLAG[engine]
    given = value_of(arguments, flag)
    if found or not any(name_of(word) == flag for word in arguments):
        return found
    return parse_object(given.encode(), f"--engine-args {flag} {given}: ")


def with_changes(engine: str, arguments: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The arguments with further changes of the model's configuration, by key, which replace those
    of the user."""
    flag = OVERRIDES_FLAG[engine]
    kept: list[str] = []
    by_key = False
    for words, path, _ in _parts(engine, arguments):
        by_key |= bool(path)
        if not path or path[0].rstrip("+") not in changes:  # vLLM would join lists of one key
            kept += words
    if by_key:
        pairs = ((f"{flag}.{key}", json.dumps(value)) for key, value in changes.items())
        return kept + list(itertools.chain.from_iterable(pairs))
    return [*kept, flag, json.dumps({**changes_of(engine, arguments), **changes})]


def _parts(
    engine: str, arguments: Sequence[str]
) -> Iterator[tuple[list[str], tuple[str, ...], str]]:
    """The words of each argument. Of those that change a single key of the configuration, also the
    names that lead to it, of which the last one may end with +, and the value."""
    words = iter(arguments)
    for word in words:
        name, sign, value = word.partition("=")
        start, dot, keys = name.partition(".")
        if engine != "vllm" or not dot or name_of(start) != OVERRIDES_FLAG[engine]:
            yield [word], (), ""
            continue
        following = list(itertools.islice(words, 0 if sign else 1))
        yield [word, *following], tuple(keys.split(".")), value if sign else "".join(following)


def _value(engine: str, path: Sequence[str], text: str) -> Any:
    """As vLLM reads the value of a key: JSON, a number with a unit, or text."""
    if path[-1].endswith("+"):
        return text.split(",")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        number = whole_number(engine, text)
        return text if number is None else number


def _put(found: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Values of one key replace each other, and lists are joined."""
    *outer, key = (name.removesuffix("+") for name in path)
    for name in outer:
        if not isinstance(found.get(name), dict):
            found[name] = {}
        found = found[name]
    if isinstance(value, dict) and isinstance(found.get(key), dict):
        for name, inner in value.items():
            _put(found[key], (name,), inner)
    elif isinstance(value, list) and isinstance(found.get(key), list):
        found[key] = found[key] + value
    else:
        found[key] = value
