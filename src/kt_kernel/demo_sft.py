"""`make demo-sft`: tunes the small model of this package on a play, and serves it with vLLM.

Runs in an environment where vLLM and this package with its extra "sft" are installed:
``python -m kt_kernel.demo_sft``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from . import demo
from .serving.flags import exit_with
from .serving.option_table import OptionError
from .serving.server_process import run_guarded
from .training.run import ADAPTER, RUN

SETTINGS = Path(__file__).parent / "demo_text" / "sft.toml"
PROMPT = "ROSALIND: "


def main(arguments: list[str] | None = None) -> int:
    """Completes a prompt, tunes the model, completes the prompt again; 0 on success."""
    args = _arguments(arguments)
    if args.output.exists():
        if not (args.output / RUN).exists():
            raise exit_with(OptionError(f"--output {args.output}: exists, and is no earlier run"))
        shutil.rmtree(args.output)
    served = ["--prompt", args.prompt, "--max-tokens", str(args.max_tokens)]

    print("== the model as it is\n")
    code = demo.main(served)
    if code:
        return code
    print("\n== tuning: two or three minutes on two cores\n")
    # The command kt through this interpreter: its script need not be on PATH.
    call = "from kt_kernel.cli.main import main; main()"
    options = ["sft", "train", str(SETTINGS), "--output", str(args.output)]
    print("$ kt " + " ".join(options), flush=True)
    code = run_to_its_end([sys.executable, "-c", call, *options])
    if code:
        return code
    print("\n== the tuned model\n")
    return demo.main([*served, "--lora", str(args.output / ADAPTER)])


def run_to_its_end(command: list[str]) -> int:
    """Runs a command, and returns its exit code. Ctrl-C is left to the command, which ends if this
    process is killed.

    OpenMP's threads, which compute attention, sleep while they wait: awake they take the cores from
    the experts' threads, and from everything else on a machine that is busy.
    """
    return run_guarded(command, {"OMP_WAIT_POLICY": "passive"} | os.environ)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kt_kernel.demo_sft", description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("kt-demo-sft"),
        help="folder for the adapter, the plot and the metrics; an earlier run there is removed",
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=160)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    demo.run(main)
