# Size: 1 GB, 1 to 3 minutes
# Tests and lint. No engine is in it: the tests of engines start those environments' pythons.
install torch numpy safetensors transformers matplotlib
install pytest pytest-timeout pytest-xdist hypothesis
install ruff clang-format import-linter pre-commit
# Some tests build the package (sanitizers, errors of the build).
install scikit-build-core nanobind cmake ninja
