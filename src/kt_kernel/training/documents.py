"""Reads the training data: plain text, and JSON lines with texts or conversations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.files import need_file

TEXT_FILES, JSON_LINES = (".txt", ".md"), ".jsonl"

Message = Mapping[str, str]


@dataclass(frozen=True)
class Document:
    """A text or a conversation.

    Attributes:
        place: file, and line in it, for messages.
        text: None for a conversation.
        messages: each with "role" and "content".
    """

    place: str
    text: str | None = None
    messages: Sequence[Message] = ()


def check_files(paths: Sequence[str]) -> None:
    """Raises OSError or ValueError for a path that is no file with a known extension."""
    for path in paths:
        need_file(path, "a text file or JSON lines")
        if not path.endswith((*TEXT_FILES, JSON_LINES)):
            accepted = ", ".join(TEXT_FILES)
            raise ValueError(
                f"{path}: unknown extension; accepted: {accepted} (plain text) and {JSON_LINES}"
            )


def read_documents(path: str) -> list[Document]:
    """The documents of a file: one for a text file, one for each line of JSON.

    Raises:
        OSError: the file cannot be read.
        ValueError: not UTF-8, or a line without a text or a conversation; nothing but white space.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.path.abspath(path)}: not UTF-8 text: {error}") from None
    if path.endswith(JSON_LINES):
        # Not splitlines(), which also splits at characters that JSON strings may contain.
        lines = enumerate(text.split("\n"), 1)
        found = [_parse(line, f"{path}: line {number}") for number, line in lines if line.strip()]
    else:
        found = [Document(path, text)] if text.strip() else []
    if not found:
        raise ValueError(f"{path}: the file has no text")
    return found


def _parse(line: str, place: str) -> Document:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(content, dict) or len({"text", "messages"} & content.keys()) != 1:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f'{place}: {found}; expected an object with either "text" or "messages"')
    if "text" in content:
        text = content["text"]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'{place}: "text" must be a string that is not empty')
        return Document(place, text)
    return Document(place, messages=_messages(content["messages"], place))


def _messages(messages: Any, place: str) -> list[Message]:
    expected = 'a list of objects with "role" and "content", both strings'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{place}: "messages" must be {expected}')
    for number, message in enumerate(messages, 1):
        parts = [message.get(n) for n in ("role", "content")] if isinstance(message, dict) else []
        if not parts or not all(isinstance(part, str) for part in parts):
            raise ValueError(
                f'{place}: message {number} is not as expected; "messages" must be {expected}'
            )
    return messages
