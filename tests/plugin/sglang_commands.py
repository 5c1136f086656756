"""Runs in the SGLang environment: parses server commands and checks them, without a start.

    sglang_commands.py JOB.json RESULT.json

JOB: {name: arguments of `sglang serve`}. RESULT: {name: "" or the error}, as far as the command
comes before it starts an engine.
"""

from command_errors import answer
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def check(arguments: list[str]) -> None:
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    server_args.check_server_args()


if __name__ == "__main__":
    load_plugins()
    answer(check)
