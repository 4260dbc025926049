"""What `ckpt explain` knows, made from the pages of docs/howto and the table of findings in docs/check.md.

python -m docs.explained      # writes ckpt_tools/operations/explained.json again; a test says when it is old
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PLACE = DOCS.parent / "ckpt_tools" / "operations" / "explained.json"
_SETUP = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
_ALSO = re.compile(r"<!-- also\n(.*?)\n-->", re.DOTALL)
_TEXT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> Iterator[dict[str, Any]]:
    """A page for each message, in the order of the index: its title, the words that a screen shows, the text.

    `also`: other messages of the same cause, a line each in a comment of the page.
    """
    index = (DOCS / "howto" / "index.md").read_text("utf-8")
    for name in re.findall(r"\]\(([\w-]+\.md)\)", index):
        whole = (DOCS / "howto" / name).read_text("utf-8")
        title, _, text = _SETUP.sub("", whole).partition("\n")
        shown, also = _TEXT.search(text), _ALSO.search(whole)
        yield {
            "page": f"docs/howto/{name}", "title": title.removeprefix("# "), "shown": shown[1] if shown else "",
            "also": also[1].splitlines() if also else [], "text": text.strip(),
        }  # fmt: skip


def findings() -> Iterator[dict[str, str]]:
    """A row for each code of a finding."""
    for codes, severity, text in _ROW.findall((DOCS / "check.md").read_text("utf-8")):
        for code in re.findall(r"`([^`]+)`", codes):
            yield {"code": code, "severity": severity, "text": text}


def document() -> str:
    """The file as it is to be."""
    known = {"pages": list(pages()), "findings": [row for row in findings() if not row["code"].startswith("-")]}
    return json.dumps(known, indent=0, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PLACE.write_text(document(), "utf-8")
