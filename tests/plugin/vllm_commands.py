"""Runs in the vLLM environment: parses server commands and checks them, without a start.

    vllm_commands.py JOB.json RESULT.json

JOB: {name: arguments of `vllm serve`}. RESULT: {name: "" or the error}, as far as the command comes
before it starts an engine.
"""

from command_errors import answer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser


def check(arguments: list[str]) -> None:
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    AsyncEngineArgs.from_cli_args(parsed).create_engine_config()


if __name__ == "__main__":
    registry._run_in_subprocess = lambda look: look()  # vLLM starts one for each class: 10 s
    load_general_plugins()
    answer(check)
