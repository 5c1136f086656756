"""A published home of the fine-tuning classes; they live in `kt_kernel.sft`."""

from .sft.amx import AMXSFTMoEWrapper
from .sft.base import BaseSFTMoEWrapper
from .sft.buffers import KExpertsSFTBuffer

__all__ = ["AMXSFTMoEWrapper", "BaseSFTMoEWrapper", "KExpertsSFTBuffer"]
