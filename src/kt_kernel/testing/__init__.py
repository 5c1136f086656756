"""The oracle: the layer in float64, for tests of kernels and of engines.

rounding.py  the roundings of weights and activations
layer.py     the layer, and how far correct kernels may be from it
"""

from .layer import moe_reference, moe_reference_with_noise, row_error
from .rounding import quantise_weights, round_activations

__all__ = [
    "moe_reference",
    "moe_reference_with_noise",
    "quantise_weights",
    "round_activations",
    "row_error",
]
