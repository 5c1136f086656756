"""SGLang plugin: which prompts SGLang captures in CUDA graphs.

By default, SGLang captures prompts of every length up to its largest batch. In a CUDA graph, no
experts can be streamed to the GPU. Therefore the plugin lets SGLang capture short prompts only,
unless the user chose their lengths.
"""

import dataclasses
import logging
from typing import Any

from kt_kernel.serving.options import KTOptions

from .options import decide

# SGLang's record of the settings of CUDA graphs that the user gave, as (phase, key). Every
# supported version has it; if one did not, nothing would be changed.
_GIVEN = "_cuda_graph_config_locked"


def largest_captured(arguments: Any, phase: str) -> int:
    """Tokens of the largest batch that SGLang captures in a phase; 0 if it captures none.

    arguments: the resolved ones. phase: "decode" or "prefill".
    """
    settings = getattr(arguments.cuda_graph_config, phase)
    if settings.backend == "disabled":
        return 0
    tokens: int = max(settings.bs or [settings.max_bs or 0])  # of decode: requests
    if phase == "decode" and arguments.speculative_algorithm is not None:
        tokens *= arguments.speculative_num_draft_tokens or 1
    return tokens


def leave_long_prompts(
    server_args: Any, arguments: Any, config: Any, options: KTOptions, logger: logging.Logger
) -> None:
    """Lets SGLang capture only prompts that are shorter than those that may be streamed.

    Does nothing if experts are not streamed, or if the user chose which prompts are captured.

    server_args, arguments: SGLang's, as given and resolved; some experts are cold. config: that of
    the language model. options: prepared.
    """
    graphs = arguments.cuda_graph_config
    prefill, threshold = graphs.prefill, options.given_threshold
    if arguments.device != "cuda" or prefill.backend == "disabled":
        return
    given = getattr(server_args, _GIVEN, None)
    if given is None or not given.isdisjoint((("prefill", "bs"), ("prefill", "max_bs"))):
        return
    # Not at the top: the plugin is loaded without kt options, too, and these take torch.
    from kt_kernel.checkpoint import open_checkpoint
    from kt_kernel.serving.streamed_models import LARGEST_CAPTURED, may_stream

    checkpoint = None if options.weight_path is None else open_checkpoint(options.weight_path)
    if not may_stream(options, config, checkpoint):
        return
    limit = LARGEST_CAPTURED if threshold is None else threshold - 1
    # Batches up to the largest captured one that decodes are never streamed, see `EngineSide`.
    limit = max(limit, largest_captured(arguments, "decode"))
    sizes = list(prefill.bs or ())
    captured = [size for size in sizes if size <= limit]
    if captured == sizes:
        return
    changed = dataclasses.replace(prefill, bs=captured, max_bs=max(captured, default=0))
    if not captured:
        changed = dataclasses.replace(prefill, backend="disabled")
    decide(server_args, cuda_graph_config=dataclasses.replace(graphs, prefill=changed))
    logger.info(
        "kt: SGLang captures prompts of up to %d tokens in CUDA graphs, in place of %d, so that "
        "longer ones can be streamed to the GPU; --cuda-graph-max-bs-prefill sets another number",
        max(captured, default=0),
        max(sizes),
    )
