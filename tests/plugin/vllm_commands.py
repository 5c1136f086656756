"""Runs in the vLLM environment: parses server commands and checks them, without a start.

    vllm_commands.py JOB.json RESULT.json

JOB: {name: arguments of `vllm serve`}. RESULT: {name: "" or the error}, as far as the command comes
before it starts an engine.
"""

import json
import sys
import traceback
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser


def error_of(arguments: list[str]) -> str:
    try:
        parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
        parsed = parser.parse_args(arguments)
        validate_parsed_serve_args(parsed)
        AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except SystemExit as end:
        return str(end.code)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    registry._run_in_subprocess = lambda look: look()  # vLLM starts one for each class: 10 s
    load_general_plugins()
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: error_of(line) for name, line in job.items()}))
