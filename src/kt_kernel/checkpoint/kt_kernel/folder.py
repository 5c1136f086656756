"""kt-kernel's folders of .kt files, which its converter merges unless told to keep them.

    _layer_{L}/_numa_{p}/INT8_{gate,up,down}_{e}_{n}Byte_{quant,scale}_.kt

A file holds the n bytes of one tensor and nothing else. INT4 files are named likewise. Files of
`{matrix}_bwd` are transposed copies for fine-tuning and are ignored.
"""

from __future__ import annotations

import os
import re

from ..header import TensorInfo
from ..index import INDEX_SUFFIX, Index, read_config, stamp

_LAYER = re.compile(r"_layer_(0|[1-9][0-9]{0,8})")
_PART = re.compile(r"_numa_(0|[1-9][0-9]{0,8})")
_FILE = re.compile(
    r"(.+?)_(gate|up|down)(_bwd)?_(0|[1-9][0-9]{0,8})_([0-9]{1,15})Byte_(quant|scale)_\.kt"
)
_KNOWN = ("INT8", "INT4")
_KINDS = {"quant": ("weight", "I8", 1), "scale": ("scale", "F32", 4)}


def read_kt_folder(path: str) -> Index | None:
    """The files below `path` as tensors with the names of merged files. None for other folders.

    Raises OSError, and ValueError naming the file for one of an unknown kind or a wrong size.
    """
    if not os.path.isdir(path):
        return None
    names = sorted(os.listdir(path))
    layers = [(name, match[1]) for name in names if (match := _LAYER.fullmatch(name))]
    if not layers or any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return None
    index = Index(path)
    index.stamps[path] = stamp(path)
    for name, layer in layers:
        folder = os.path.join(path, name)
        index.stamps[folder] = stamp(folder)
        for part in sorted(os.listdir(folder)):
            if match := _PART.fullmatch(part):
                _read_part(index, os.path.join(folder, part), layer, match[1])
    if not index.tensors:
        raise FileNotFoundError(f"{path}: no .kt file in {layers[0][0]} or similar folders")
    read_config(index)
    return index


def _read_part(index: Index, folder: str, layer: str, part: str) -> None:
    index.stamps[folder] = stamp(folder)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        match = _FILE.fullmatch(name)
        if not match or match[1] not in _KNOWN:
            raise ValueError(
                f"{path}: not a file of kt-kernel's int8 or int4 weights, such as"
                " INT8_up_0_4096Byte_quant_.kt; convert the original model:"
                " kt quant --input-path MODEL --output FOLDER --quant-method int8"
            )
        _, matrix, backward, expert, size, kind = match.groups()
        if backward:
            continue
        ending, dtype, width = _KINDS[kind]
        index.stamps[path] = stamp(path)
        found = index.stamps[path][2]
        if found != int(size) or found % width:
            raise ValueError(
                f"{path}: {found} bytes, but its name has {size} (truncated file?); expected a"
                f" multiple of {width}"
            )
        tensor = f"blk.{layer}.ffn_{matrix}_exps.{expert}.numa.{part}.{ending}"
        info = TensorInfo(tensor, path, dtype, (found // width,), 0, found)
        first = index.tensors.setdefault(tensor, info)
        if first is not info:
            raise ValueError(f"{path}: the same tensor as {first.file}; expected it once")
