"""Generates docs/formats.md from the tables of readers, families and kernels.

python -m kt_kernel.checkpoint.table > docs/formats.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import _C
from ..weights.formats import INT4_GROUP, WeightFormat, all_formats, ggml_formats
from ..weights.methods import METHODS, get_method
from ..weights.store.manifest import QUANT_METHODS
from .gguf.architectures import ARCHITECTURES
from .gguf.blocks import DENSE as GGUF_DENSE
from .gguf.blocks import forms as gguf_forms
from .kt_kernel.packed import METHODS as KT_METHODS
from .safetensors.families import FAMILIES, PREFIXES, Family, Stacked
from .safetensors.formats import FORMATS
from .safetensors.fp8 import CONVERTED
from .safetensors.mx import MxFp4

_QUANTISING = [m.name for m in METHODS.values() if not m.quantised and not m.mixed]
_DENSE_FORMATS = tuple(dict.fromkeys(get_method(name).format for name in _QUANTISING))


@dataclass(frozen=True)
class Row:
    """A source format: its name, its tensors, whether it may be stacked, the methods that read it
    and the weight formats of the core that it is kept in."""

    source: str
    tensors: str
    stacked: bool
    methods: tuple[str, ...]
    formats: tuple[WeightFormat, ...]

    def cells(self) -> Iterator[str]:
        yield self.source
        yield self.tensors
        yield "yes" if self.stacked else "no"
        yield ", ".join(f"`{method}`" for method in self.methods)
        yield ", ".join(format.title for format in self.formats)


def rows() -> Iterator[Row]:
    """Of all formats that are read."""
    tensors = "`weight` [N, K]; may have `bias` [N]"
    yield Row("BF16, FP16, FP32", tensors, True, tuple(_QUANTISING), _DENSE_FORMATS)
    for kind in FORMATS:
        kept = get_method(kind.method).formats
        convert = _QUANTISING if set(kept) <= set(CONVERTED) else ()
        yield Row(kind.title, kind.tensors, kind.stacked, (kind.method, *convert), kept)
    blocks = "`…_blocks` e2m1 [E, N, K/32, 16]; `…_scales` ue8m0 [E, N, K/32]; `…_bias` [E, N]"
    method = MxFp4.method
    yield Row(f"{MxFp4.title} of gpt-oss", blocks, True, (method,), get_method(method).formats)
    yield from _gguf_rows()
    yield from _directory_rows()


def _gguf_rows() -> Iterator[Row]:
    """One for the types that are kept as they are, one for each of the others."""
    tensors = "`blk.{L}.ffn_{gate,up,down}_exps.weight` [E, N, K] and other names of llama.cpp's"
    mixed = tuple(method.name for method in METHODS.values() if method.mixed)
    dense = ", ".join(GGUF_DENSE)
    yield Row(f"GGUF {dense}", tensors, True, (*mixed, *_QUANTISING), _DENSE_FORMATS)
    for name, form in gguf_forms().items():
        if name not in GGUF_DENSE and not form.format.ggml:
            yield Row(f"GGUF {name}", tensors, True, mixed, (form.format,))
    names = ", ".join(format.name for format in ggml_formats())
    yield Row(f"GGUF {names}", tensors, True, mixed, ggml_formats())


def _directory_rows() -> Iterator[Row]:
    """Directories that a program packed."""
    names = "`blk.{L}.ffn_{gate,up,down}_exps.{e}.numa.{p}.{weight,scale}` or `_layer_{L}` folders"
    for bits, methods in KT_METHODS.items():
        split = (INT4_GROUP,) if bits == 4 else ()  # down of more than one part
        kept = (*dict.fromkeys(get_method(method).format for method in methods), *split)
        yield Row(f"kt-kernel's packed int{bits}", names, False, methods, kept)
    methods = tuple(QUANT_METHODS.values())
    kept = tuple(dict.fromkeys(get_method(method).format for method in methods))
    names = "a file for each layer, in the core's own order, and a manifest; `cpu_save` writes one"
    yield Row(
        "[packed directory](packed-format.md) of `kt quant`",
        f"{names} of any method",
        False,
        methods,
        kept,
    )


def page() -> str:
    """The whole of it, as Markdown."""
    sections = (
        "# Formats, families and kernels",
        "Made by `python -m kt_kernel.checkpoint.table` from the tables that the readers and the"
        " core go by.",
        "## Formats",
        "N rows and K columns of a matrix, E experts, groups of g columns. Any format may occur in"
        " any family: a layer's tensors tell which it is. Those with *stacks* are also read where"
        " all experts are in one tensor, with an E before the other dimensions.",
        _table(("source", "tensors", "stacks", "methods", "kept as"), (r.cells() for r in rows())),
        "## Kernels",
        "What activations are for the products with each kept format, on each instruction set:"
        " for a few rows (decode) and, after the stroke, for many (prefill). int16 groups are"
        " bf16 values in fixed point with a scale per 32.",
        _kernels(),
        "## Families",
        "By `model_type` of config.json, or of its text_config. Names follow `layers.{L}.`, before"
        f" which may be {', '.join(f'`{p}`' for p in PREFIXES if p)} or nothing. The projections of"
        " single experts are `gate_proj`, `up_proj` and `down_proj`, or `w1`, `w3` and `w2`; their"
        " names are understood without a known type, too. H is the hidden size, I the experts'.",
        _families(),
    )
    return "\n\n".join(sections) + "\n"


def _table(head: tuple[str, ...], body: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _kernels() -> str:
    found = {(table, format): f"{gemv} / {gemm}" for table, format, gemv, gemm in _C.kernels()}
    tables = list(dict.fromkeys(table for table, _ in found))[::-1]
    body = (
        [format.title, *(found[table, format.id] for table in tables)] for format in all_formats()
    )
    return _table(("kept as", *tables), body)


def _families() -> str:
    members: dict[Family, list[str]] = {}
    for model_type, family in FAMILIES.items():
        members.setdefault(family, []).append(model_type)
    body = (
        (
            ", ".join(f"`{t}`" for t in types),
            ", ".join(f"`{a}`" for a, t in ARCHITECTURES.items() if t in types),
            f"`{family.block}.experts.{{e}}`",
            "; ".join(_stack(stacked) for stacked in family.stacked),
        )
        for family, types in members.items()
    )
    return _table(("model_type", "GGUF architecture", "single experts", "stacks"), body)


def _stack(s: Stacked) -> str:
    def shape(rows: str, columns: str) -> str:
        return f"[E, {columns}, {rows}]" if s.columns else f"[E, {rows}, {columns}]"

    if s.gate_up:
        first = [f"`{s.gate_up}` {shape('2I', 'H')}"]
    else:
        first = [f"`{name}` {shape('I', 'H')}" for name in (s.gate, s.up)]
    text = ", ".join([*first, f"`{s.down}` {shape('H', 'I')}"])
    if s.gate_up_scales:
        text = f"`{s.gate_up}`, `{s.down}` with scales as above"
    return text + (", gate and up alternating" if s.interleaved else "")


if __name__ == "__main__":
    print(page(), end="")
