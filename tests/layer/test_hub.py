"""Checkpoints named as repositories: from the cache alone, and from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

import kt_kernel
from kt_kernel.runtime.text import shown_size
from kt_kernel.serving.class_check import read_config
from kt_kernel.serving.hub import choose_adapter, local_path
from kt_kernel.serving.repository import Repository
from kt_kernel.tuning.plan import find_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = COMMIT[::-1]
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
SHARDS = {
    "model.safetensors.index.json": INDEX,
    "config.json": "{}",
    "model-1.safetensors": "one",
    "model-2.safetensors": "two",
}
QUANTISATIONS = {"m-Q4_K_M.gguf": "4", "m-Q8_0.gguf": "8", "mmproj-m.gguf": "p", "README.md": ""}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "a"}
SPLIT = {"Q4/m-00001-of-00002.gguf": "1", "Q4/m-00002-of-00002.gguf": "2", "Q8/m.gguf": "8"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/name", Repository("org/name")),
        ("org/name-1.5_x@main", Repository("org/name-1.5_x", "", "main")),
        ("org/name/Q4/file.gguf", Repository("org/name", "Q4/file.gguf")),
        ("org/name/file.gguf@refs/pr/1", Repository("org/name", "file.gguf", "refs/pr/1")),
        *(
            (text, None)
            for text in (
                "",
                "name",
                "/org/name",
                "./org/name",
                "../x",
                "org/../x",
                "org//name",
                "org/",
                "a b/c",
                "s3://org/name",
                "org/name@",
            )
        ),
    ],
)
def test_names(text: str, wanted: Repository | None) -> None:
    assert Repository.parse(text) == wanted


# ---- the cache alone


def keep(
    cache: Path, name: str, files: dict[str, str], commit: str = COMMIT, ref: str = "main"
) -> Path:
    """A repository in the layout of the hub's cache: a snapshot of links to blobs."""
    home = cache / ("models--" + name.replace("/", "--"))
    for path, text in files.items():
        blob = home / "blobs" / hashlib.sha256(text.encode()).hexdigest()
        link = home / "snapshots" / commit / path
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    return home / "snapshots" / commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without a hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def found(text: str, **where: Any) -> str:
    repository = Repository.parse(text)
    assert repository is not None
    return local_path(repository, **where)


