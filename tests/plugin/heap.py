"""Used inside the engines' environments: collections of garbage that cost little."""

import gc


def freeze() -> None:
    """Takes what is there now, mostly imported modules, out of all later collections.

    vLLM collects nine times while an engine starts and ends. Looking at all modules each time would
    take most of the time of a start. vLLM also undoes the freezing, which must not happen.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
