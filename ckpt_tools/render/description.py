"""The page of `ckpt inspect`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal, TypeAlias

from ckpt_tools.operations.inspect import Description
from ckpt_tools.render.text import (
    Page,
    Row,
    counted,
    counts_text,
    path_text,
    print_finding,
    print_rows,
    print_title,
    rows_of,
    size_text,
    wrapped,
)
from ckpt_tools.text import listed, natural, printable, shape_text, shortened
from ckpt_tools.tree.globs import Globs, meant_by

# --- tensors as lines of a table


_MOST_LEAVES = 48  # characters that the leaves of one parent, or their shapes, may take in a folded line
_KEPT_LEAVES = 3
_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?=\.)")  # not 01, which is another name than 1
_NUMBERS = 3  # of a name that are tried
_SHOWN_RANGES = 8


@dataclass(slots=True, eq=False, repr=False)
class Line:
    """One line of the tensor table: one tensor, or several that repeat."""

    name: str
    shapes: list[str]
    dtype: str
    device: str
    bytes: int
    count: int = 1
    repeats: int = 1
    named: bool = True

    @property
    def shape(self) -> str:
        """The shapes as the table shows them: `4x3, 4`, repeated ones as `12 x [64, 64]`, however many names they are."""
        if not self.count:
            return ""
        if not self.shapes:
            return f"{self.count} tensor{'' if self.count == 1 else 's'}"
        if self.repeats == 1:
            return _some(self.shapes)
        if len(set(self.shapes)) == 1:
            return f"{self.count} x {_bracketed(self.shapes[0])}"
        return f"{self.repeats} x ({_some(list(map(_bracketed, self.shapes)))})"

    @property
    def title(self) -> str:
        """The name; of a folded one with very many leaves the first of those, and how many more."""
        match = re.search(r"\{([^{}]*, [^{}]*)\}\Z", self.name) if self.count > 1 else None
        return self.name if match is None else f"{self.name[: match.start(1)]}{_some(match[1].split(', '))}}}"


def _some(texts: list[str]) -> str:
    whole = ", ".join(texts)
    short = len(whole) <= _MOST_LEAVES or len(texts) <= _KEPT_LEAVES
    return whole if short else f"{', '.join(texts[:_KEPT_LEAVES])}, ... {len(texts) - _KEPT_LEAVES} more"


def _bracketed(shape: str) -> str:
    return f"[{shape.replace('x', ', ')}]" if re.fullmatch(r"\d[\dx]*", shape) else shape


def line_of(row: dict[str, Any]) -> Line:
    """The line of one tensor."""
    shape = shape_text(row["shape"])
    if part := row.get("part"):
        held = [shape_text(box["shape"]) for box in part["held"]] or ["none"]
        shape = shape if held == [shape] else f"{' + '.join(held)} of {shape}"
    kind = "" if row["kind"] in ("tensor", "parameter") else f" {row['kind']}"
    named = row["name"] is not None
    name = ".".join(map(str, row["where"])) or ('""' if row["where"] else "(the whole file)")
    return Line(name, [shape], (row["dtype"] or "?") + kind, row["device"] or "-", row["bytes"], named=named)


def by_depth(rows: list[dict[str, Any]], depth: int) -> list[Line]:
    """Tensors summed up by the first `depth` parts of their dotted paths."""
    sums: dict[str, Line] = {}
    for row in rows:
        line = line_of(row)
        parts = line.name.split(".")
        key = ".".join(parts[:depth]) + (".*" if len(parts) > depth else "")
        known = sums.get(key)
        if known is None:
            sums[key] = line if len(parts) <= depth else Line(key, [], line.dtype, line.device, line.bytes)
            continue
        known.count, known.bytes = known.count + 1, known.bytes + line.bytes
        known.shapes = []
        known.dtype = known.dtype if known.dtype == line.dtype else "mixed"
        known.device = known.device if known.device == line.device else "mixed"
    return list(sums.values())


def folded(lines: list[Line]) -> list[Line]:
    """Lines in which siblings, and blocks that repeat by their numbers, are one."""
    lines = _fold_siblings(lines)
    for place in range(_NUMBERS):
        while len(fewer := _fold_blocks(lines, place)) < len(lines):  # experts in layers: a number at a time
            lines = fewer
    return lines


def _fold_siblings(lines: list[Line]) -> list[Line]:
    """`conv1.weight`, `conv1.bias` in a row become `conv1.{weight, bias}`."""
    result: list[Line] = []
    for (parent, _, _), group in itertools.groupby(lines, lambda row: (row.name.rpartition(".")[0], row.dtype, row.device)):
        siblings = list(group)
        first = siblings[0]
        if parent and len(siblings) > 1:
            first.name = f"{parent}.{{{', '.join(line.name.rpartition('.')[2] for line in siblings)}}}"
            first.shapes = [shape for line in siblings for shape in line.shapes]
            first.bytes, first.count = sum(line.bytes for line in siblings), len(siblings)
            siblings = [first]
        result += siblings
    return result


def _fold_blocks(lines: list[Line], place: int) -> list[Line]:
    """Lines that repeat but for a counted number become one: `layers.{0-11}.attn.{weight, bias}`."""
    groups: dict[tuple[str, tuple[str, ...], str, str, int], list[tuple[str, Line]]] = {}
    at = 2 * place + 1
    for line in lines:
        parts, number = _NUMBER.split(line.name, place + 1), ""
        if len(parts) > at:
            number, parts[at] = parts[at], "\0"
        shapes = tuple(line.shapes) if line.named or not number else ()
        groups.setdefault(("".join(parts), shapes, line.dtype, line.device, line.repeats), []).append((number, line))
    return [_one_of(pattern, group) for (pattern, *_), group in groups.items()]


def _one_of(pattern: str, group: list[tuple[str, Line]]) -> Line:
    first = group[0][1]
    if len(group) == 1:
        return first
    lines = [line for _, line in group]
    name = pattern.replace("\0", f"{{{ranges(int(number) for number, _ in group if number)}}}")
    same = all(line.shapes == first.shapes for line in lines)
    return Line(
        name, first.shapes if same else [], first.dtype, first.device, sum(line.bytes for line in lines),
        sum(line.count for line in lines), first.repeats * len(lines), first.named,
    )  # fmt: skip


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, runs of them as `first-last`, the first eight of those."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN_RANGES]]
    return ",".join([*texts, "..."] if len(runs) > _SHOWN_RANGES else texts)


Sort = Literal["name", "size", "file"]
SHOWN_ROWS = 40
_SHOWN_REST = 12
_SHAPE_WIDTH = 24


@dataclass(slots=True, eq=False, repr=False)
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
    print_rows(head(description, None if view.all else SHOWN_ROWS), out)
    rows = _chosen(description.tensors, view)
    lines, closed = _lines(rows, view)
    if lines:
        out.print()
        (_print_tree if view.tree else _print_table)(lines, view, out)
    elif description.tensors and not rows:
        near = meant_by(str(view.filter), [".".join(map(str, row["where"])) for row in description.tensors])
        out.print(f"\nNo tensor matches {printable(f'{view.filter!r}. {near}').rstrip()}")
    limit = None if view.all else _SHOWN_REST
    states = [optimizer_text(where, below) for where, below in closed.items()]
    if rest := [*rows_of("optimizer", states, limit, "--all"), *_rest(description, limit)]:
        out.print()
        print_rows(rest, out)
    for finding in description.findings:
        out.print()
        print_finding(finding, out)


def head(description: Description, limit: int | None) -> list[Row]:
    """What the file is, how much it holds, and how it loads; so many state dicts."""
    totals = description.totals
    spent = totals["storage_bytes"]
    extra = f" in {size_text(spent)} of storage" if spent != totals["bytes"] else ""
    rows = [
        ("container", _container(description)),
        ("tensors", f"{totals['tensors']:,}, {counted(totals['elements'], 'element')}, {size_text(totals['bytes'])}{extra}"),
        ("dtypes", counts_text(totals["dtypes"])),
    ]
    if totals["devices"]:
        rows.append(("devices", counts_text(totals["devices"])))
    rows += rows_of("state dict", list(map(_state_dict, description.state_dicts)), limit, "--all")
    if quantised := description.quantised:
        rows += rows_of("quantised", [*map(_scheme_text, quantised["schemes"]), *quantised["problems"]], limit, "--all")
    if description.adapter is not None:
        rows += zip(("adapter", "", "", ""), _adapter_lines(description.adapter), strict=False)
    if part := description.part:
        whose = "one" if part["rank"] is None else f"rank {part['rank']}"
        of = f"{whose} of {part['world']}, " if part["world"] else ""
        rows.append(("part", f"{of}{part['family']}: not a whole model"))
    rows.append(_loading(description.weights_only))
    return rows if description.container == "safetensors" else [*rows, ("safety", description.safety.text)]


def _loading(weights_only: Mapping[str, Any]) -> tuple[str, str]:
    """What torch.load says of a checkpoint, or the call that loads what is not for it."""
    call = weights_only["call"]
    if call.partition(",")[0] != "torch.load" or call.endswith(("unpacked", "one rank's part each")):
        return "loads with", call
    return "weights_only", "loads" if weights_only["loads"] else "refused by torch.load(weights_only=True)"


def _container(description: Description) -> str:
    """The container, what it lies in, and the size of the file."""
    packed, size = description.packed, size_text(description.file_bytes)
    if packed is None:
        return f"{description.container}, {size}"
    member = f", {printable(packed['member'])}" if packed["member"] else ""
    return f"{description.container} inside {packed['kind']}{member}, {size}"


def _state_dict(row: Mapping[str, Any]) -> str:
    """Where a state dict is, how much it holds, and in which wrappers its names are."""
    wrapped = f", wrapped in {' '.join(map(repr, row['wrappers']))}" if row["wrappers"] else ""
    return f"{path_text(row['where'])}: {counted(row['tensors'], 'tensor')}, {counted(row['parameters'], 'element')}{wrapped}"


def _adapter_lines(row: dict[str, Any]) -> list[str]:
    """What an adapter changes, and how."""
    targets = listed([f"{name} x {count}" for name, count in row["targets"].items()], 8)
    names = f", {row['names']}'s names" if row["modules"] else ""
    lines = [f"{row['kind']}{names}, {counted(row['modules'], 'module')}{f': {targets}' if targets else ''}"]
    if row["modules"]:
        ranks = listed([rank if count == row["modules"] else f"{rank} x {count}" for rank, count in row["ranks"].items()], 8)
        alpha = "" if row["alpha"] is None else f", alpha {row['alpha']:g}{' (rsLoRA)' if row['rslora'] else ''}"
        experts = f" for each of {listed(list(map(str, row['experts'])))} experts" if row["experts"] else ""
        changes = f"changes {counted(row['elements'], 'weight')} of {size_text(row['delta_bytes'])}"
        lines.append(f"rank {ranks}{experts}{alpha}; {changes}")
    if row["saved"]:
        lines.append(f"saved whole: {listed(row['saved'], 8)}")
    return [*lines, *([f"trained on {row['base']}"] if row["base"] else [])]


def _scheme_text(row: dict[str, Any]) -> str:
    """A scheme of quantised weights, and what plain ones take."""
    plain = f" -> {size_text(row['bf16_bytes'])} in bf16" if row["bf16_bytes"] is not None else ""
    matrices = "matrix" if row["tensors"] == 1 else "matrices"
    return f"{row['scheme']}, {row['tensors']} {matrices}, {size_text(row['bytes'])}{plain}"


def _chosen(rows: list[dict[str, Any]], view: View) -> list[dict[str, Any]]:
    if view.filter is not None:
        globs = Globs([view.filter])
        paths = [".".join(map(str, row["where"])) for row in rows]
        rows = [row for row, path in zip(rows, paths, strict=True)
                if globs.matching(path, path if row["name"] is None else row["name"])]  # fmt: skip
    if view.sort == "name":
        return sorted(rows, key=lambda row: [natural(str(part)) for part in row["where"]])
    return sorted(rows, key=lambda row: -row["bytes"]) if view.sort == "size" else rows


def _lines(rows: Rows, view: View) -> tuple[list[Line], dict[Where, Rows]]:
    """The lines of the table; and the optimizers whose states are left out of it, where nothing asks for them."""
    if view.depth:
        return by_depth(rows, view.depth), {}
    if view.all or view.flat or view.tree or view.sort == "size":
        return list(map(line_of, rows)), {}
    state_dicts, optimizers, others = dict[Where, Rows](), dict[Where, Rows](), Rows()
    for row in rows:
        if row["name"] is not None:
            state_dicts.setdefault(tuple(row["where"][:-1]), []).append(row)
        elif (where := optimizer_of(row)) is not None:
            optimizers.setdefault(where, []).append(row)
        else:
            others.append(row)
    if view.filter is not None:
        return lines_of(state_dicts.values(), (others, *optimizers.values())), {}
    return lines_of(state_dicts.values(), [others]), optimizers


def _print_table(lines: list[Line], view: View, out: Page) -> None:
    shown = lines if view.all else lines[:SHOWN_ROWS]
    columns = {
        "shape": [_shape_text(line) for line in shown],
        "dtype": [line.dtype for line in shown],
        "device": [printable(line.device) for line in shown],
        "bytes": [size_text(line.bytes) if line.count else "" for line in shown],
    }
    names = [printable(line.title if view.all else brief_name(line.title)) for line in shown]
    if len(shown) < len(lines):
        left = lines[len(shown) :]
        names.append(f"... {sum(line.count for line in left)} more (--all)")
        columns["bytes"].append(size_text(sum(line.bytes for line in left)))
    out.table({"tensor": names, **columns}, right={"bytes"})


def brief_name(name: str) -> str:
    """A name without the settings that Lightning's callbacks write into theirs, and with its end alone where it is a path."""
    name = _SETTINGS.sub("{...}", name)
    start, slash, end = name.partition("/")
    return f"{start}...{end[-30:]}" if slash and len(name) > 64 else name


