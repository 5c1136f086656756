"""Runs in an engine's environment: prints what the workers of a server would receive.

    served_options.py vllm|sglang MODEL FLAG...

Prints, as JSON, the kt options in a copy of the engine's configuration.
"""

import argparse
import json
import logging
import pickle
import sys


def of_vllm(model: str, flags: list[str]) -> dict:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    config = pickle.loads(pickle.dumps(arguments.create_engine_config()))
    return config.additional_config["kt"]


def of_sglang(model: str, flags: list[str]) -> dict:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from kt_kernel.plugin_entrypoints.sglang.options import options_of

    logging.basicConfig(level=logging.INFO)  # as the engines' servers do
    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = ["--model-path", model, "--device", "cpu", *flags]
    arguments = ServerArgs.from_cli_args(parser.parse_args(given))
    arguments.resolve_once()
    arguments.check_server_args()
    return options_of(pickle.loads(pickle.dumps(arguments))).to_mapping()


if __name__ == "__main__":
    engine, model, *flags = sys.argv[1:]
    print(json.dumps((of_vllm if engine == "vllm" else of_sglang)(model, flags)))
