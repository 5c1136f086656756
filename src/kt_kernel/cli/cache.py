"""``kt cache``: the measurements of this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="remove all measurements; they are repeated when needed")
    ] = False,
) -> None:
    """Show the measurements of this machine that are kept in the user's cache folder."""
    from ..runtime import machine_cache

    folder = machine_cache.cache_folder()
    shown = None
    if clear:
        for shown in machine_cache.clear():
            print(f"kt: removed {shown}")
    else:
        for path, key, entry in machine_cache.entries():
            if path != shown:
                print(path)
            shown = path
            print(f"  {key}: {json.dumps(entry)}")
    if shown is None:
        print(
            f"kt: {folder} holds no measurements"
            if folder
            else "kt: no home folder, so no measurements are kept"
        )
