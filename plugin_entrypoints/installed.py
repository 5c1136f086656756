"""Looks whether the installed engine has what its plugin needs, without starting the engine.

    python -m kt_kernel.plugin_entrypoints.installed vllm

Prints one line of JSON. It runs in a process of its own, because it imports the engine.
"""

import json
import sys
from importlib import import_module
from typing import Any

from kt_kernel.plugin_entrypoints.contract import Contract


def differences(contract: Contract) -> dict[str, Any]:
    """The installed version (version), the names that the plugin needs and that are missing
    (lacks), and a line for each other difference from a tested version (notes)."""
    lacks = contract.lacks()
    return {
        "version": contract.version(),
        "lacks": lacks,
        "notes": [
            *filter(None, [contract.untested()]),
            *contract.misses(),
            *(contract.unknown() if not lacks else ()),
        ],
    }


def main() -> None:
    (package,) = sys.argv[1:]
    contract = import_module(f"kt_kernel.plugin_entrypoints.{package}.contract").CONTRACT
    found = differences(contract)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
