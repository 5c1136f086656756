"""Reads expert weights from checkpoints. Each source format has a reader; all return ExpertTensors.

checkpoint.py    opens a path, whatever it holds
base.py          the interface of all checkpoints
safetensors/     checkpoints in safetensors files
gguf/            checkpoints in GGUF files
kt_kernel/       weights that kt-kernel converted
packed.py        packed directories, which kt_kernel.weights.store writes
reader.py        reads one layer after checking it against sizes and method
stored.py        recognises the format of a layer's experts
method.py        selects the method for a checkpoint (``--kt-method auto``)
quantization.py  the quantisation settings of config.json
index.py         the files of a checkpoint and the tensors in each
header.py        reads and checks the header of one safetensors file
open_files.py    files open during a call, and reading from them
ahead.py         reads experts ahead of packing
fingerprint.py   identifies a checkpoint without reading all of it
paths.py         checks paths from users
table.py         generates docs/formats.md
"""

from .base import Checkpoint
from .checkpoint import open_checkpoint, read_experts
from .method import method_of

__all__ = ["Checkpoint", "method_of", "open_checkpoint", "read_experts"]
