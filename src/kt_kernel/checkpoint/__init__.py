"""Reads expert weights from checkpoints. One reader per source format, all give ExpertTensors.

paths.py     a path given by a user, checked
header.py    one safetensors file: its header, checked
index.py     which files make up a checkpoint, which holds which tensor
families.py  where each family of models keeps its experts
layout.py    the expert tensors of one layer, by name
bf16.py      reader of BF16, FP16 and FP32 experts
"""

from .checkpoint import Checkpoint, open_checkpoint, read_experts

__all__ = ["Checkpoint", "open_checkpoint", "read_experts"]
