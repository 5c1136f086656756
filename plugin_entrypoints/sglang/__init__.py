"""SGLang plugin. The entry point is `register`."""

from .plugin import register

__all__ = ["register"]
