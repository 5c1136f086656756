"""``python -m kt_kernel.convert``: the same as ``kt quant``."""

from __future__ import annotations

import sys

from .cli.quant import app
from .cli.running import run

if __name__ == "__main__":
    sys.exit(run(app))
