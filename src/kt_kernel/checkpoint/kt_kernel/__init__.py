"""Weights that kt-kernel's converters wrote."""
