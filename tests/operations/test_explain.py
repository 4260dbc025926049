"""The page for the words on a screen is found, whatever the model's own names are."""

from __future__ import annotations

import re

from click.testing import CliRunner

import ckpt_tools
from docs.explained import PLACE, document, pages
from tests.support.commands import ckpt, main
from tests.support.terminal import ROOT, run


def test_a_message_at_the_end_of_a_traceback() -> None:
    """A message finds its page behind other words too. (Golden files have the messages of all pages.)"""
    for page, message in (
        ("size-mismatch", "size mismatch for fc.weight"), ("central-directory", "Invalid magic number; corrupt file?"),
        ("lfs-pointer", "_pickle.UnpicklingError: invalid load key, 'v'."),
        ("mixed-dtypes", "Got unsupported ScalarType BFloat16"),
    ):  # fmt: skip
        traceback = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    run(loader)\n{message}\n'
        assert ckpt_tools.explain(traceback)[0].page == f"docs/howto/{page}.md"


def test_every_page_is_found_by_its_title() -> None:
    """The title of every page finds it."""
    for page in pages():
        assert ckpt_tools.explain(page["title"])[0].page == page["page"]


def test_every_code_is_explained() -> None:
    """Each code that check may say has its row, with and without brackets."""
    codes = re.findall(r"^\| `([a-z][a-z0-9-]+)`", (ROOT / "docs" / "check.md").read_text().partition("## Findings")[2], re.M)
    assert len(codes) > 50
    for code in codes:
        (found,) = ckpt_tools.explain(f"[{code}]")
        assert found.title.startswith(f"{code} (")
        assert found == ckpt_tools.explain(code)[0]


def test_what_is_known_is_what_the_docs_say() -> None:
    """The file in the package is the one that the pages give: python -m docs.explained writes it."""
    assert PLACE.read_text("utf-8") == document()


def test_the_command() -> None:
    """From arguments and from a pipe; on a terminal it is drawn; without words there is a list."""
    given = run("explain", "size", "mismatch", "for", "fc.weight")
    piped = CliRunner().invoke(main, ["explain"], input="size mismatch for fc.weight")
    assert given.exit_code == piped.exit_code == 0
    assert given.output == piped.output
    assert "ckpt convert ten.pth three.pth --like like.pth" in given.output
    listed = CliRunner().invoke(main, ["explain"], input="").output
    assert "wrapper-prefix (docs/check.md)\n" in listed
    drawn = CliRunner().invoke(main, ["explain", "wrapper-prefix"], env={"FORCE_COLOR": "1", "COLUMNS": "80"}).output
    assert "names start with" in drawn
    assert "# wrapper" not in drawn
    ckpt("explain", "blargh", code=3)
