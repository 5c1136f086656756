"""The published home of `AMXSFTMoEWrapper`. Every method runs on every CPU with AVX2."""

from .base import BaseSFTMoEWrapper

__all__ = ["AMXSFTMoEWrapper"]

AMXSFTMoEWrapper = BaseSFTMoEWrapper
