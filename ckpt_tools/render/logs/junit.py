"""JUnit XML, which CI servers show as tests: a suite with a test case for each file.

There is no specification; this is what Jenkins' junit-10.xsd takes, which the others read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from ckpt_tools.render.logs.rows import Logged, Row
from ckpt_tools.text import printable


def junit(files: Sequence[Logged], command: str) -> str:
    """The whole document. A file that fails is a failure, one that cannot be read an error; notes are its output."""
    failures = sum(file.failed and not file.unreadable for file in files)
    errors = sum(file.unreadable for file in files)
    counts = f'tests="{len(files)}" failures="{failures}" errors="{errors}" time="{sum(file.seconds for file in files):.3f}"'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {counts}>"]
    lines.append(f'<testsuite name={quoteattr(command)} {counts} skipped="0">')
    for file in files:
        lines += _case(file, command)
    return "\n".join([*lines, "</testsuite>", "</testsuites>", ""])


def _case(file: Logged, command: str) -> Iterator[str]:
    name = f"name={quoteattr(printable(file.path))} classname={quoteattr(command)}"
    yield f'<testcase {name} time="{file.seconds:.3f}">'
    counted = [row for row in file.rows if row.severity != "info"] if file.failed else []
    if file.failed:
        tag = "error" if file.unreadable else "failure"
        first = counted[0] if counted else Row(file.verdict, "problem", file.verdict)  # --ignore may leave no other word
        yield f"<{tag} type={quoteattr(first.code)} message={quoteattr(first.text)}>{_body(counted)}</{tag}>"
    if notes := [row for row in file.rows if row not in counted]:
        yield f"<system-out>{_body(notes)}</system-out>"
    yield "</testcase>"


def _body(rows: Sequence[Row]) -> str:
    return escape("\n".join(f"[{row.code}]{f' in {row.place}' if row.place else ''}: {row.text}" for row in rows))
