"""The oracle: the layer in float64, for tests of kernels and of engines.

rounding.py  the roundings of weights and activations
quantised.py quantised matrices: made from weights, and what they stand for
layer.py     the layer, and how far correct kernels may be from it
"""

from .layer import moe_reference, moe_reference_with_noise, row_error
from .quantised import int4_settings, quantise, values_of
from .rounding import folds_scales, form_of, quantise_weights, round_activations

__all__ = [
    "folds_scales",
    "form_of",
    "int4_settings",
    "moe_reference",
    "moe_reference_with_noise",
    "quantise",
    "quantise_weights",
    "round_activations",
    "row_error",
    "values_of",
]
