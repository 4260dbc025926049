"""The forms of what `ckpt check` and `ckpt scan` found: for people, for scripts, and for other programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ckpt_tools.operations.check.report import Checked
    from ckpt_tools.operations.scan import Scanned
    from ckpt_tools.render.logs.rows import Logged

PAGES = ("text", "json")
AT_ONCE = ("json", "github")  # a line or some for each file, printed when it is known
WHOLE = ("sarif", "junit")  # one document of all files
_Report = TypeVar("_Report", "Checked", "Scanned")


def form_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format and --json, which are the parameters `form` and `as_json`."""
    help_text = "Form of the report: sarif (SARIF 2.1.0) for code hosts, github for its Actions, junit (XML) for CI servers."
    form = click.option(
        "--format", "form", type=click.Choice(["text", "json", "sarif", "github", "junit"]), default="text", show_default=True,
        help=help_text,
    )  # fmt: skip
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="The same as --format json: one document a line; see docs/json.md."
    )
    return form(as_json(command))


def print_at_once(form: str, report: _Report, logged: Callable[[_Report], Logged]) -> None:
    """One file's lines."""
    if form == "json":
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
        return
    from ckpt_tools.render.logs.github import workflow_commands

    sys.stdout.write("".join(f"{line}\n" for line in workflow_commands(logged(report))))
    sys.stdout.flush()


def print_whole(form: str, files: Sequence[Logged], command: str) -> None:
    """The document of all files."""
    if form == "junit":
        from ckpt_tools.render.logs.junit import junit

        sys.stdout.write(junit(files, command))
        return
    from ckpt_tools.operations.explain import meanings
    from ckpt_tools.render.json import print_document
    from ckpt_tools.render.logs.sarif import SCANNED, sarif

    print_document(sarif(files, SCANNED if command == "ckpt scan" else meanings()))
