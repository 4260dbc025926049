"""The page of `ckpt report`: one HTML file that holds everything and loads nothing.

What comes from the checkpoint goes into the page as JSON in a block that is data, not script; the page's own script puts it in
place as text. A content security policy allows that script and that style by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ckpt_tools._version import __version__
from ckpt_tools.errors import UsageError
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import output_target, replacing
from ckpt_tools.io.source import File, as_path
from ckpt_tools.io.writer import Progress, write
from ckpt_tools.operations.compare.report import Difference
from ckpt_tools.operations.compare.stats import Stats, TensorStats
from ckpt_tools.operations.inspect import Description, inspect
from ckpt_tools.render.description import head
from ckpt_tools.render.difference import changed_columns, is_measured, kinds
from ckpt_tools.render.stats import not_finite
from ckpt_tools.render.text import counted, path_text, size_text
from ckpt_tools.render.wording import as_options, found_in
from ckpt_tools.text import Report, listed, printable, shape_text
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.output_names import check_document

_MOST_ROWS = 1000  # of one kind of difference, value or object
_MOST_TEXT = 300
_LEGEND = (
    "histogram, mean, std, min and max are of the finite values; zeros is the share of zeros; NaN, inf counts the values "
    "that are not finite."
)
_SPECIAL = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True, repr=False)
class Reported(Report):
    """What `report` wrote.

    Attributes:
        path, other: the checkpoints; other is None where there is one. output: the page. bytes: its size.
    """

    path: str
    other: str | None
    output: str
    bytes: int


@natural
def report(
    path: File, other: File | None = None, *, output: str | os.PathLike[str], values: bool = False,
    select: str | None = None, overwrite: bool = False, progress: Progress | None = None,
) -> Reported:  # fmt: skip
    """Write one self-contained HTML page about a checkpoint: overview, bytes by module, tensors to search and sort, findings.

    Args:
        path: the checkpoint. other: another one; the page then tells what differs too.
        output: the page to write. overwrite: replace it if it exists.
        values: read every tensor, for mean, spread, extremes and a histogram of each.
        select: what is compared with `other`: the dotted path of a state dict or subtree of both.
        progress: called with (bytes read, bytes in total), for one work after the other.

    Raises:
        CkptError: a file that cannot be read, a page that cannot be written.
    """
    if select is not None and other is None:
        raise UsageError("`select` needs OTHER.")
    check_document(output, "an HTML page", ".html", (path, other))
    output_target(output, overwrite=overwrite)  # before every tensor is read
    description, measured, difference = inspect(path), None, None
    if values:
        from ckpt_tools.operations.compare.stats import stats

        measured = stats(path, progress=progress)
    if other is not None:
        from ckpt_tools.operations.compare.differences import diff

        difference = diff(path, other, values=True, select=select, progress=progress)
    inputs = [as_path(one) for one in (path, other) if one is not None]
    text = page(description, measured, difference)
    with replacing(output, overwrite=overwrite, inputs=inputs) as file:
        size = write([Piece(Literal(text.encode()))], file)
    return Reported(str(path), None if other is None else str(other), str(output), size)


def page(description: Description, stats: Stats | None = None, difference: Difference | None = None) -> str:
    """The whole page."""
    parts = resources.files("ckpt_tools.render") / "page"
    template, style, script = (parts.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; form-action 'none'"
    )
    size = size_text(description.file_bytes)
    # JSON that cannot end the block that it is in, nor start a comment or a tag
    data = json.dumps(_data(description, stats, difference), allow_nan=False, separators=(",", ":")).translate(_SPECIAL)
    return Template(template).substitute(
        title=escape(printable(Path(description.path).name)), version=escape(__version__), policy=escape(policy),
        subtitle=escape(f"{description.container}, {size}, {counted(description.totals['tensors'], 'tensor')}"),
        style=style, script=script, data=data,
    )  # fmt: skip


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(description: Description, stats: Stats | None, difference: Difference | None) -> dict[str, Any]:
    columns, choices, tensors = _columns(description, stats)
    return {
        "overview": _overview(description, stats),
        "legend": _LEGEND if stats is not None else "",
        "findings": [
            {"severity": row.severity, "where": path_text(row.where) if row.where else "",
             "found": printable(found_in(row)), "expected": printable(as_options(row.expected)),
             "fix": printable(as_options(row.fix))}
            for row in description.findings
        ],
        "difference": _difference(difference) if difference is not None else None,
        "columns": columns, "choices": choices, "tensors": tensors,
        "values": [[_text(name), _text(value)] for found in (description.values, description.metadata)
                   for name, value in [*found.items()][:_MOST_ROWS]],
        "objects": [[path_text(row["where"]), printable(row["global"])] for row in description.objects[:_MOST_ROWS]],
    }  # fmt: skip


def _text(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _overview(description: Description, stats: Stats | None) -> list[tuple[str, str]]:
    groups = {"tied": description.tied, "one storage": description.shared}
    rows = [*head(description, 20), *[(label, listed(names, 6)) for label, found in groups.items() for names in found[:10]]]
    if stats is not None:
        rows.append(("values", not_finite(stats) or "all that were measured are finite"))
    return [("file", printable(os.path.abspath(description.path))), *[(label, _text(text)) for label, text in rows]]


def _column(key: str, title: str, kind: str, width: int) -> dict[str, Any]:
    return {"key": key, "title": title, "kind": kind, "width": width, "right": kind in ("bytes", "number", "percent")}


def _columns(description: Description, stats: Stats | None) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """The table of tensors: its columns, the texts of those with few different ones, and the values column by column."""
    rows = description.tensors
    tensors: dict[str, Any] = {
        "name": [path_text(row["where"]) for row in rows],
        "shape": [shape_text(row["shape"]) for row in rows],
        "bytes": [row["bytes"] for row in rows],
    }
    kinds = [row["dtype"] or "?" for row in rows]
    kinds = [f"{kind} {row['kind']}" if row["kind"] not in ("tensor", "parameter") else kind
             for kind, row in zip(kinds, rows, strict=True)]  # fmt: skip
    choices: dict[str, list[str]] = {}
    for key, texts in (("dtype", kinds), ("device", [printable(row["device"] or "-") for row in rows])):
        numbers = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        choices[key], tensors[key] = list(numbers), [numbers[text] for text in texts]
    columns = [
        _column("name", "tensor", "text", 0), _column("bytes", "bytes", "bytes", 6), _column("shape", "shape", "text", 7),
        _column("dtype", "dtype", "choice", 6), _column("device", "device", "choice", 5),
    ]  # fmt: skip
    if len(choices["device"]) < 2:  # the overview says it
        columns.pop()
    if stats is not None:
        measured = {tuple(row.where): row for row in stats.tensors}
        columns += _number_columns([measured[tuple(row["where"])] for row in rows], tensors)
    return columns, choices, tensors


def _number_columns(measured: Sequence[TensorStats], tensors: dict[str, Any]) -> list[dict[str, Any]]:
    numbers = [row.numbers or {} for row in measured]
    for key in ("mean", "std", "min", "max"):
        tensors[key] = [row.get(key) for row in numbers]
    tensors["zeros"] = [row["zeros"] / row["elements"] if row.get("elements") else None for row in numbers]
    tensors["odd"] = [row.get("nan", 0) + row.get("inf", 0) for row in numbers]
    tensors["histogram"] = [row.histogram for row in measured]
    found = [_column(key, key, "number", 6) for key in ("mean", "std", "min", "max")]
    odd = [_column("odd", "NaN, inf", "number", 6)] if any(tensors["odd"]) else []
    return [_column("histogram", "histogram", "histogram", 8), *found, _column("zeros", "zeros", "percent", 5), *odd]


# --- differences


def _difference(found: Difference) -> dict[str, Any]:
    right = found.right
    headings, changed = changed_columns(found)
    measured = range(1, len(headings)) if is_measured(found) else ()
    blocks = [
        *[_block(label or "names", [""], [[line] for line in lines]) for label, lines in kinds(found, every=True)],
        _block("tensors with different numbers", headings, changed, measured),
        _block("notes", [""], [[as_options(note)] for note in found.notes]),
    ]
    other = f"{right['path']}  ({right['container']}, {size_text(right['bytes'])})"
    return {"other": printable(other), "summary": printable(found.summary), "same": found.same,
            "blocks": [block for block in blocks if block["count"]]}  # fmt: skip


def _block(title: str, headings: list[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> dict[str, Any]:
    shown = [list(map(_text, row)) for row in rows[:_MOST_ROWS]]
    return {"title": title, "headings": headings, "rows": shown, "count": len(rows), "numeric": list(numeric)}
