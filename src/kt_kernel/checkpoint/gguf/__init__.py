"""Checkpoints in GGUF files."""
