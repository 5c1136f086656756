"""vLLM plugin. The entry point is `register`."""

from .hooks import register

__all__ = ["register"]
