# Size: 1.9 GB, 1 to 3 minutes
# Tests and lint. No engine is in it: the tests of engines start those environments' pythons.
install torch numpy safetensors transformers matplotlib
install gguf typer rich
# Its interpreter runs our GPU kernels on the CPU.
install --no-deps triton
# What wrote or reads the quantised formats: the readers are compared with it.
install --no-deps compressed-tensors
install loguru psutil pydantic
# Fine-tuning is compared with PEFT and runs under transformers' Trainer, and TRL's.
install peft accelerate trl
install pytest pytest-timeout pytest-xdist hypothesis
install ruff clang-format mypy import-linter pre-commit
# Some tests build the package (sanitizers, errors of the build).
install scikit-build-core nanobind cmake ninja
