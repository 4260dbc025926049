"""The page of `ckpt inspect`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from ckpt_tools.frozen import frozen
from ckpt_tools.render.inspected.groups import Rows, grouped, lines_of
from ckpt_tools.render.inspected.lines import Line, by_depth, line_of
from ckpt_tools.render.inspected.optimizers import Where, optimizer_text
from ckpt_tools.render.plain import Page
from ckpt_tools.render.rows import Row, name_table, print_rows, print_title, rows_of, wrapped
from ckpt_tools.render.text import (
    container_text,
    counted,
    counts_text,
    loading_row,
    path_text,
    print_finding,
    size_text,
    state_dict_text,
)
from ckpt_tools.text import (
    listed,
    natural,
    printable,
    shortened,
)
from ckpt_tools.tree.globs import Globs, meant_by

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tools.operations.inspect import Description

Sort = Literal["name", "size", "file"]
SHOWN_ROWS = 40
_SHOWN_REST = 12
_SHAPE_WIDTH = 24


@frozen
class View:
    """How `inspect` shows the tensors: all rows or the first ones, as a tree or flat, to which depth, which, in which order."""

    all: bool = False
    tree: bool = False
    flat: bool = False
    depth: int | None = None
    filter: str | None = None
    sort: Sort = "file"


def print_description(description: Description, view: View, out: Page) -> None:
    """The whole page of `ckpt inspect`."""
    print_title(description.path, out)
    print_rows(_head(description, None if view.all else SHOWN_ROWS), out)
    rows = _chosen(description.tensors, view)
    closed: dict[Where, Rows] = {}
    if rows and view.tree:
        out.print()
        out.print(_tensor_tree(rows, view))
    elif rows:
        lines, closed = _lines(rows, view)
        out.print()
        out.print(_tensor_table(lines, view, out))
    elif description.tensors:
        near = meant_by(str(view.filter), [".".join(map(str, row["where"])) for row in description.tensors])
        out.print(f"\nno tensor matches {printable(f'{view.filter}. {near}').rstrip()}", soft_wrap=True)
    limit = None if view.all else _SHOWN_REST
    states = [optimizer_text(where, below) for where, below in closed.items()]
    if rest := [*rows_of("optimizer", states, limit, "--all"), *_rest(description, limit)]:
        out.print()
        print_rows(rest, out)
    for finding in description.findings:
        out.print()
        print_finding(finding, out, with_code=True)


def _head(description: Description, limit: int | None) -> list[Row]:
    totals = description.totals
    spent = totals["storage_bytes"]
    extra = f" in {size_text(spent)} of storage" if spent != totals["bytes"] else ""
    rows = [
        ("container", container_text(description)),
        ("tensors", f"{totals['tensors']:,}, {counted(totals['elements'], 'element')}, {size_text(totals['bytes'])}{extra}"),
        ("dtypes", counts_text(totals["dtypes"])),
    ]
    if totals["devices"]:
        rows.append(("devices", counts_text(totals["devices"])))
    rows += rows_of("state dict", list(map(state_dict_text, description.state_dicts)), limit, "--all")
    if quantised := description.quantised:
        rows += rows_of("quantised", [*map(_scheme_text, quantised["schemes"]), *quantised["problems"]], limit, "--all")
    if description.adapter is not None:
        rows += zip(("adapter", "", "", ""), _adapter_lines(description.adapter), strict=False)
    if part := description.part:
        whose = "one" if part["rank"] is None else f"rank {part['rank']}"
        of = f"{whose} of {part['world']}, " if part["world"] else ""
        rows.append(("part", f"{of}{part['family']}: not a model by itself"))
    rows.append(loading_row(description.weights_only))
    return rows if description.container == "safetensors" else [*rows, ("safety", description.safety.text)]


def _adapter_lines(row: dict[str, Any]) -> list[str]:
    """What an adapter changes, and how."""
    targets = listed([f"{name} x {count}" for name, count in row["targets"].items()], 8)
    names = f", {row['names']}'s names" if row["modules"] else ""
    lines = [f"{row['kind']}{names}, {counted(row['modules'], 'module')}{f': {targets}' if targets else ''}"]
    if row["modules"]:
        ranks = listed([rank if count == row["modules"] else f"{rank} x {count}" for rank, count in row["ranks"].items()], 8)
        alpha = "" if row["alpha"] is None else f", alpha {row['alpha']:g}{' (rsLoRA)' if row['rslora'] else ''}"
        lines.append(f"rank {ranks}{alpha}; changes {counted(row['elements'], 'weight')} of {size_text(row['delta_bytes'])}")
    if row["saved"]:
        lines.append(f"holds whole: {listed(row['saved'], 8)}")
    return [*lines, *([f"trained on {row['base']}"] if row["base"] else [])]


def _scheme_text(row: dict[str, Any]) -> str:
    """A scheme of quantised weights, and what plain ones take."""
    plain = f" -> {size_text(row['bf16_bytes'])} in bf16" if row["bf16_bytes"] is not None else ""
    return (
        f"{row['scheme']}, {row['tensors']} {'matrix' if row['tensors'] == 1 else 'matrices'}, {size_text(row['bytes'])}{plain}"
    )


def _chosen(rows: list[dict[str, Any]], view: View) -> list[dict[str, Any]]:
    if view.filter is not None:
        globs = Globs([view.filter])
        rows = [
            row
            for row in rows
            if globs.matching(".".join(map(str, row["where"])), *([row["name"]] if row["name"] is not None else []))
        ]
    if view.sort == "name":
        return sorted(rows, key=lambda row: [natural(str(part)) for part in row["where"]])
    return sorted(rows, key=lambda row: -row["bytes"]) if view.sort == "size" else rows


def _lines(rows: Rows, view: View) -> tuple[list[Line], dict[Where, Rows]]:
    """The lines of the table; and the optimizers whose states are left out of it, where nothing asks for them."""
    if view.depth:
        return by_depth(rows, view.depth), {}
    if view.all or view.flat or view.sort == "size":
        return list(map(line_of, rows)), {}
    groups = grouped(rows)
    closed = groups.optimizers if view.filter is None and (groups.state_dicts or groups.others) else {}
    return lines_of(groups, optimizers=not closed), closed


def _tensor_table(lines: list[Line], view: View, out: Page) -> Table | str:
    shown = lines if view.all else lines[:SHOWN_ROWS]
    columns = {
        "shape": [_shape_text(line) for line in shown],
        "dtype": [line.dtype for line in shown],
        "device": [printable(line.device) for line in shown],
        "bytes": [size_text(line.bytes) if line.count else "" for line in shown],
    }
    names = [printable(line.title) for line in shown]
    if len(shown) < len(lines):
        left = lines[len(shown) :]
        names.append(f"... {sum(line.count for line in left)} more (--all)")
        columns["bytes"].append(size_text(sum(line.bytes for line in left)))
    return name_table("tensor", names, columns, out, right={"bytes"}, optional=("device", "dtype"))


def _shape_text(line: Line) -> str:
    """The shapes of a line, broken between shapes and not in one."""
    kept = re.sub(r"\[[^\]]*\]", lambda shape: shape[0].replace(", ", "\0\0"), line.shape)
    return wrapped(kept, _SHAPE_WIDTH).replace("\0\0", ", ")


def _tensor_tree(rows: list[dict[str, Any]], view: View) -> Any:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree("(root)", guide_style="dim")
    branches: dict[tuple[str, ...], Any] = {(): root}
    lines = by_depth(rows, view.depth) if view.depth else list(map(line_of, rows))
    limit = len(lines) if view.all else 4 * SHOWN_ROWS
    for line in lines[:limit]:
        parts = tuple(line.name.removesuffix(".*").split("."))
        for level in range(1, len(parts) + 1):
            label = Text(printable(parts[level - 1]))
            if level == len(parts):
                label.append(f"  {line.shape}  {line.dtype}  {printable(line.device)}  {size_text(line.bytes)}", style="dim")
            elif parts[:level] in branches:
                continue
            branches[parts[:level]] = branches[parts[: level - 1]].add(label)
    if len(lines) > limit:
        root.add(f"... {sum(line.count for line in lines[limit:])} more (--all)")
    return root


def _rest(description: Description, limit: int | None) -> list[Row]:
    """What is tied, and what is there beside the tensors."""
    values = sorted(description.values.items(), key=lambda item: item[0].count("."))  # epoch before config.data.workers
    kinds = {
        "tied": [listed(group, 6) for group in description.tied],
        "one storage": [listed(group, 6) for group in description.shared],
        "value": [f"{name} = {shortened(str(value), 120)}" for name, value in values],
        "object": [f"{path_text(row['where'])}: {row['global']}" for row in description.objects],
        "metadata": [f"{key} = {shortened(str(text), 120)}" for key, text in description.metadata.items()],
    }
    return [row for label, lines in kinds.items() for row in rows_of(label, lines, limit, "--all")]
