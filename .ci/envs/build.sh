# Size: 0.1 GB, under a minute
# What compiles kt-moe, for one Python version; the same as pyproject.toml's build requirements.
install scikit-build-core nanobind cmake ninja
