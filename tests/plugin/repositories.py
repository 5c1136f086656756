"""A cache of the Hugging Face hub with a repository that was not downloaded."""

from __future__ import annotations

from pathlib import Path

COMMIT = "0" * 40


def keep(cache: Path, name: str, path: Path) -> Path:
    """Makes the folder at `path` the repository `name` in the cache. Returns its snapshot there."""
    home = cache / ("models--" + name.replace("/", "--"))
    for folder in ("refs", "snapshots"):
        (home / folder).mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    snapshot = home / "snapshots" / COMMIT
    snapshot.symlink_to(path)
    return snapshot