_SETTINGS = re.compile(r"\{'[^{}]*\}")


def _shape_text(line: Line) -> str:
    """The shapes of a line, broken between shapes and not in one."""
    kept = re.sub(r"\[[^\]]*\]", lambda shape: shape[0].replace(", ", "\0\0"), line.shape)
    return wrapped(kept, _SHAPE_WIDTH).replace("\0\0", ", ")


def _print_tree(lines: list[Line], view: View, out: Page) -> None:
    """Each part of the names once, indented below the part before it."""
    out.print("(root)")
    limit = len(lines) if view.all else 4 * SHOWN_ROWS
    above: list[str] = []
    for line in lines[:limit]:
        *parts, last = line.name.removesuffix(".*").split(".")
        same = len(commonprefix([parts, above]))  # noqa: RUF071  no paths
        for level, part in enumerate(parts[same:], same + 1):
            out.print(f"{_INDENT * level}{printable(part)}")
        said = f"  {line.shape}  {line.dtype}  {printable(line.device)}  {size_text(line.bytes)}"
        out.print(f"{_INDENT * (len(parts) + 1)}{printable(last)}", (said, "dim"))
        above = parts
    if len(lines) > limit:
        out.print(f"{_INDENT}... {sum(line.count for line in lines[limit:])} more (--all)")


