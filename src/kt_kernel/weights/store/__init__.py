"""Packed directories: what they hold, and the writing of them (docs/packed-format.md).

manifest.py    kt_manifest.json: the model, and its layers' files with sizes and checksums
layer_file.py  one layer's file: where in it everything lies
atomic.py      files that are there whole or not at all
lock.py        one writer at a time
writer.py      a directory while layers are added to it
saving.py      a loaded layer into a directory

The reader is `kt_kernel.checkpoint.packed`.
"""
