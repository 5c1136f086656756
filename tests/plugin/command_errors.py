"""Shared by vllm_commands.py and sglang_commands.py."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def answer(check: Callable[[list[str]], None]) -> None:
    """Reads the job, calls check(arguments) for each command, and writes the result."""

    def error_of(arguments: list[str]) -> str:
        try:
            check(arguments)
        except SystemExit as end:
            return str(end.code)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return ""

    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: error_of(line) for name, line in job.items()}))
