"""A matching as text: how many by which reason, the pairs folded, and whatever is left over in full view."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote

from ckpt_tools.matching.advice import Advice
from ckpt_tools.matching.pairing import in_unknown_order
from ckpt_tools.matching.records import Ambiguous, Matching
from ckpt_tools.operations.match import Matched
from ckpt_tools.render.text import Page, by_reason, counted, print_rows, print_title
from ckpt_tools.text import listed, printable, shape_text

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
_SHOWN_ROWS, _SHOWN_CANDIDATES = 60, 4


def print_matched(report: Matched, out: Page, *, show_all: bool, plan: Path | None) -> None:
    """Print the report of `ckpt match`."""
    matching = report.matching
    print_title(f"{report.source} -> {report.target}", out)
    rows = [
        ("checkpoint", counted(matching.source_names, "tensor")), ("target", counted(matching.target_names, "tensor")),
        ("matched", _reasons(matching)),
    ]  # fmt: skip
    if report.graphs is not None:
        ran = f"{' and '.join(report.graphs.ran)} ran on {', '.join(report.graphs.inputs)}"
        rows.append(("graphs", printable(f"not compared: {problem}" if (problem := report.graphs.problem) else ran)))
    print_rows(rows + [(label, str(count)) for label, count in _left_over(matching) if count], out)
    _print_pairs(matching, out, show_all=show_all)
    _print_left_over(matching, out, show_all=show_all)
    _print_advice(report.advice, out, is_open=bool(matching.ambiguous) and plan is None)
    _print_end(matching, out, plan)


def _reasons(matching: Matching) -> str:
    parts = by_reason(Counter(row.reason for row in matching.matched))
    steps = Counter(offer.step for offer in matching.offers)
    parts += [f"{count} by a plan ({step})" for step, count in steps.items()]
    return ", ".join(parts) or "none"


def _left_over(matching: Matching) -> list[tuple[str, int]]:
    missing, unexpected = matching.left_over
    found = len(missing) - len(matching.ambiguous), len(unexpected), len(matching.mismatched), len(matching.ambiguous)
    return list(zip(("missing", "unexpected", "mismatched", "ambiguous"), found, strict=True))


# --- rows


def _folded(items: Iterable[tuple[tuple[str, ...], str]]) -> list[list[str]]:
    """Names side by side with a note, in lines: those that differ in numbers and in a last part that all share are one."""
    groups: dict[tuple[tuple[tuple[str, ...], ...], str], list[list[list[str]]]] = {}
    for names, note in items:
        leaf = names[0].rpartition(".")[2]
        same = all(name.rpartition(".")[2] == leaf for name in names)
        parts = [[*_NUMBER.split(name.removesuffix(leaf)), leaf, ""] if same else _NUMBER.split(name) for name in names]
        patterns = tuple(tuple(one[::2]) for one in parts)  # what stands between numbers
        groups.setdefault((patterns, note), []).append([one[1::2] for one in parts])
    return [
        [*(_filled(pattern, [row[side] for row in rows]) for side, pattern in enumerate(patterns)), note]
        for (patterns, note), rows in groups.items()
    ]


def _filled(pattern: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """What stands between, and what occurs in each place."""
    found = [_one_text(list(dict.fromkeys(values))) for values in zip(*rows, strict=True)]
    return "".join(part + text for part, text in zip(pattern, [*found, ""], strict=True))


def _one_text(values: list[str]) -> str:
    """One value, a range of numbers that are counted up, or a list in order: on the other side it has the same."""
    if len(values) == 1:
        return values[0]
    if not all(map(_NUMBER.fullmatch, values)):
        return f"{{{', '.join(values)}}}"
    counted_up = len(values) > 2 and values == [str(int(values[0]) + step) for step in range(len(values))]
    return f"{{{values[0]}-{values[-1]}}}" if counted_up else f"{{{','.join(values)}}}"


# --- sections


def _print_pairs(matching: Matching, out: Page, *, show_all: bool) -> None:
    """Pairs with other names or by another reason than the exact name; all with `show_all`."""
    items = [
        ((row.old, row.new), _reason(row.reason, row.confidence) + (f", {row.step}" if row.step != "copy" else ""))
        for row in matching.matched
        if show_all or row.reason != "exact" or row.step != "copy"
    ]
    for offer in matching.offers:
        items.append(((" + ".join(offer.old), " + ".join(offer.new)), _reason(offer.step, offer.confidence)))
    lines = [[*names, note] for names, note in items] if show_all else _folded(items)
    if lines:
        out.print()
        _print_table(("checkpoint", "target", "reason"), lines, out, show_all=show_all)


def _reason(reason: str, confidence: float) -> str:
    """Why, and how sure that is where it is not certain."""
    return reason if confidence == 1 else f"{reason} {confidence:g}"


def _print_table(heads: Sequence[str], lines: Sequence[Sequence[str]], out: Page, *, show_all: bool) -> None:
    shown = lines if show_all else lines[:_SHOWN_ROWS]
    columns = {head: [printable(line[index]) for line in shown] for index, head in enumerate(heads)}
    if len(shown) < len(lines):
        columns[heads[0]].append(f"... {len(lines) - len(shown)} more (--all)")
    out.table(columns)


def _print_left_over(matching: Matching, out: Page, *, show_all: bool) -> None:
    missing, unexpected = matching.left_over
    doubted = {row.new for row in matching.ambiguous}
    plain = (("missing", [name for name in missing if name not in doubted]), ("unexpected", unexpected))
    for label, names in plain:
        lines = [[name] for name in names] if show_all else _folded(((name,), "") for name in names)
        if lines:
            out.print()
            _print_table((label,), lines, out, show_all=show_all)
    if matching.mismatched:
        lines = [[row.old, row.new, shape_text(row.source_shape), shape_text(row.target_shape)] for row in matching.mismatched]
        out.print()
        _print_table(("mismatched", "target", "shape", "target's"), lines, out, show_all=show_all)
        if any(in_unknown_order(row.source_shape, row.target_shape) for row in matching.mismatched):
            out.print('same number of elements, other shape: step = "reshape" or "permute" in a plan says in which order')
    if matching.ambiguous:
        out.print()
        _print_table(("ambiguous", "candidates", "why"), _ambiguous(matching), out, show_all=show_all)


def _ambiguous(matching: Matching) -> list[list[str]]:
    """Names that fold into one line share it, with the candidates of them all."""
    folded: dict[tuple[str, str], list[Ambiguous]] = defaultdict(list)
    for row in matching.ambiguous:
        folded[_NUMBER.sub("#", row.new.rpartition(".")[0]), row.why].append(row)
    lines = []
    for (_, why), rows in folded.items():
        candidates = dict.fromkeys(name for row in rows for name in row.candidates)
        lines.append([_some(row.new for row in rows), _some(candidates), why])
    return lines


def _some(names: Iterable[str]) -> str:
    return listed([line[0] for line in _folded(((name,), "") for name in names)], _SHOWN_CANDIDATES)


def _print_advice(advice: Advice, out: Page, *, is_open: bool) -> None:
    """What goes further: options that were tried, what may be left out, and the questions with all their answers."""
    lines = [f"{extra.text}; ckpt convert --drop {quote(extra.glob)}" for extra in advice.extras]
    if advice.further is not None:
        lines.append(f"{' '.join(advice.further.options)} finds {counted(advice.further.pairs, 'more partner')}")
    for question in advice.questions:
        lines.append(f"which is {question.new} ({counted(question.tensors, 'tensor')})?")
        lines += [f"    --pair {quote(question.answer(old))}" for old in question.candidates[:_SHOWN_CANDIDATES]]
    if is_open and advice.further is None and not advice.questions:
        lines.append("-o PLAN writes a plan, in which you settle what is ambiguous")
    if lines:
        out.print()
    shown = lines if len(lines) <= _SHOWN_ROWS else [*lines[:_SHOWN_ROWS], f"... {len(lines) - _SHOWN_ROWS} more (--json)"]
    for line in shown:
        out.print(printable(line))


def _print_end(matching: Matching, out: Page, plan: Path | None) -> None:
    out.print()
    if plan is not None:
        out.print(f"plan written to {printable(str(plan))}")
    if matching.complete_with_offers:
        by_plan = " once a plan has split and joined what is fused (-o PLAN)" if matching.offers and plan is None else ""
        out.print((f"every tensor is matched{by_plan}", "green"))
    else:
        out.print(("some tensors are unmatched", "yellow"))
