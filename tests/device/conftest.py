"""The kernels run in Triton's interpreter here, which tests/conftest.py selects without a GPU."""

import os

if os.environ["TRITON_INTERPRET"] == "0":  # compiled kernels are tested in tests/gpu
    collect_ignore_glob = ["test_*.py"]
