"""docs/llms.txt: what this is and where its pages are, for programs that read it (https://llmstxt.org).

python -m docs.llms      # writes docs/llms.txt again; a test says when it is old
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from ckpt_tools.cli import main

DOCS = Path(__file__).parent
PLACE = DOCS / "llms.txt"
_SECTION, _PAGE = re.compile(r"^  - ([^:]+):$"), re.compile(r"^ +- (.+): (\S+\.md)$")
_NO_PROSE = ("#", "|", ":::", "![", "<", "    ")
_NOT_HERE = ("contributing.md", "changelog.md", "security.md")  # of the repository's root: pages of the site alone


def document() -> str:
    """The file as it is to be."""
    return "\n".join(["# ckpt_tools", "", f"> {_summary()}", "", *_commands(), *_pages(), ""])


def _summary() -> str:
    found = re.search(r'^description = "(.*)"$', (DOCS.parent / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return f"{found[1]}. Command line `ckpt`, library `ckpt_tools`."


def _commands() -> Iterator[str]:
    """A line a command, as `ckpt --help` has it."""
    yield from ("## Commands", "")
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield f"- `ckpt {name}`: {command.get_short_help_str(limit=300)}"


def _pages() -> Iterator[str]:
    """The site's pages in its own order, each with its first sentence."""
    yield from ("", "## Pages", "")
    nav = (DOCS.parent / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    for line in nav.splitlines():
        if section := _SECTION.match(line):
            yield from ("", f"## {section[1]}", "")
        elif (page := _PAGE.match(line)) and page[2] not in _NOT_HERE:
            title = page[1].strip('"')
            yield f"- [{title}]({page[2]}): {_first_sentence(DOCS / page[2])}"


def _first_sentence(path: Path) -> str:
    text = re.sub(r"<!--.*?-->|```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    parts = [part.strip("\n") for part in text.split("\n\n")]
    prose = [part for part in parts if part.strip() and not part.startswith(_NO_PROSE)]
    first = " ".join(prose[0].split()) if prose else path.stem
    sentence = re.split(r"(?<=[.:?]) (?=[A-Z`])", first)[0]
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r":$", ".", sentence))


if __name__ == "__main__":
    PLACE.write_text(document(), "utf-8")
