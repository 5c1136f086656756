"""Makes the calls:

    python -m tests.kernels.entries MODULE LIBRARY ENTRY...

LIBRARY stands in for the CUDA driver. Each call is printed before it is made, so that a call that
ends the process is known. Faults in its outcome are printed, too.
"""

from __future__ import annotations

import sys

from ..core import module
from .cases import cases


def main() -> None:
    name, library, *wanted = sys.argv[1:]
    core = module(name)
    assert core is not None
    everything = cases(core, library)
    for entry in wanted:
        for number, case in enumerate(everything[entry]):

            def announce(label: str, place: str = f"{entry} [{number}]") -> None:
                print(f"calling {place}: {label}".replace("\n", " "), flush=True)

            for problem in case.check(announce):
                print(f"PROBLEM {entry} [{number}]: {problem}".replace("\n", " "), flush=True)
        print(f"done {entry}", flush=True)


if __name__ == "__main__":
    main()
