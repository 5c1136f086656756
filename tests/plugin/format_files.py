"""Checkpoints of the experts of a tiny Qwen3-MoE in every format that is read.

safetensors_files.py  quantised as published checkpoints are
gguf_files.py         GGUF
packed_files.py       packed directories, ours and kt-kernel's
"""

from __future__ import annotations

import gguf_files
import packed_files
import safetensors_files
from expert_weights import Source

FORMATS: dict[str, Source] = {
    **safetensors_files.SOURCES,
    **gguf_files.SOURCES,
    **packed_files.SOURCES,
}
