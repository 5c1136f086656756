"""Cold experts on their way to the GPU: packed bytes are copied over the bus and unpacked there.

`PackedExperts` describes where a layer's packed weights lie. `ExpertStreamer` copies groups of
experts to memory of a fixed size on the GPU, where `PackedMatrix.unpack` turns them into the
weights that an engine's kernels take.
"""
