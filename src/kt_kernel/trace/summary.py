"""Summarises a trace: times per layer and model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .pieces import CPU, GPU, LANE_OF, LANES, TRANSFERS, WAIT
from .streamed import StreamedModel, summarise_streamed

_INTS = ("position", "chain", "entry", "tokens")


@dataclass(frozen=True)
class LayerTimes:
    """Means over a layer's passes, in microseconds per pass; a piece that a pass lacks counts 0.

    Of each the tenth at either end is left out: an engine's first passes, and what a shared machine
    does now and then, take a hundred times as long as the others.

    cpu: experts + deferred experts
    gpu: between layers + hot experts
    transfers: hand over + take back
    exposed: wait for the CPU
    """

    layer: str
    position: int
    passes: int
    cpu: float
    gpu: float
    transfers: float
    exposed: float


@dataclass(frozen=True)
class ModelTimes:
    """One pass through a model's MoE layers: sums of its `LayerTimes`, in microseconds.

    t_cpu   = sum of cpu
    t_gpu   = sum of gpu + transfers
    exposed = sum of exposed
    elapsed = t_gpu + exposed: without what lies between two passes, and before the first layer
    bound   = (t_cpu + t_gpu) / max(t_cpu, t_gpu): how many times as fast as without any overlap a
              pass would be if the shorter of the two were hidden behind the longer
    reached = (t_cpu + t_gpu) / elapsed: how many times as fast it is. Deferred experts that are
              computed between two passes can take it above the bound
    share   = reached / bound

    The last three are None where they would divide by 0.
    """

    device: str
    chain: int
    tokens: int  # of each pass
    passes: int  # of the layer with the most
    t_cpu: float
    t_gpu: float
    exposed: float
    elapsed: float
    bound: float | None
    reached: float | None
    share: float | None
    counts: dict[int, int]  # tokens: passes, for all passes of this model in the trace
    layers: list[LayerTimes]  # in the model's order


@dataclass(frozen=True)
class Summary:
    models: list[ModelTimes]  # by device
    streamed: list[StreamedModel]  # by device


class _Model(NamedTuple):
    process: int
    chain: int


class _Layer(NamedTuple):
    position: int
    name: str


class _Batch(NamedTuple):
    layer: _Layer
    tokens: int
    entry: int


def summarise(events: Iterable[dict[str, Any]], tokens: int | None = None) -> Summary:
    """Means of the passes with ``tokens`` tokens each; None: with each model's commonest number of
    tokens, the smaller of two that are as common, which is decode in what an engine serves.

    events: what `read` gives. Batches whose wait for the CPU is not known are left out, so that
    GPU times are not taken for 0. Streamed batches are summarised by themselves, too.
    ValueError where there is no batch, or none of so many tokens.
    """
    events = list(events)
    streamed = summarise_streamed(events, tokens)
    devices, batches = _collect(events)
    models: list[ModelTimes] = []
    found: set[int] = set()
    for model, pieces in sorted(batches.items()):
        by_count: dict[int, dict[_Layer, list[Counter[str]]]] = {}
        for (layer, count, _), times in pieces.items():
            if WAIT in times:
                by_count.setdefault(count, {}).setdefault(layer, []).append(times)
        found.update(by_count)
        counts = {n: max(map(len, layers.values())) for n, layers in sorted(by_count.items())}
        chosen = tokens if tokens is not None else max(counts, key=counts.__getitem__, default=0)
        if chosen in counts:
            rows = [_layer_times(*each) for each in sorted(by_count[chosen].items())]
            device = devices.get(model.process, f"process {model.process}")
            models.append(_model_times(device, model.chain, chosen, rows, counts))
    found.update(*(model.counts for model in summarise_streamed(events)))
    if not found:
        raise ValueError(
            f"no batch in this trace; expected one that KT_TRACE made, with events {WAIT!r}"
        )
    if not models and not streamed:
        accepted = ", ".join(map(str, sorted(found)))
        raise ValueError(f"no pass of {tokens} tokens in this trace; accepted: {accepted}")
    return Summary(models, streamed)


def _collect(
    events: Iterable[dict[str, Any]],
) -> tuple[dict[int, str], dict[_Model, dict[_Batch, Counter[str]]]]:
    """Devices' names by process; of each model's batches the microseconds by piece."""
    devices: dict[int, str] = {}
    batches: dict[_Model, dict[_Batch, Counter[str]]] = {}
    for event in events:
        process, about = event.get("pid"), event.get("args")
        if not isinstance(process, int) or not isinstance(about, dict):
            continue  # the trace may be merged with others
        if event.get("name") == "process_name":
            devices[process] = str(about.get("name"))
        elif _is_piece(event, about):
            batch = _Batch(
                _Layer(about["position"], about["layer"]), about["tokens"], about["entry"]
            )
            pieces = batches.setdefault(_Model(process, about["chain"]), {})
            pieces.setdefault(batch, Counter())[event["name"]] += event["dur"]
    return devices, batches


def _is_piece(event: dict[str, Any], about: dict[str, Any]) -> bool:
    return (
        event.get("name") in tuple(LANE_OF)
        and isinstance(event.get("dur"), int | float)
        and all(isinstance(about.get(name), int) for name in _INTS)
        and isinstance(about.get("layer"), str)
    )


def _layer_times(layer: _Layer, batches: list[Counter[str]]) -> LayerTimes:
    def mean(*pieces: str) -> float:
        sums = sorted(sum(times[piece] for piece in pieces) for times in batches)
        kept = sums[len(sums) // 10 : len(sums) - len(sums) // 10]
        return sum(kept) / len(kept)

    return LayerTimes(
        layer=layer.name,
        position=layer.position,
        passes=len(batches),
        cpu=mean(*LANES[CPU]),
        gpu=mean(*(piece for piece in LANES[GPU] if piece != WAIT)),
        transfers=mean(*LANES[TRANSFERS]),
        exposed=mean(WAIT),
    )


def _model_times(
    device: str, chain: int, tokens: int, rows: list[LayerTimes], counts: dict[int, int]
) -> ModelTimes:
    t_cpu = sum(row.cpu for row in rows)
    t_gpu = sum(row.gpu + row.transfers for row in rows)
    exposed = sum(row.exposed for row in rows)
    elapsed, longer = t_gpu + exposed, max(t_cpu, t_gpu)
    bound = (t_cpu + t_gpu) / longer if longer else None
    reached = (t_cpu + t_gpu) / elapsed if elapsed else None
    return ModelTimes(
        device=device,
        chain=chain,
        tokens=tokens,
        passes=counts[tokens],
        t_cpu=t_cpu,
        t_gpu=t_gpu,
        exposed=exposed,
        elapsed=elapsed,
        bound=bound,
        reached=reached,
        share=reached / bound if reached is not None and bound is not None else None,
        counts=counts,
        layers=rows,
    )
