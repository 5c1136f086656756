"""Turns documents into tokens, and marks those whose loss counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .documents import Document, Message

#: The label of a token whose loss does not count: torch's default ``ignore_index``.
IGNORED = -100

Tokens = npt.NDArray[np.int32]
Encoded = tuple[Tokens, Tokens]  # token ids, labels


class Encoder:
    """Encodes documents with a tokenizer of transformers.

    Args:
        assistant_only: whether only the loss of the assistant's messages counts.

    Raises:
        ValueError: ``assistant_only`` with a tokenizer that does not return offsets.
    """

    def __init__(self, tokenizer: Any, assistant_only: bool) -> None:
        if assistant_only and not tokenizer.is_fast:
            raise ValueError(
                "[data] assistant_only needs a fast tokenizer, the model has "
                f"{type(tokenizer).__name__}"
            )
        self._tokenizer, self._assistant_only = tokenizer, assistant_only

    def encode(self, document: Document) -> Encoded:
        """Token ids, and labels of the same length: the ids, or `IGNORED`.

        A text ends with the tokenizer's end-of-sequence token, if there is one. A conversation ends
        as the chat template ends it.

        Raises:
            ValueError: the tokenizer has no chat template, or the template refuses the messages; a
                text where ``assistant_only`` is set; the assistant's part cannot be determined.
        """
        if document.text is not None:
            if self._assistant_only:
                raise ValueError(
                    f'{document.place}: [data] assistant_only needs "messages", this is a text'
                )
            ids = list(self._tokenizer(document.text)["input_ids"])
            end = self._tokenizer.eos_token_id
            if end is not None and ids[-1:] != [end]:
                ids.append(end)
            return _same(ids)
        whole = self._render(document, document.messages)
        encoded = self._tokenizer(
            whole, add_special_tokens=False, return_offsets_mapping=self._assistant_only
        )
        ids = list(encoded["input_ids"])
        if not self._assistant_only:
            return _same(ids)
        spans = list(self._assistant_spans(document, whole))
        labels = [
            token if any(first <= start and end <= last for first, last in spans) else IGNORED
            for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        return np.array(ids, np.int32), np.array(labels, np.int32)

    def _assistant_spans(self, document: Document, whole: str) -> Iterator[tuple[int, int]]:
        """Where the assistant's messages are in a rendered conversation: after the prompt that asks
        for one, up to and including what ends it.

        Templates may render a message in another way when others follow. What they say about a part
        of the conversation holds only if it is the beginning of the whole.
        """
        for number, message in enumerate(document.messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(document, document.messages[:number], prompt=True)
            until = self._render(document, document.messages[: number + 1])
            if not (whole.startswith(until) and until.startswith(prompt)):
                raise ValueError(
                    f"{document.place}: the chat template renders message {number + 1} in another "
                    "way when others follow, so the assistant's part is not known; set [data] "
                    "assistant_only = false, or make each answer the last message of a line"
                )
            yield len(prompt), len(until)

    def _render(self, document: Document, messages: Sequence[Message], prompt: bool = False) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f'{document.place}: the model\'s tokenizer has no chat template for "messages"; '
                'use "text"'
            )
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # templates are programs of the model's authors
            raise ValueError(f"{document.place}: the chat template fails: {error}") from error


def _same(ids: list[int]) -> Encoded:
    tokens = np.array(ids, np.int32)
    return tokens, tokens
