"""SGLang plugin. The entry point is `register`."""

from .options import register

__all__ = ["register"]
