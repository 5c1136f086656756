#!/usr/bin/env python3
"""Build the training and held-out text of the demo model from Debian packages.

All texts are in the public domain (see README.md beside this file).  Fetch the
packages first, then run this script; it installs nothing:

    mkdir debs && cd debs && apt-get download sword-text-kjv sword-comm-tdavid \\
        sword-comm-mhcc sword-comm-scofield r-cran-janeaustenr dict-jargon \\
        dict-devil golang-1.19-src && cd ..
    python3 configs/demo_model/prepare_corpus.py --debs debs --out .corpus

Writes to the output folder:

* ``train.bin.xz``: UTF-8 text; a zero byte marks a break between texts;
* ``heldout.txt``: contiguous passages that training never sees;
* ``provenance.json``: package versions, sizes and digests.

The result depends only on the packages: nothing here is random.
"""

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

SEPARATOR = "\0"
# Paragraphs at least this long are dropped when they occur a second time.
MIN_DUPLICATE = 60


def sword(root):
    """Text of a SWORD module (compressed OSIS markup), one string per book block."""
    texts = []
    for index in sorted(
        root.glob("usr/share/sword/modules/**/*.[bc]zs"), key=lambda p: p.name != "ot" + p.suffix
    ):
        data = index.with_suffix(index.suffix[:-1] + "z").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
            block = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
            block = re.sub(r"(?s)<note\b.*?</note>", "", block)
            block = re.sub(
                r"<title\b[^>]*>|</title>|<chapter\b[^>]*>|<div\b[^>]*type=\"x-p\"[^>]*>",
                "\n\n",
                block,
            )
            block = re.sub(r"<(?:item|row|l|lb)\b[^>]*>", "\n", block)
            texts.append(html.unescape(re.sub(r"<[^>]*>", "", block)))
    # A module cut by chapter would give hundreds of tiny texts: keep them together.
    return ["\n\n".join(texts)]


def austen(root):
    """Jane Austen's six novels from the R package's lazy-load database.

    The database is a row of records: a 4-byte length, then a zlib stream that
    holds one serialised character vector, one element per printed line.
    """
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    novels = []
    while data:
        inflate = zlib.decompressobj()
        record = inflate.decompress(data[4:])
        data = inflate.unused_data
        start = record.index(b"\0\0\0\x10") + 4  # type code of a character vector
        (count,) = struct.unpack_from(">i", record, start)
        position, lines = start + 4, []
        for _ in range(count):
            _, size = struct.unpack_from(">Ii", record, position)
            position += 8
            raw = record[position : position + max(size, 0)]
            position += len(raw)
            try:
                lines.append(raw.decode("utf-8"))
            except UnicodeDecodeError:
                lines.append(raw.decode("latin-1"))
        novels.append("\n".join(lines))
    return novels


def dictd(name, first):
    """Reader for a dictd database, without the distributor's heading before ``first``."""

    def read(root):
        with gzip.open(root / f"usr/share/dictd/{name}.dict.dz") as file:
            text = file.read().decode("utf-8", "replace")
        return [text[text.index(first) :]]

    return read


def opticks(root):
    """Newton's Opticks, which the Go sources carry as compression test data."""
    (path,) = root.glob("usr/share/go-*/src/testdata/Isaac.Newton-Opticks.txt")
    text = path.read_text(encoding="utf-8")
    return [text[text.index("OPTICKS:") :]]


# package -> (reader, title, held-out passages, bytes of each)
SOURCES = {
    "r-cran-janeaustenr": (austen, "Jane Austen, six novels (1811-1818)", 6, 8_000),
    "sword-text-kjv": (sword, "The Bible, King James Version (1769 text)", 4, 7_000),
    "sword-comm-tdavid": (sword, "C. H. Spurgeon, The Treasury of David (1885)", 4, 8_000),
    "sword-comm-mhcc": (sword, "Matthew Henry, Concise Commentary (1706)", 3, 8_000),
    "sword-comm-scofield": (sword, "C. I. Scofield, Reference Notes (1917)", 1, 6_000),
    "dict-jargon": (dictd("jargon", "\n(TM)\n"), "The Jargon File 4.4.7 (2003)", 2, 7_000),
    "dict-devil": (
        dictd("devil", "_The Devil's Dictionary_ was begun"),
        "Ambrose Bierce, The Devil's Dictionary (1911)",
        1,
        8_000,
    ),
    "golang-1.19-src": (opticks, "Isaac Newton, Opticks (4th edition, 1730)", 1, 8_000),
}


