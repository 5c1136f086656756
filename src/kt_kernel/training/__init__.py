"""`kt sft train`: LoRA on the experts of a transformers model, from a TOML file.

`read_settings` checks the file, `train` does the work. Names are loaded at first use, because the
work needs transformers and the settings do not.
"""
