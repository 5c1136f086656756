"""Reads expert weights from checkpoints. One reader per source format; all return ExpertTensors.

checkpoint.py  opens what a path holds; base.py what every checkpoint offers
hugging_face.py  checkpoints in safetensors files
packed.py    packed directories, which kt_kernel.weights.store writes
paths.py     a path given by a user, checked
header.py    one safetensors file: its header, checked
index.py     which files make up a checkpoint, which holds which tensor
fingerprint.py  tells one checkpoint from another without reading all of it
open_files.py  these, held open and looked at before each read
families.py  where each family of models keeps its experts
layout.py    the expert tensors of one layer, by name
quantization.py  what config.json says of quantisation
reader.py    the reader of one layer, for what a method takes
stored.py    what a layer's experts are stored as; method.py the method that suits a checkpoint
bf16.py      BF16, FP16 and FP32 experts
formats.py   which quantised format the tensors are in; matrix.py what each of them offers:
             fp8.py  mx.py (gpt_oss.py: its stacks)  nvfp4.py  int4.py (compressed-tensors)
             gptq.py  awq.py
kt_packed.py  what kt-kernel converted; kt_tiles.py its order of bytes, kt_folder.py its .kt files
arrangement.py  shapes of stacked experts; stacks.py  quantised ones, read as single experts
parts.py, groups.py  what these share

gguf.py      checkpoints in GGUF files; gguf_files.py which files, gguf_header.py one of them,
             gguf_types.py ggml's types, gguf_layout.py names of experts, gguf_blocks.py from bytes
             to matrices, gguf_architectures.py kinds of models
"""

from .base import Checkpoint
from .checkpoint import open_checkpoint, read_experts
from .method import method_of

__all__ = ["Checkpoint", "method_of", "open_checkpoint", "read_experts"]