def problem(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        found(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_commands_name_the_repository(cache: Path) -> None:
    """Of `kt model check` and `kt tune`: one that is not there, and one without weights."""
    with pytest.raises(ValueError, match=r"^org/none: no such file or folder, and no such repo"):
        read_config("org/none")
    config = (Path(kt_kernel.__file__).parent / "demo_model" / "config.json").read_text()
    keep(cache, "org/bare", {"config.json": config})
    assert read_config("org/bare")["num_experts"] == 16
    with pytest.raises(ValueError, match=r"^org/bare: its copy in the cache, .* has no safetensor"):
        find_model("org/bare")


def test_what_is_in_the_cache(cache: Path) -> None:
    main = keep(cache, "org/name", SHARDS)
    other = keep(cache, "org/name", SHARDS, OTHER, "v2")
    assert found("org/name") == str(main)
    assert found("org/name@v2") == found(f"org/name@{OTHER}") == str(other)
    assert found("org/name/model-1.safetensors") == str(main / "model-1.safetensors")
    assert "no such repository at revision 'v3' in the cache" in problem("org/name@v3")
    assert "has nothing at 'model-3.safetensors'" in problem("org/name/model-3.safetensors")


def test_another_cache(cache: Path) -> None:
    """An engine's --download-dir."""
    path = keep(cache / "elsewhere", "org/name", SHARDS)
    assert found("org/name", cache_dir=str(cache / "elsewhere")) == str(path)
    assert f"no such repository in the cache {cache}; HF_HUB_OFFLINE" in problem("org/name")


def test_several_gguf_models(cache: Path) -> None:
    """They are listed, and how to name one."""
    path = keep(cache, "org/name", QUANTISATIONS)
    assert problem("org/name") == (
        f"its copy in the cache, {path}, has 2 GGUF models (m-Q4_K_M.gguf, m-Q8_0.gguf); "
        "choose one as org/name/FILE"
    )
    assert found("org/name/m-Q8_0.gguf") == str(path / "m-Q8_0.gguf")
    many = keep(cache, "org/many", {f"m-{i}.gguf": str(i) for i in range(30)})
    assert f"{many}, has 30 GGUF models (m-0.gguf, " in problem("org/many")
    assert problem("org/many").endswith(" and 22 more); choose one as org/many/FILE")


def test_split_gguf_models(cache: Path) -> None:
    path = keep(cache, "org/name", SPLIT)
    assert "2 GGUF models (Q4/m-00001-of-00002.gguf, Q8/m.gguf)" in problem("org/name")
    for inside in ("Q4", "Q8", "Q4/m-00001-of-00002.gguf", "Q8/m.gguf"):
        assert found(f"org/name/{inside}") == str(path / inside)


def test_one_gguf_model(cache: Path) -> None:
    path = keep(cache, "org/name", {"m-Q8_0.gguf": "8", "mmproj-m.gguf": "p", "m.imatrix.gguf": ""})
    assert found("org/name") == str(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": ""}, "has no safetensors or GGUF file"),
        ({"a.gguf": "", "b.safetensors": ""}, "has both GGUF files (a.gguf) and safetensors files"),
    ],
)
def test_no_checkpoint(files: dict[str, str], message: str, cache: Path) -> None:
    keep(cache, "org/name", files)
    assert message in problem("org/name")


def test_adapters(cache: Path) -> None:
    """A checkpoint of a training run beside one does not count."""
    steps = {f"checkpoint-1/{name}": text for name, text in ADAPTER.items()}
    path = keep(cache, "org/adapter", ADAPTER | steps | {"README.md": ""})
    assert found("org/adapter", choose=choose_adapter) == str(path)
    inside = found("org/adapter/checkpoint-1", choose=choose_adapter)
    assert inside == str(path / "checkpoint-1")
    keep(cache, "org/model", SHARDS)
    with pytest.raises(ValueError, match="has no adapter_config.json; expected a PEFT adapter"):
        found("org/model", choose=choose_adapter)


@pytest.mark.parametrize("variable", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_another_hub(variable: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(cache, "org/name", SHARDS)
    monkeypatch.setenv(variable, "0")
    assert found("org/name") == str(path)
    monkeypatch.setenv(variable, "True")
    assert problem("org/name").startswith(f"{variable} is set, but kt-moe reads repositories from")


# ---- a hub

REPOSITORIES: dict[str, dict[str, Any]] = {
    "org/shards": SHARDS | {"original/big.safetensors": "no", "weights.bin": "no"},
    "org/single": {"model.safetensors": "one", "config.json": "{}", "original/a.bin": "no"},
    "org/gguf": QUANTISATIONS,
    "org/split": SPLIT,
    "org/adapter": ADAPTER | {"checkpoint-1/adapter_model.safetensors": "no", "model.bin": "no"},
}
ERRORS = {
    "org/gated": (403, "GatedRepo"),
    "org/gated-but-here": (403, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/none": (404, "RepoNotFound"),
    "org/broken": (500, ""),
}
ASK = """
import json, sys
import kt_kernel
from kt_kernel.serving.class_check import read_config
from kt_kernel.serving.hub import choose_adapter, local_path
from kt_kernel.serving.repository import Repository
from kt_kernel.tuning.plan import find_model

answers = {}
for text in sys.argv[1:]:
    try:
        choose = choose_adapter if "adapter" in text else None
        answers[text] = local_path(Repository.parse(text), choose=choose)
    except ValueError as error:
        answers[text] = f"error: {error}"
print(json.dumps(answers))
"""


class Hub(BaseHTTPRequestHandler):
    """What the hub's library asks for. Files have no other content than their text."""

    asked: list[str] = []

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        kind, revision, *inside = (parts[4:] if api else parts[2:]) or ["revision", "main"]
        if name in ERRORS:
            status, code = ERRORS[name]
            return self._answer(status, X_Error_Code=code)
        files = REPOSITORIES[name]
        if revision not in ("main", COMMIT):
            return self._answer(404, X_Error_Code="RevisionNotFound")
        if kind == "resolve":
            path = "/".join(inside)
            if self.command == "GET":
                part = self.headers["Range"]
                self.asked.append(f"{name}/{path}" + (f" {part}" if part else ""))
            content = files[path] if isinstance(files[path], bytes) else files[path].encode()
            digest = hashlib.sha256(content).hexdigest()
            headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{digest}"'}
            if wanted := self.headers["Range"]:
                first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                return self._answer(206, content[first : last + 1], **headers)
            return self._answer(200, content, **headers)
        found: Any = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
        if kind == "tree":
            found = [
                {"type": "file", "path": f, "size": len(text), "oid": f}
                for f, text in files.items()
            ]
        self._answer(200, json.dumps(found).encode(), Content_Type="application/json")

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(home: Path, hub: str, *texts: str, program: str = ASK) -> dict[str, Any]:
    """What a process with that hub and that cache finds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = kept | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *texts],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_downloaded(tmp_path: Path, hub: str) -> None:
    """The files that an index lists, or those in the format, and nothing besides."""
    Hub.asked.clear()
    files = {
        "org/shards": {*SHARDS},
        "org/single": {"model.safetensors", "config.json"},
        "org/gguf/m-Q8_0.gguf": {"m-Q8_0.gguf"},
        "org/adapter": {*ADAPTER},
        "org/split/Q4/m-00001-of-00002.gguf": {name for name in SPLIT if name.startswith("Q4")},
    }
    answers = ask(tmp_path, hub, *files)
    for text, wanted in files.items():
        name, inside = "/".join(text.split("/")[:2]), "/".join(text.split("/")[2:])
        snapshot = tmp_path / "hub" / ("models--" + name.replace("/", "--")) / "snapshots" / COMMIT
        assert answers[text] == str(snapshot / inside)
        found = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
        assert found == wanted
    assert len(Hub.asked) == len({*Hub.asked}) == sum(map(len, files.values()))


def test_what_a_hub_refuses(tmp_path: Path, hub: str) -> None:
    lines = {
        "org/none": "no such file or folder, and the hub has no such repository, or it is private",
        "org/private": "no such file or folder, and the hub has no such repository, or it is",
        "org/gated": "access to this repository is restricted; accept its conditions on the hub",
        "org/broken": "no such file or folder, not in the cache",
        "org/shards@v9": "the repository has no revision 'v9'",
        "org/gguf": "the repository has 2 GGUF models (m-Q4_K_M.gguf, m-Q8_0.gguf); choose one",
    }
    kept = keep(tmp_path / "hub", "org/gated-but-here", SHARDS)
    answers = ask(tmp_path, hub, *lines, "org/gated-but-here")
    assert answers.pop("org/gated-but-here") == str(kept)
    for text, answer in answers.items():
        assert answer.startswith(f"error: {lines[text]}") and "\n" not in answer, answer


def test_a_hub_that_cannot_be_asked(tmp_path: Path) -> None:
    """What is in the cache will do."""
    path = keep(tmp_path / "hub", "org/name", SHARDS)
    answers = ask(tmp_path, "http://127.0.0.1:1", "org/name", "org/other")
    assert answers["org/name"] == str(path)
    assert "not in the cache" in answers["org/other"] and "\n" not in answers["org/other"]


TUNE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from kt_kernel.serving.class_check import from_hub
from kt_kernel.tuning import run
from kt_kernel.tuning.plan import find_model

def about(model):
    found = find_model(model)
    shape = asdict(found.shape)
    shape.pop("name")
    return found, str([shape, found.method, found.quantisation, str(found.form(found.method))])

local, (found, said) = about(sys.argv[1])[1], about(sys.argv[2])
answers = {"same": local == said, "absent": found.absent, "path": found.path, "said": []}
run._download(found, answers["said"].append)
again, said = about(sys.argv[2])
answers |= {"then": local == said, "absent then": again.absent, "path then": again.path}
print(json.dumps(answers))
"""


def test_tuning_takes_headers(tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kt tune` knows as much of them as of the whole files, which it downloads for its check."""
    demo = Path(kt_kernel.__file__).parent / "demo_model"
    files = {name: (demo / name).read_bytes() for name in ("config.json", "model.safetensors")}
    monkeypatch.setitem(REPOSITORIES, "org/demo", files)
    Hub.asked.clear()
    answers = ask(tmp_path, hub, str(demo), "org/demo", program=TUNE)
    assert answers["same"] and answers["then"]
    length = len(files["model.safetensors"])
    assert 0.99 * length < answers["absent"] < length and answers["absent then"] == 0
    size = shown_size(answers["absent"])
    assert answers["said"] == [
        f"downloading the weights of org/demo for the check, {size}; --no-check avoids it"
    ]
    assert not Path(answers["path"]).exists() and "snapshots" in answers["path then"]
    first, *middle, last = [one for one in Hub.asked if "model.safetensors" in one]
    assert first == "org/demo/model.safetensors bytes=0-100000" and last == first.split()[0]
    assert all("bytes=8-" in one for one in middle)
