"""The model and the requests of the tests of kt tune."""

import json
from pathlib import Path

import kt_kernel

DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
CONTENT = json.loads((DEMO_MODEL / "config.json").read_text())
SMALL = "--context", 512, "--prompt", 128, "--answer", 64
