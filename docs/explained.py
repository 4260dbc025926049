"""docs/messages.md, made from ckpt_tools/operations/messages.toml, and the table of findings of the site.

python -m docs.explained      # writes the page again; a test says when it is old
"""

from __future__ import annotations

from pathlib import Path

from ckpt_tools.operations.explain import codes as codes
from ckpt_tools.operations.explain import fill as fill
from ckpt_tools.operations.explain import sections as sections

DOCS = Path(__file__).parent
PAGE = DOCS / "messages.md"
_HEAD = """# Messages, and what helps

What PyTorch and its libraries say when a checkpoint does not load, why, and the command. `ckpt explain 'MESSAGE'`, or
`python train.py 2>&1 | ckpt explain`, finds the entry. IN and OUT are files, MODEL is what [`--like`](loading.md) takes:
another checkpoint, or `package.module:callable`.
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
            parts.append(f'* <a id="{row["name"]}"></a>**{_code(row["says"])}**<br>{text}{more}<br>{command}\n')
    return "".join(parts)


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def findings() -> str:
    """What each code of a finding means, a row for those that mean the same."""
    rows: dict[tuple[str, str], list[str]] = {}
    for code, row in codes().items():
        rows.setdefault((row["severity"], row["text"]), []).append(f"`{code}`")
    lines = [f"| {', '.join(same)} | {severity} | {text} |" for (severity, text), same in rows.items()]
    return "\n".join(["| code | severity | says |", "|---|---|---|", *lines])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
