"""Checkpoints named as repositories of the Hugging Face hub, found in its local cache.

A name is ``org/name`` or ``org/name/file or folder``, optionally with ``@revision``. Unless
HF_HUB_OFFLINE is set, files missing in the cache are downloaded: all JSON files, and either the
safetensors files (those in the index, if there is one) or the repository's only GGUF model.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..adapter.files import CONFIG, WEIGHTS
from ..checkpoint.index import INDEX_SUFFIX, MAIN_INDEX, listed_files
from .repository import Repository

_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.gguf$")
_SIDECARS = ("mmproj", "imatrix")  # in names of GGUF files that are not models
_NAMED = 8  # files named in a message
# If one of these is set, the engine downloads repositories from another hub.
_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")

_logger = logging.getLogger(__name__)

#: Selects the files that are needed: (repository, its files, words for where they are) -> files.
#: Raises ValueError if they are not there.
Choose = Callable[[Repository, Sequence[str], str], list[str]]
#: Takes the selected files from the hub: (what its library needs to know, files) -> their folder.
Take = Callable[[dict[str, Any], Sequence[str]], str]


def take_all(where: dict[str, Any], wanted: Sequence[str]) -> str:
    """Downloads the files that are not in the cache, and all JSON files."""
    folder: str = snapshot_download(**where, allow_patterns=[*wanted, "*.json"])
    return folder


def local_path(
    repository: Repository,
    cache_dir: str | None = None,
    choose: Choose | None = None,
    take: Take = take_all,
) -> str:
    """The path of a repository, or of the file or folder named in it, in the hub's cache.

    Args:
        choose: `choose_checkpoint` (default) or `choose_adapter`.
        cache_dir: None: the hub's own, which HF_HOME and HF_HUB_CACHE set.
        take: not called without a hub.

    Raises:
        ValueError: it is not in the cache and cannot be downloaded, or its name is ambiguous. One
            line, without the repository's name.
    """
    for variable in _OTHER_HUBS:
        if os.environ.get(variable, "").strip().lower() in ("1", "true"):
            raise ValueError(
                f"{variable} is set, but kt-moe reads repositories from the Hugging Face hub only; "
                "give the model's folder"
            )
    cache = cache_dir or constants.HF_HUB_CACHE
    where = {"repo_id": repository.name, "revision": repository.revision, "cache_dir": cache}
    chosen = repository, where, choose or choose_checkpoint
    try:
        folder = _cached(*chosen) if constants.HF_HUB_OFFLINE else _downloaded(*chosen, take)
    except ValueError:
        raise
    except Exception as error:  # the HTTP library's, too, which differs between versions of the hub
        raise ValueError(_problem(repository, error, cache)) from error
    return os.path.join(folder, repository.inside) if repository.inside else folder


def _cached(repository: Repository, where: dict[str, Any], choose: Choose) -> str:
    """The folder of the repository's files that are in the cache."""
    folder = snapshot_download(**where, ignore_patterns=["*"], local_files_only=True)
    files = [
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    ]
    choose(repository, files, f"its copy in the cache, {folder},")
    return folder


def _downloaded(repository: Repository, where: dict[str, Any], choose: Choose, take: Take) -> str:
    """The same, after downloading the files that are needed. If the hub is unreachable, only the
    cache is used."""
    try:
        listing = HfApi().model_info(repository.name, revision=repository.revision)
    except RevisionNotFoundError:
        raise
    except Exception as error:
        try:
            folder = _cached(repository, where, choose)
        except LocalEntryNotFoundError:
            raise error from None
        _logger.warning(
            "kt: %s: using the copy in the cache, because the hub is unreachable: %s",
            repository.name,
            _in_words(error),
        )
        return folder
    files = [file.rfilename for file in listing.siblings or ()]
    wanted = choose(repository, files, "the repository")
    if wanted[0].endswith(INDEX_SUFFIX):
        index = hf_hub_download(filename=wanted[0], **where)
        inside, folder = os.path.dirname(wanted[0]), os.path.dirname(index)
        wanted = [
            os.path.join(inside, os.path.relpath(file, folder)) for file in listed_files(index)
        ]
    return take(where, wanted)


def choose_adapter(repository: Repository, files: Sequence[str], place: str) -> list[str]:
    """The two files of a PEFT adapter. Raises ValueError if one is missing."""
    wanted = [os.path.join(repository.inside, name) for name in (CONFIG, WEIGHTS)]
    for name in wanted:
        if name not in files:
            raise ValueError(f"{place} has no {name}; expected a PEFT adapter")
    return wanted


def choose_checkpoint(repository: Repository, files: Sequence[str], place: str) -> list[str]:
    """The files of the named checkpoint, or only its index. `place` describes where they are.

    Raises ValueError if there is none or more than one.
    """
    inside = repository.inside
    below = [name for name in files if not inside or name == inside or _is_in(inside, name)]
    if _PART.search(inside):  # one part stands for all
        stem = _PART.sub("", inside)
        below = [name for name in files if _PART.search(name) and _PART.sub("", name) == stem]
    gguf = [name for name in below if name.endswith(".gguf")]
    safetensors = [name for name in below if name.endswith(".safetensors")]
    if not gguf and not safetensors:
        lack = f"nothing at {inside!r}" if inside and not below else "no safetensors or GGUF file"
        raise ValueError(f"{place} has {lack}")
    if gguf and safetensors:
        raise ValueError(
            f"{place} has both GGUF files ({gguf[0]}) and safetensors files "
            f"({safetensors[0]}); choose a file as {repository.name}/FILE"
        )
    if gguf:
        return _only_model(repository, gguf, place)
    index = [name for name in below if name.endswith(INDEX_SUFFIX) and not _depth(inside, name)]
    main = [name for name in index if os.path.basename(name) == MAIN_INDEX]
    return main or (index if len(index) == 1 else safetensors)


def _only_model(repository: Repository, files: list[str], place: str) -> list[str]:
    """The GGUF files of the only model among them."""
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        models.setdefault(_PART.sub("", name), []).append(name)
    if len(models) > 1:
        whole = {
            stem: parts
            for stem, parts in models.items()
            if not any(word in os.path.basename(stem).lower() for word in _SIDECARS)
        }
        models = whole or models
    if len(models) > 1:
        names = [parts[0] for parts in models.values()]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise ValueError(
            f"{place} has {len(names)} GGUF models ({', '.join(names[:_NAMED])}{more}); "
            f"choose one as {repository.name}/FILE"
        )
    return next(iter(models.values()))


def _is_in(folder: str, name: str) -> bool:
    return name.startswith(folder + "/")


def _depth(folder: str, name: str) -> int:
    """Folders between a folder and a file below it."""
    return os.path.relpath(name, folder or ".").count("/")


def _problem(repository: Repository, error: Exception, cache_dir: str) -> str:
    """Explains an error of the hub's library in one line."""
    if isinstance(error, GatedRepoError):
        return (
            "access to this repository is restricted; accept its conditions on the hub, and set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "no such file or folder, and the hub has no such repository, or it is private "
            "(set HF_TOKEN to a token that may read it)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {repository.revision!r}"
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        at = f" at revision {repository.revision!r}" if repository.revision else ""
        return (
            f"no such file or folder, and no such repository{at} in the cache {cache_dir}; "
            "HF_HUB_OFFLINE is set, so it was not downloaded"
        )
    return (
        f"no such file or folder, not in the cache {cache_dir}, and the download failed: "
        f"{_in_words(error)}"
    )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
