"""Used in the engines' environments: makes garbage collections cheap."""

import gc


def freeze() -> None:
    """Excludes what exists now, mostly imported modules, from all later collections.

    vLLM collects nine times while an engine starts and ends. Visiting all modules each time would
    take most of the time of a start. vLLM also undoes the freezing, so this prevents that.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
