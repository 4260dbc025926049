"""For mkdocs: pages from click and from files outside docs/, and links that work on GitHub as they work here."""

import inspect
import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

from ckpt_tools.cli import main
from ckpt_tools.cli.help import WHOLE
from docs import pyz, try_page
from docs.explained import findings

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"\[([^\[\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
_TITLE = re.compile(r"\A# ([^`\n]*)$", re.MULTILINE)
_OPTIONS = re.compile(r"<!-- options of (\S+) -->")
_CODE = re.compile(r"`[^`\n]*`")
_SETUP = re.compile(r"<!-- setup\n.*?\n-->\n*", re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """SECURITY.md and its like become pages; README's place is taken by index.md. Without Pyodide there is no try.html."""
    if try_page.pyodide() is None:
        print("The site is built without try.html: npm, or its package of Pyodide, is not to be had here.")
        for name in try_page.PAGE:
            files.remove(files.src_uris[name])
    for source, page in ROOT_PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_post_build(config: Any, **_: Any) -> None:
    """What try.html loads: Pyodide, and ckpt in one file."""
    package = try_page.pyodide()
    if package is not None:
        try_page.put(package, pyz.archive(), Path(config["site_dir"]))


def commands() -> str:
    """What each `--help` says, from click itself, on a terminal of 90 columns."""
    top = click.Context(main, info_name="ckpt", terminal_width=90, **main.context_settings)
    parts = [_help("ckpt", main, top)]
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        assert command is not None
        parts.append(_help(f"ckpt {name}", command, click.Context(command, top, name, terminal_width=90)))
    return "\n\n".join(parts)


def _help(title: str, command: click.Command, context: click.Context) -> str:
    context.meta[WHOLE] = True
    return f"## {title}\n\n```text\n{command.get_help(context)}\n```"


def options(place: str) -> str:
    """The options that a call takes as keywords, from their records: name, type, default, what they are for."""
    names, inner = place.split("."), 0
    while names[inner][0].islower() and inner < len(names) - 1:
        inner += 1
    call: Any = import_module(".".join(names[:inner]))
    for name in names[inner:]:
        call = getattr(call, name)
    said = dict(re.findall(r"^ +(\w+): (.*)$", call.__doc__, re.MULTILINE))
    rows = [one for one in inspect.signature(call).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return "\n".join(f"* `{one.name}: {one.annotation} = {one.default!r}` - {said[one.name]}" for one in rows)


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """What a test makes beforehand is not shown; a link to a file of the repository becomes one to its page, or text."""
    here = page.file.src_uri
    origins = {made: source for source, made in ROOT_PAGES.items() if made != "index.md"}
    origin = origins.get(here, f"docs/{here}")  # in the repository

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        made = ROOT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if made is not None and files.get_file_from_path(made) is not None:
            return f"[{text}]({posixpath.relpath(made, posixpath.dirname(here) or '.')}{anchor})"
        outside = path == "docs/try.html" or (not path.startswith("docs/") and (ROOT / path).exists())
        return text if outside else found[0]  # a file that is nowhere stays a link, which the strict build refuses

    text = _in_this_dialect(_LINK.sub(link, _SETUP.sub("", markdown)))
    text = _OPTIONS.sub(lambda found: options(found[1]), text)
    text = text.replace("<!-- findings -->", findings())
    return text.replace("<!-- commands -->", commands()) if "<!-- commands -->" in text else text


def _in_this_dialect(markdown: str) -> str:
    """Where this dialect is not GitHub's: `__main__` in a title is no emphasis, bars in a table's code need no backslash."""
    text = _TITLE.sub(lambda found: "# " + re.sub(r"([_*])", r"\\\1", found[1]).replace("<", "&lt;"), markdown)
    rows = (
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), row) if row.startswith("|") else row for row in text.split("\n")
    )
    return "\n".join(rows)
