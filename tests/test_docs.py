"""The documentation's links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGES = [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("benchmarks/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken, checked = [], 0
    for page in PAGES:
        for link in LINK.findall(CODE.sub("", page.read_text())):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            checked += 1
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                broken.append(f"{page.relative_to(REPO)}: no file {path}")
            elif anchor and anchor not in anchors(target):
                broken.append(f"{page.relative_to(REPO)}: {target.name} has no heading #{anchor}")
    assert checked and not broken, "\n".join(broken)
