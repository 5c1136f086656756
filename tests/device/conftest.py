"""The kernels run under Triton's interpreter, which has to be asked for before they are defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
