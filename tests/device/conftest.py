"""The kernels here run under Triton's interpreter: tests/conftest.py asks for it without a GPU."""

import os

if os.environ["TRITON_INTERPRET"] == "0":  # they are compiled: tests/gpu
    collect_ignore_glob = ["test_*.py"]
