"""The way between a CUDA stream and the CPU: pinned memory, two kernels, a polling thread.

A kernel before the layer (`kernels.hand_over`) writes a batch to pinned memory and announces it in
a ring; the compiled core's thread computes it; a kernel after the layer (`kernels.take_back`) waits
for the answer. No call waits on the host, so both ends can be captured in CUDA graphs.
"""
