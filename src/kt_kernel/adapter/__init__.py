"""LoRA adapters in PEFT's format: their files, and what they add to experts."""
