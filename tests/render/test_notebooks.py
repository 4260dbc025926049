"""Reports in a notebook: a table of what is in them, with nothing of a file that a browser would run."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
import ckpt_tools.torch as load_code
from tests.support.samples import FIXTURES

EVIL = "<script>alert(1)</script>.weight"


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def report(call: str, path: Path) -> Any:
    """A report about a file."""
    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: ckpt_tools.inspect(path), "check": lambda: ckpt_tools.check(path, digest=True),
        "diff": lambda: ckpt_tools.diff(path, FIXTURES / "single.pth"), "match": lambda: ckpt_tools.match(path, like=path),
        "stats": lambda: ckpt_tools.stats(path), "scan": lambda: ckpt_tools.scan(path)[0],
        "convert": lambda: ckpt_tools.convert(path, path.with_name("out.pth"), add_module=True),
    }  # fmt: skip
    return calls[call]()


@pytest.mark.parametrize("call", ["inspect", "check", "diff", "match", "stats", "scan", "convert"])
def test_a_report_in_a_notebook(call: str, tmp_path: Path) -> None:
    """Every report is a table, and names from the file are text in it."""
    torch.save({EVIL: torch.ones(2), "b.weight": torch.ones(3)}, tmp_path / "<b>.pth")
    page = Tags(report(call, tmp_path / "<b>.pth")._repr_html_())
    assert page.tags <= {"table", "caption", "tr", "th", "td", "details", "summary"}
    assert "<b>.pth" in page.text
    assert EVIL in page.text or call == "scan"


def test_many_rows_are_cut(tmp_path: Path) -> None:
    """A notebook is not flooded: two hundred rows, and how many more there are."""
    torch.save({f"layers.{number}.weight": torch.ones(1) for number in range(300)}, tmp_path / "a.pth")
    page = ckpt_tools.inspect(tmp_path / "a.pth")._repr_html_()
    assert page.count("<tr>") < 250
    assert "... 100 more" in page


def test_what_was_loaded(tmp_path: Path) -> None:
    """load_into's report too; its repr is one short line."""
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pth")
    found = load_code.load_into(nn.DataParallel(nn.Linear(2, 2)), tmp_path / "a.pth")
    assert "module.weight" in Tags(found._repr_html_()).text
    assert len(repr(found)) < 200
