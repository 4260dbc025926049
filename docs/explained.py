"""docs/messages.md, made from ckpt_tools/operations/messages.toml; explained.json, from the findings in docs/check.md.

python -m docs.explained      # writes both again; a test says when they are old
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ckpt_tools.operations.explain import fill as fill
from ckpt_tools.operations.explain import sections as sections

DOCS = Path(__file__).parent
PAGE = DOCS / "messages.md"
FINDINGS = DOCS.parent / "ckpt_tools" / "operations" / "explained.json"
_ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
_ASIDE, _LINK = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)"), re.compile(r"\[([^\]]*)\]\([^)]*\)")  # Markdown's
_HEAD = """# Messages, and what helps

What PyTorch and its libraries say when a checkpoint does not load, why, and the command. `ckpt explain 'MESSAGE'`, or
`python train.py 2>&1 | ckpt explain`, finds the entry. IN and OUT are files, MODEL is what [`--like`](loading.md) takes: another checkpoint, or
`package.module:callable`.
"""


def page() -> str:
    """docs/messages.md as it is to be: a list a section, for narrow screens too."""
    parts = [_HEAD]
    for section in sections():
        parts.append(f"\n## {section['title']}\n\n")
        for row in section["row"]:
            more = f" [More]({row['page']})" if "page" in row else ""
            command = "<br>".join(f"`{line}`" for line in fill(row["command"], {}).split("\n"))
            text = " ".join(fill(row["text"], {}).split())
            parts.append(f'* <a id="{row["name"]}"></a>{_code(row["says"])}<br>{text}{more}<br>{command}\n')
    return "".join(parts)


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def findings() -> str:
    """explained.json as it is to be: what each code of a finding means."""
    rows: dict[str, dict[str, str]] = {}
    for codes, severity, text in _ROW.findall((DOCS / "check.md").read_text("utf-8")):
        for code in re.findall(r"`([^-`][^`]*)`", codes):
            rows[code] = {"severity": severity, "text": _LINK.sub(r"\1", _ASIDE.sub("", text))}
    return (
        "{\n" + ",\n".join(f"{json.dumps(code)}: {json.dumps(row, ensure_ascii=False)}" for code, row in rows.items()) + "\n}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    FINDINGS.write_text(findings(), "utf-8")
