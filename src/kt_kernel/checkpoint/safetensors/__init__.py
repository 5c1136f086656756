"""Checkpoints in safetensors files, named as Hugging Face's models name their tensors."""
