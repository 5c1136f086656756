"""Checkpoints of a tiny Qwen3-MoE's experts in every format that is read.

safetensors_files.py  quantised, like published checkpoints
gguf_files.py         GGUF
packed_files.py       packed directories of kt-moe and of kt-kernel
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
