"""Runs in the SGLang environment: parses server commands and checks them, without a start.

    sglang_commands.py JOB.json RESULT.json

JOB: {name: arguments of `sglang serve`}. RESULT: {name: "" or the error}, as far as the command
comes before it starts an engine.
"""

import json
import sys
import traceback
from pathlib import Path

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def error_of(arguments: list[str]) -> str:
    try:
        server_args = prepare_server_args(arguments)
        server_args.resolve_once()
        server_args.check_server_args()
    except SystemExit as end:
        return str(end.code)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    load_plugins()
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: error_of(line) for name, line in job.items()}))