def _rest(description: Description, limit: int | None) -> list[Row]:
    """What is tied, and what is there beside the tensors."""
    name = str if limit is None else brief_name
    values = sorted(description.values.items(), key=lambda item: item[0].count("."))  # epoch before config.data.workers
    kinds = {
        "tied": [listed(list(map(name, group)), 6) for group in description.tied],
        "one storage": [listed(list(map(name, group)), 6) for group in description.shared],
        "value": [f"{name(key)} = {shortened(str(value), 120 if limit is None else 80)}" for key, value in values],
        "object": [f"{path_text(row['where'])}: {row['global']}" for row in description.objects],
        "metadata": [f"{key} = {shortened(str(text), 120)}" for key, text in description.metadata.items()],
    }
    return [row for label, lines in kinds.items() for row in rows_of(label, lines, limit, "--all")]


Rows = list[dict[str, Any]]
_INDENT = "  "


def lines_of(state_dicts: Iterable[Rows], others: Iterable[Rows]) -> list[Line]:
    """The lines of the table: a heading for what all names of a state dict begin with, and the names behind it."""
    lines: list[Line] = []
    for rows in state_dicts:
        own = list(map(line_of, rows))
        prefix = shared_prefix([line.name for line in own])
        lines += _headed(prefix, folded(own))
    for rows in others:
        lines += folded(list(map(line_of, rows)))
    return lines


