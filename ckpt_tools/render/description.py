"""The page of `ckpt inspect`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckpt_tools.operations.inspect import Description
from ckpt_tools.render.inspected import Line, by_depth, folded, line_of
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


Sort = Literal["name", "size", "file"]
SHOWN_ROWS = 40
_SHOWN_REST = 12
_SHAPE_WIDTH = 24


@dataclass(slots=True, unsafe_hash=True)
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


Rows = list[dict[str, Any]]
_INDENT = "  "
_FEW = 3  # lines that are not worth a reference to others that are alike


@dataclass(slots=True)
class Groups:
    """The tensors of a checkpoint by what they belong to, each in the order in which they come."""

    state_dicts: dict[Where, Rows] = field(default_factory=dict)
    others: Rows = field(default_factory=list)
    optimizers: dict[Where, Rows] = field(default_factory=dict)


def grouped(rows: Rows) -> Groups:
    """Tensors by what they belong to."""
    groups = Groups()
    for row in rows:
        if row["name"] is not None:
            groups.state_dicts.setdefault(tuple(row["where"][:-1]), []).append(row)
        elif (where := optimizer_of(row)) is not None:
            groups.optimizers.setdefault(where, []).append(row)
        else:
            groups.others.append(row)
    return groups


def lines_of(groups: Groups, *, optimizers: bool) -> list[Line]:
    """The lines of the table: a heading for what all names of a group begin with, and the names behind it."""
    lines: list[Line] = []
    alike: dict[tuple[Any, ...], str] = {}
    for rows in groups.state_dicts.values():
        own = list(map(line_of, rows))
        names = [line.name for line in own]
        prefix = shared_prefix(names)
        own = _headed(prefix, folded(own))
        if len(groups.state_dicts) > 1:
            what = tuple(_told(name.removeprefix(prefix), row) for name, row in zip(names, rows, strict=True))
            if (before := alike.setdefault(what, prefix)) is not prefix and len(own) > _FEW:
                own = [_reference(prefix, before, rows)]
        lines += own
    lines += folded(list(map(line_of, groups.others)))
    for rows in groups.optimizers.values() if optimizers else ():
        lines += folded(list(map(line_of, rows)))
    return lines


def _told(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """What a table tells of a tensor but its size."""
    return name, tuple(row["shape"] or ()), row["dtype"], row["device"]


def shared_prefix(names: Sequence[str]) -> str:
    """What all dotted names begin with, up to a dot."""
    first, last = min(names), max(names)  # what these two share, all in between them share
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[: first.rfind(".", 0, same) + 1]


def _headed(prefix: str, lines: list[Line]) -> list[Line]:
    """The lines below their prefix, which stands once; a single line has its whole name."""
    if not prefix or len(lines) < 2:
        return lines
    for line in lines:
        line.name = _INDENT + line.name.removeprefix(prefix)
    return [Line(prefix, [], "", "", 0, count=0), *lines]


def _reference(prefix: str, before: str, rows: Rows) -> Line:
    """One line for a state dict whose tensors are named and shaped as those of an earlier one."""
    first = line_of(rows[0])
    dtype, device = (
        value if all(getattr(line_of(row), key) == value for row in rows) else "mixed"
        for key, value in (("dtype", first.dtype), ("device", first.device))
    )
    name = f"{prefix}* ({counted(len(rows), 'tensor')}, named and shaped as {before}*)"
    return Line(name, ["-"], dtype, device, sum(row["bytes"] for row in rows), len(rows))


Where: TypeAlias = tuple[str | int, ...]

# Whose words the states have: of what torch.optim and its relatives save for a parameter, `step` left out.
_LIKE = {
    frozenset(("exp_avg", "exp_avg_sq")): "like Adam",
    frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq")): "like Adam with amsgrad",
    frozenset(("momentum_buffer",)): "like SGD with momentum",
    frozenset(("square_avg",)): "like RMSprop",
    frozenset(("sum",)): "like Adagrad",
    frozenset(("square_avg", "acc_delta")): "like Adadelta",
}
_WORDS = frozenset(word for words in _LIKE for word in words) | {"step"}


def optimizer_of(row: dict[str, Any]) -> Where | None:
    """Where the optimizer is whose state a tensor is: `optimizer` of `optimizer.state.3.exp_avg`; None for any other tensor."""
    where: Sequence[str | int] = row["where"]
    if row["name"] is not None or "state" not in where[:-2]:
        return None
    place = where.index("state")
    parameter = where[place + 1]
    numbered = type(parameter) is int or str(parameter).isdecimal()
    return tuple(where[:place]) if numbered or where[-1] in _WORDS else None


def optimizer_text(where: Where, rows: Sequence[dict[str, Any]]) -> str:
    """One line for all states: like whose they are, how many, by which words, and what they take."""
    words = list(dict.fromkeys(str(row["where"][-1]) for row in rows))
    like = _LIKE.get(frozenset(words) - {"step"})
    told = f"{like}, " if like else ""
    size = size_text(sum(row["bytes"] for row in rows))
    return f"{path_text(where)}: {told}{counted(len(rows), 'state')} ({listed(words, 6)}), {size}; --all opens it"
