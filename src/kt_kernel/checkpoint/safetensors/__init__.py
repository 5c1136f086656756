"""Checkpoints in safetensors files, with Hugging Face's tensor names."""