def shared_prefix(names: Sequence[str]) -> str:
    """What all dotted names begin with, up to a dot."""
    same = commonprefix(names)  # noqa: RUF071  no paths
    return same[: same.rfind(".") + 1]


def _headed(prefix: str, lines: list[Line]) -> list[Line]:
    """The lines below their prefix, which stands once; a single line has its whole name."""
    if not prefix or len(lines) < 2:
        return lines
    for line in lines:
        line.name = _INDENT + line.name.removeprefix(prefix)
    return [Line(prefix, [], "", "", 0, count=0), *lines]


Where: TypeAlias = tuple[str | int, ...]

# What torch.optim and its relatives save for a parameter.
_WORDS = frozenset((
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "acc_delta",
))  # fmt: skip


def optimizer_of(row: dict[str, Any]) -> Where | None:
    """Where the optimizer is whose state a tensor is: `optimizer` of `optimizer.state.3.exp_avg`; None for any other tensor."""
    where: Sequence[str | int] = row["where"]
    if row["name"] is not None:
        return None
    if _is_flat(last := str(where[-1]) if where else ""):
        return tuple(where[:-1])
    if "state" not in where[:-2]:
        return None
    place = where.index("state")
    parameter = where[place + 1]
    numbered = type(parameter) is int or str(parameter).isdecimal()
    return tuple(where[:place]) if numbered or last in _WORDS else None


def _is_flat(key: str) -> bool:
    """Whether it is a key of a flattened optimizer: `state.fc.weight.exp_avg`."""
    return key.startswith("state.") and key.rpartition(".")[2] in _WORDS


def optimizer_text(where: Where, rows: Sequence[dict[str, Any]]) -> str:
    """One line for all states: how many, by which words, and what they take."""
    words = list(dict.fromkeys(str(row["where"][-1]).rpartition(".")[2] for row in rows))
    size = size_text(sum(row["bytes"] for row in rows))
    return f"{path_text(where)}: {counted(len(rows), 'state')} ({listed(words, 6)}), {size}; --all opens it"