def paragraphs(text):
    """Cleaned paragraphs of one text: Unix line ends, no control bytes, no runs of blanks."""
    text = text.replace("\r", "").replace("\u00a0", " ").replace("\ufeff", "").replace("\ufffd", "")
    text = re.sub(r"[\0-\x08\x0b-\x1f\x7f]", "", text)
    for part in re.split(r"\n[ \t]*\n\s*?(?=\S|[ \t]*\S)|\n[ \t]*\n", text):
        part = "\n".join(
            re.sub(r"(?<=\S)[ \t]+", " ", line).rstrip() for line in part.split("\n")
        ).strip("\n")
        # A leading indent is layout in the dictionaries, left-over blanks elsewhere.
        part = re.sub(r"^ (?! )", "", part)
        if part.strip() and "gutenberg" not in part.lower() and "pgdp.net" not in part:
            yield part


def cut_heldout(texts, count, size):
    """Split a list of paragraph lists into training texts and held-out passages.

    The ``count`` passages lie evenly through the source; each is a run of whole
    paragraphs, and the training text is broken where it was taken out.
    """
    flat = [(i, p) for i, text in enumerate(texts) for p in text]
    total = sum(len(p) for _, p in flat)
    starts = [total * (2 * k + 1) // (2 * count) for k in range(count)]
    train, held, current, position, last, room = [], [], [], 0, None, 0
    for i, p in flat:
        if i != last or (starts and position >= starts[0]):
            if current:
                train.append(current)
            current, last = [], i
        if starts and position >= starts[0]:
            starts.pop(0)
            held.append([])
            room = size
        position += len(p)
        if room > 0:
            held[-1].append(p)
            room -= len(p) + 2
        else:
            current.append(p)
    return train + [current] if current else train, held


def main():
    """Read the packages named on the command line and write the corpus."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--debs", type=Path, required=True, help="folder with the downloaded .deb files"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    seen, cut, provenance = set(), [], {}
    for package, (read, title, count, size) in SOURCES.items():
        (deb,) = args.debs.glob(f"{package}_*.deb")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
            raw = read(Path(folder))
        texts = []
        for text in raw:
            kept = []
            for p in paragraphs(text):
                key = " ".join(p.split())
                if len(key) < MIN_DUPLICATE or key not in seen:
                    kept.append(p)
                seen.add(key)
            texts.append(kept)
        train, held = cut_heldout(texts, count, size)
        cut.append((package, train, held))
        version = subprocess.run(
            ["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True, text=True
        )
        provenance[package] = {"title": title, "version": version.stdout.strip()}

    train_texts, held_texts = [], []
    for package, train, held in cut:
        train_texts += ["\n\n".join(t) for t in train]
        held_texts += ["\n\n".join(t) for t in held]
        provenance[package]["train_bytes"] = sum(len("\n\n".join(t).encode()) for t in train)
        provenance[package]["heldout_bytes"] = sum(len("\n\n".join(t).encode()) for t in held)
    train_bytes = SEPARATOR.join(train_texts).encode()
    held_bytes = ("\n\n".join(held_texts) + "\n").encode()
    (args.out / "train.bin.xz").write_bytes(lzma.compress(train_bytes, preset=6))
    (args.out / "heldout.txt").write_bytes(held_bytes)
    provenance["total"] = {
        "train_bytes": len(train_bytes),
        "train_sha256": hashlib.sha256(train_bytes).hexdigest(),
        "heldout_bytes": len(held_bytes),
        "heldout_sha256": hashlib.sha256(held_bytes).hexdigest(),
    }
    (args.out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    print(json.dumps(provenance, indent=1))


if __name__ == "__main__":
    main()
