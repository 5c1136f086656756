# The compiled module. What it offers is Any for now, here at the one border to C++.
from typing import Any

def __getattr__(name: str) -> Any: ...
