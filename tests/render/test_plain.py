"""Pages in a pipe are what rich would have printed there, to the byte."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from ckpt_tools import check, diff, inspect, stats
from ckpt_tools.render.checked import print_checked
from ckpt_tools.render.description import View, print_description
from ckpt_tools.render.difference import print_difference
from ckpt_tools.render.numbers.stats import StatsView, print_stats
from ckpt_tools.render.plain import PIPE_WIDTH, Plain
from ckpt_tools.render.rows import name_table, print_rows
from tests.support.samples import FIXTURES, by_name

WORDS = st.text("ab.,-[x] é層", max_size=12).map(str.strip)
CELLS = st.lists(WORDS, min_size=1, max_size=3).map("\n".join)


def both(render: Callable[[Any], None]) -> tuple[str, str]:
    """A page as it goes into a pipe, and as rich prints it."""
    page = Plain()
    render(page)
    out = io.StringIO()
    render(Console(file=out, width=PIPE_WIDTH, highlight=False, emoji=False, markup=False))
    return page.text, "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4))
@example([("name", "é" * 400, "層" * 400)])
@example([("n" * 1001, "1", "2")])
@example([("n" * 990, "1", "2")])
def test_tables(rows: list[tuple[str, str, str]]) -> None:
    """Cells of several lines, wide characters and columns beyond the width lie where rich puts them."""
    names, ours, theirs = zip(*rows, strict=True)

    def render(out: Any) -> None:
        out.print(name_table("tensor", [*names, "... 3 more"], {"a": [*ours], "b": [*theirs]}, out, right={"b"}))

    plain, rich = both(render)
    assert plain == rich


@given(st.lists(st.tuples(WORDS, CELLS), min_size=1, max_size=4))
@example([("label", "word " * 300)])
def test_labelled_rows(rows: list[tuple[str, str]]) -> None:
    """So do labels and what is beside them."""
    plain, rich = both(partial(print_rows, rows))
    assert plain == rich


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.pth")), ids=by_name)
def test_pages(path: Path) -> None:
    """Every kind of page."""
    described, measured = inspect(path), stats(path)
    pages = [
        partial(print_description, described, View()),
        partial(print_description, described, View(all=True)),
        partial(print_description, described, View(tree=True)),
        partial(print_stats, measured, StatsView()),
        partial(print_difference, diff(path, FIXTURES / "single.pth")),
        partial(print_checked, [check(path)]),
    ]
    for render in pages:
        plain, rich = both(render)
        assert plain == rich
