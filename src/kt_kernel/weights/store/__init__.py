"""Packed directories: their content, and writing them (docs/packed-format.md).

quant_methods.py  the methods of `kt quant`
manifest.py       kt_manifest.json: the model, and its layers' files with sizes and checksums
layer_file.py     one layer's file: the position of everything in it
atomic.py         files that exist completely or not at all
lock.py           one writer at a time
writer.py         a directory while layers are added to it
saving.py         writes a loaded layer to a directory

The reader is `kt_kernel.checkpoint.packed`.
"""
