"""The page of `ckpt inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    did_you_mean,
    listed,
    natural,
    printable,
    shape_text,
    shortened,
)
from ckpt_tools.tree.globs import Globs

if TYPE_CHECKING:
    from ckpt_tools.operations.inspect import Description

Sort = Literal["name", "size", "file"]
SHOWN_ROWS = 40
_SHOWN_REST = 12
_SHAPE_WIDTH = 24


@dataclass(frozen=True, slots=True)
class View:
    """How `inspect` shows the tensors: all rows or the first ones, as a tree or flat, to which depth, which, in which order."""

    all: bool = False
    tree: bool = False
    flat: bool = False
    depth: int | None = None
    filter: str | None = None
    sort: Sort = "file"


def print_description(description: Description, view: View, out: Console) -> None:
    """The whole page of `ckpt inspect`."""
    print_title(description.path, out)
    print_rows(_head(description, None if view.all else SHOWN_ROWS), out)
    rows = _chosen(description.tensors, view)
    if rows:
        out.print()
        out.print(_tensor_tree(rows, view) if view.tree else _tensor_table(rows, view, out))
    elif description.tensors:
        near = did_you_mean(str(view.filter), (".".join(map(str, row["where"])) for row in description.tensors))
        out.print(f"\nno tensor matches {printable(f'{view.filter}. {near}').rstrip()}", soft_wrap=True)
    if rest := _rest(description, None if view.all else _SHOWN_REST):
        out.print()
        print_rows(rest, out)
    for finding in description.findings:
        out.print()
        print_finding(finding, out)


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


@dataclass(slots=True)
class _Line:
    """One line of the tensor table: one tensor, or several that repeat."""

    name: str
    shape: str
    dtype: str
    device: str
    bytes: int
    count: int = 1
    named: bool = True


def _tensor_table(rows: list[dict[str, Any]], view: View, out: Console) -> Table:
    grouped = not (view.all or view.flat or view.depth or view.sort == "size")
    lines = _by_depth(rows, view.depth) if view.depth else [_line(row) for row in rows]
    if grouped:
        lines = _fold_blocks(_fold_siblings(lines))
    shown = lines if view.all else lines[:SHOWN_ROWS]
    columns = {
        "shape": [wrapped(line.shape, _SHAPE_WIDTH) for line in shown],
        "dtype": [line.dtype for line in shown],
        "device": [printable(line.device) for line in shown],
        "bytes": [size_text(line.bytes) for line in shown],
    }
    names = [printable(line.name) for line in shown]
    if len(shown) < len(lines):
        left = lines[len(shown) :]
        names.append(f"... {sum(line.count for line in left)} more (--all)")
        columns["bytes"].append(size_text(sum(line.bytes for line in left)))
    return name_table("tensor", names, columns, out, right={"bytes"}, optional=("device", "dtype"))


def _line(row: dict[str, Any]) -> _Line:
    name = ".".join(map(str, row["where"])) or ('""' if row["where"] else "(the whole file)")
    shape = shape_text(row["shape"])
    if part := row.get("part"):
        held = [shape_text(box["shape"]) for box in part["held"]] or ["none"]
        shape = shape if held == [shape] else f"{' + '.join(held)} of {shape}"
    kind = "" if row["kind"] in ("tensor", "parameter") else f" {row['kind']}"
    return _Line(name, shape, (row["dtype"] or "?") + kind, row["device"] or "-", row["bytes"], 1, row["name"] is not None)


def _by_depth(rows: list[dict[str, Any]], depth: int) -> list[_Line]:
    """Tensors summed up by the first `depth` parts of their dotted paths."""
    sums: dict[str, _Line] = {}
    for row in rows:
        line = _line(row)
        parts = line.name.split(".")
        key = ".".join(parts[:depth]) + (".*" if len(parts) > depth else "")
        known = sums.get(key)
        if known is None:
            sums[key] = line if len(parts) <= depth else _Line(key, "1 tensor", line.dtype, line.device, line.bytes)
            continue
        known.count, known.bytes = known.count + 1, known.bytes + line.bytes
        known.shape = f"{known.count} tensors"
        known.dtype = known.dtype if known.dtype == line.dtype else "mixed"
        known.device = known.device if known.device == line.device else "mixed"
    return list(sums.values())


def _fold_siblings(lines: list[_Line]) -> list[_Line]:
    """`conv1.weight`, `conv1.bias` in a row become `conv1.{weight, bias}`."""
    folded: list[_Line] = []
    open_parent, leaves = "", [""]
    for line in lines:
        parent, _, leaf = line.name.rpartition(".")
        last = folded[-1] if folded else None
        if last is not None and parent and parent == open_parent and (last.dtype, last.device) == (line.dtype, line.device):
            leaves.append(leaf)
            last.name = f"{parent}.{{{', '.join(leaves)}}}"
            last.shape += f", {line.shape}"
            last.bytes, last.count = last.bytes + line.bytes, last.count + 1
        else:
            folded.append(line)
            open_parent, leaves = parent, [leaf]
    return folded


def _fold_blocks(lines: list[_Line]) -> list[_Line]:
    """Lines that repeat but for a counted number become one: `layers.{0-11}.attn.{weight, bias}`.

    In a state dict the shapes must agree too; outside one (optimizer state) they may differ.
    """
    groups: dict[tuple[str, str, str, str], list[tuple[int, _Line]]] = {}
    for line in lines:
        match = re.search(r"(?<=\.)\d+(?=\.)", line.name)
        pattern = line.name[: match.start()] + "\0" + line.name[match.end() :] if match else line.name
        number = int(match.group()[:9]) if match else -1
        shape = line.shape if line.named or not match else ""
        groups.setdefault((pattern, shape, line.dtype, line.device), []).append((number, line))
    return [_folded(pattern, group) for (pattern, *_), group in groups.items()]


def _folded(pattern: str, group: list[tuple[int, _Line]]) -> _Line:
    first = group[0][1]
    if len(group) == 1:
        return first
    numbers = [number for number, _ in group]
    name = pattern.replace("\0", f"{{{ranges(numbers)}}}")
    lines = [line for _, line in group]
    shape = (
        f"{first.shape} each" if len({line.shape for line in lines}) == 1 else f"{sum(line.count for line in lines)} tensors"
    )
    return _Line(name, shape, first.dtype, first.device, sum(line.bytes for line in lines), sum(line.count for line in lines))


_SHOWN_RANGES = 8


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, runs of them as `first-last`, the first eight of those.

    >>> ranges([0, 1, 10, 11, 2])
    '0-2,10-11'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN_RANGES]]
    return ",".join([*texts, "..."] if len(runs) > _SHOWN_RANGES else texts)


def _tensor_tree(rows: list[dict[str, Any]], view: View) -> Any:
    from rich.tree import Tree

    root = Tree("(root)", guide_style="dim")
    branches: dict[tuple[str, ...], Any] = {(): root}
    lines = _by_depth(rows, view.depth) if view.depth else [_line(row) for row in rows]
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
