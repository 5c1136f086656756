"""Summarises the streamed layers of a trace: the GPU's stream, the bus and the CPU."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from .pieces import BUS_WAIT, COPIES, EXPERTS, LAYER, PRODUCTS, STREAMED_LANE_OF, WAIT

_INTS = ("position", "chain", "entry", "tokens", "on_cpu", "experts", "bytes")


@dataclass(frozen=True)
class StreamedTimes:
    """Means over the streamed batches of a layer, times in microseconds.

    streamed, on_cpu: experts that were copied, and experts with tokens that the CPU computed
    megabytes: over the bus, of 10**6 bytes
    bus: copies, which may begin while the layer before is computed
    gpu: unpacking and products of streamed experts
    cpu: experts on the CPU
    bus_wait: of the GPU for copies
    cpu_wait: of the GPU for the CPU, after the streamed experts
    elapsed: from the layer's beginning on the GPU to its last streamed product, and cpu_wait
    """

    layer: str
    position: int
    batches: int
    streamed: float
    on_cpu: float
    megabytes: float
    bus: float
    gpu: float
    cpu: float
    bus_wait: float
    cpu_wait: float
    elapsed: float


@dataclass(frozen=True)
class StreamedModel:
    """The streamed batches of a model with ``tokens`` tokens.

    bus_share, gpu_share, cpu_share: the part of the elapsed time in which each was busy. That of
    the bus may be above 1, because copies begin before their layer.
    gigabytes_s: of the copies.
    """

    device: str
    chain: int
    tokens: int
    batches: int  # of the layer with the most
    bus_share: float
    gpu_share: float
    cpu_share: float
    gigabytes_s: float
    counts: dict[int, int]  # tokens: batches
    layers: list[StreamedTimes]  # in the model's order


@dataclass
class _Batch:
    """A streamed batch of a layer: what its events say."""

    about: dict[str, Any]
    start: float
    end: float
    times: Counter[str]


def summarise_streamed(
    events: Iterable[dict[str, Any]], tokens: int | None = None
) -> list[StreamedModel]:
    """Means of the streamed batches with ``tokens`` tokens each; None: with each model's commonest
    number of tokens, the larger of two that are as common. Empty if there are none.

    events: what `read` gives.
    """
    events = list(events)
    devices = {
        event["pid"]: str(event["args"].get("name"))
        for event in events
        if event.get("name") == "process_name" and isinstance(event.get("args"), dict)
    }
    by_model: dict[tuple[int, int], dict[int, list[_Batch]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for (process, chain), batch in _batches(events):
        by_model[process, chain][batch.about["tokens"]].append(batch)
    models = []
    for (process, chain), by_tokens in sorted(by_model.items()):
        counts = {n: _most(batches) for n, batches in sorted(by_tokens.items())}
        chosen = tokens if tokens is not None else max(counts, key=lambda n: (counts[n], n))
        if chosen in counts:
            device = devices.get(process, f"process {process}")
            models.append(_model(device, chain, chosen, by_tokens[chosen], counts))
    return models


def _batches(events: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, int], _Batch]]:
    """(process, chain) and each whole batch, with the CPU's work that lies within it."""
    times: dict[tuple[int, int, int], Counter[str]] = defaultdict(Counter)
    whole: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
    others: dict[tuple[Any, Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        about, name = event.get("args"), event.get("name")
        if not isinstance(about, dict) or not isinstance(event.get("dur"), int | float):
            continue
        if name in STREAMED_LANE_OF and all(isinstance(about.get(n), int) for n in _INTS):
            key = event["pid"], about["chain"], about["entry"]
            times[key][name] += event["dur"]
            if name == LAYER:
                whole.append((key, event))
        elif name in (EXPERTS, WAIT) and "layer" in about:
            others[event["pid"], about.get("chain"), about["layer"]].append(event)
    for found in others.values():
        found.sort(key=lambda event: event["ts"])
    for key, event in whole:
        about, start = event["args"], event["ts"]
        batch = _Batch(about, start, start + event["dur"], times[key])
        _add_cpu(batch, others[key[0], key[1], about["layer"]])
        yield (key[0], key[1]), batch


def _add_cpu(batch: _Batch, others: list[dict[str, Any]]) -> None:
    """Adds the work and the wait of the CPU that begin in a batch, or right at its end."""
    if not batch.about["on_cpu"]:
        return
    starts = [event["ts"] for event in others]
    first = bisect_right(starts, batch.start - 1)
    found: set[str] = set()
    for event in others[first:]:
        name = event["name"]
        if event["args"].get("tokens") != batch.about["tokens"] or name in found:
            break
        found.add(name)
        batch.times[name] += event["dur"]


def _most(batches: list[_Batch]) -> int:
    return max(Counter(batch.about["layer"] for batch in batches).values())


def _model(
    device: str, chain: int, tokens: int, batches: list[_Batch], counts: dict[int, int]
) -> StreamedModel:
    by_layer: dict[tuple[int, str], list[_Batch]] = defaultdict(list)
    for batch in batches:
        by_layer[batch.about["position"], batch.about["layer"]].append(batch)
    rows = [_times(*place, found) for place, found in sorted(by_layer.items())]
    total = {
        each.name: sum(getattr(row, each.name) for row in rows)
        for each in fields(StreamedTimes)
        if each.name not in ("layer", "position")
    }
    elapsed = total["elapsed"] or 1.0
    return StreamedModel(
        device=device,
        chain=chain,
        tokens=tokens,
        batches=counts[tokens],
        bus_share=total["bus"] / elapsed,
        gpu_share=total["gpu"] / elapsed,
        cpu_share=total["cpu"] / elapsed,
        gigabytes_s=total["megabytes"] / total["bus"] * 1e3 if total["bus"] else 0.0,
        counts=counts,
        layers=rows,
    )


def _times(position: int, layer: str, batches: list[_Batch]) -> StreamedTimes:
    def mean(name: str) -> float:
        return fmean(batch.times[name] for batch in batches)

    return StreamedTimes(
        layer=layer,
        position=position,
        batches=len(batches),
        streamed=fmean(batch.about["experts"] for batch in batches),
        on_cpu=fmean(batch.about["on_cpu"] for batch in batches),
        megabytes=fmean(batch.about["bytes"] for batch in batches) / 1e6,
        bus=mean(COPIES),
        gpu=mean(PRODUCTS),
        cpu=mean(EXPERTS),
        bus_wait=mean(BUS_WAIT),
        cpu_wait=mean(WAIT),
        elapsed=fmean(batch.end - batch.start for batch in batches) + mean(WAIT),
    )
