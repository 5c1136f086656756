"""Where the time of MoE layers goes between the GPU and the CPU: KT_TRACE, and ``kt bench trace``.

records.py  what the compiled core says of one batch of one layer
pieces.py   which stretches of time that gives, and the lanes that they are shown in
clock.py    the GPU's clock against the CPU's
writer.py   records into a file for Chrome's and Perfetto's viewers
reader.py   such a file, whole or cut, back into events
summary.py  events into times per layer and model

Nothing here needs PyTorch.
"""
