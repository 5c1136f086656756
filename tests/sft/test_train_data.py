"""The data of kt sft train: files, chat templates, blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import kt_kernel
from kt_kernel.training.blocks import make_data, split
from kt_kernel.training.documents import Document, check_files, read_documents
from kt_kernel.training.encoding import IGNORED, Encoder

DEMO = Path(kt_kernel.__file__).parent / "demo_model"
END = 256
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As some models' templates do: thoughts are left out once the conversation goes on.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if loop.last and m['role'] == 'assistant' %}(thinks){% endif %}{{ m['content'] }}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]


@pytest.fixture
def tokenizer():
    found = AutoTokenizer.from_pretrained(DEMO)
    found.chat_template = CHAT
    return found


def text_of(ids) -> str:
    return bytes(i for i in ids if i < 256).decode()


def test_a_text_ends_with_the_end_token(tokenizer):
    ids, labels = Encoder(tokenizer, False).encode(Document("place", "Hi ü"))
    assert list(ids) == [*"Hi ü".encode(), END] and np.array_equal(ids, labels)


def test_a_conversation(tokenizer):
    document = Document("place", messages=TALK)
    whole = "<user>Who?</><assistant>Me.</><user>Why?</><assistant>So.</>"
    ids, labels = Encoder(tokenizer, False).encode(document)
    assert text_of(ids) == whole and np.array_equal(ids, labels)
    ids, labels = Encoder(tokenizer, True).encode(document)
    assert text_of(ids) == whole
    assert text_of(labels[labels != IGNORED]) == "Me.</>So.</>"
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))


def test_templates_that_change_earlier_messages(tokenizer):
    tokenizer.chat_template = FORGETFUL
    encoder = Encoder(tokenizer, True)
    ids, labels = encoder.encode(Document("place", messages=TALK[:2]))
    assert text_of(ids) == "<user>Who?</><assistant>(thinks)Me.</>"
    assert text_of(labels[labels != IGNORED]) == "(thinks)Me.</>"
    with pytest.raises(ValueError, match="file: line 3: the chat template renders message 2 in"):
        encoder.encode(Document("file: line 3", messages=TALK))


def test_what_the_encoder_refuses(tokenizer):
    with pytest.raises(ValueError, match='f: line 1: .* needs "messages", this is a text'):
        Encoder(tokenizer, True).encode(Document("f: line 1", "Words."))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match="f: line 2: the chat template fails: roles must alternate"
    ):
        Encoder(tokenizer, False).encode(Document("f: line 2", messages=TALK))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="f: line 2: .* no chat template"):
        Encoder(tokenizer, False).encode(Document("f: line 2", messages=TALK))


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"text": "One\u2028line", "id": 7}, {"messages": TALK}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\r\n")
    check_files([str(path)])
    one, two = read_documents(str(path))
    assert one == Document(f"{path}: line 1", "One\u2028line")
    assert two == Document(f"{path}: line 3", messages=TALK)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "list; expected an object"),
        ('{"prompt": "a"}', r"\['prompt'\]; expected an object with either"),
        (
            '{"text": "a", "messages": []}',
            r"\['messages', 'text'\]; expected an object with either",
        ),
        ('{"text": " "}', '"text" must be a string'),
        ('{"text": 3}', '"text" must be a string'),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": [{"role": "user"}]}', "message 1 is not as expected"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "message 1 is not as expected"),
        ('{"messages": ["a"]}', "message 1 is not as expected"),
    ],
)
def test_lines_that_are_refused(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"a.jsonl: line 2: {words}"):
        read_documents(str(path))


def test_files_that_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    for data, words in ((b"\xff\xfe", "a.txt: not UTF-8"), (b" \n", "a.txt: the file has no text")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            read_documents(str(path))
    with pytest.raises(ValueError, match="not a file"):
        check_files([str(tmp_path)])


def test_blocks(tokenizer, tmp_path):
    """All tokens in order, the last ones of the whole left out."""
    texts = ["abcdefg", "hijk", "lmnopqrstuvwxyz", "0123456789"]
    paths = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        paths.append(str(path))
    data = make_data(Encoder(tokenizer, False), paths[:3], paths[3:], 0.5, 4)
    joined = [i for text in texts[:3] for i in (*text.encode(), END)]
    assert data.train.ids.tolist() == [joined[i : i + 4] for i in range(0, 28, 4)]
    assert data.held_out.ids.tolist() == [[*b"0123"], [*b"4567"]]
    item = data.train[0]
    assert item["input_ids"].tolist() == item["labels"].tolist() == [*b"abcd"]
    short = make_data(Encoder(tokenizer, False), paths[:3], paths[3:], 0.5, 16)
    assert short.held_out.ids.tolist() == [[*b"0123456789", END]]
    assert short.digest != data.digest


def test_blocks_without_answers(tokenizer, tmp_path):
    """Their loss would be 0 / 0, and they cost a forward and a backward pass."""
    path = tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "yes"}]
    path.write_text("\n".join([json.dumps({"messages": talk})] * 3))
    data = make_data(Encoder(tokenizer, True), [str(path)], [str(path)], 0.5, 8)
    assert data.train.available == 3 * 66  # "<user>", 40 x, "</>", "<assistant>", "yes", "</>"
    assert len(data.train) == 4  # two answers, each in two blocks; the third one is in none
    assert data.train.labels[data.train.labels != IGNORED].tolist() == [*b"yes</>"] * 2


def test_data_without_any_answer(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"messages": [{"role": "user", "content": "x"}]})] * 9))
    with pytest.raises(ValueError, match="a.jsonl: no token's loss counts; nothing can be learned"):
        make_data(Encoder(tokenizer, True), [str(path)], [], 0.5, 8)


def test_a_part_is_held_out(tokenizer, tmp_path):
    """The end of each file: of a text, or whole lines."""
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("x" * 89 + "y" * 10)
    lines.write_text("\n".join(json.dumps({"text": f"{i}" * 9}) for i in range(10)))
    data = make_data(Encoder(tokenizer, False), [str(text), str(lines)], [], 0.1, 10)
    held = data.held_out.ids.flatten().tolist()
    assert held == [*b"y" * 9, END, *b"9" * 9, END]
    assert data.train.ids.flatten().tolist()[:90] == [*b"x" * 89, *b"y"]


def test_splitting():
    def documents(*sizes):
        return [(np.zeros(size, np.int32),) * 2 for size in sizes]

    def sizes(*given, fraction):
        return [[len(ids) for ids, _ in part] for part in split(documents(*given), fraction)]

    assert sizes(100, fraction=0.25) == [[75], [25]]
    assert sizes(10, 10, 10, 10, fraction=0.5) == [[10, 10], [10, 10]]
    assert sizes(10, 90, fraction=0.05) == [[10], [90]]
    assert sizes(90, 10, fraction=0.9) == [[90], [10]]


def test_too_little_text(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh")
    encoder = Encoder(tokenizer, False)
    with pytest.raises(
        ValueError, match="a.txt: 7 tokens to train on, fewer than a block; .*sequence"
    ):
        make_data(encoder, [str(path)], [], 0.2, 64)
    with pytest.raises(ValueError, match="the held-out part has 1 tokens, and no loss"):
        make_data(encoder, [str(path)], [], 0.1, 4)
    silent = tmp_path / "b.jsonl"
    silent.write_text(json.dumps({"messages": TALK[:1]}))
    answer = tmp_path / "c.jsonl"
    answer.write_text(json.dumps({"messages": TALK}))
    with pytest.raises(ValueError, match="b.jsonl: no token's loss counts"):
        make_data(Encoder(tokenizer, True), [str(silent)], [str(answer)], 0.1, 8)
