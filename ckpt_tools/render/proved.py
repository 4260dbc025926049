"""The pages of `ckpt prove`, `ckpt sign` and `ckpt verify`."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.operations.proved import Fault, Proved, Unproved
from ckpt_tools.operations.scan import Scanned
from ckpt_tools.operations.signing import NotSigned, Signed, Verified
from ckpt_tools.render.text import Page, counted, path_text
from ckpt_tools.text import listed, printable

_SHOWN, _SHOWN_TENSORS = 4, 20


def print_proved(report: Proved, out: Page) -> None:
    """The verdict, what ran, and where the models part."""
    rows = [
        ("", _verdict(report)),
        ("old", f"{report.old.path} in {report.old.model}"),
        ("new", f"{report.new.path} in {report.new.model}"),
        ("inputs", f"{', '.join(report.inputs)}; seed {report.seed}, {counted(report.runs, 'set')}, {report.dtype}"),
        ("compared", f"{counted(report.calls, 'call')} of {counted(report.modules, 'module')} with a partner"),
        *([] if not report.left_out else [("left out", listed(report.left_out, _SHOWN))]),
        *[("unproved", _unproved(row)) for row in report.unproved[:_SHOWN_TENSORS]],
        *([] if report.fault is None else _fault(report.fault)),
    ]
    settings = [f"{row.where or '(the model)'}.{row.name} {row.old}, {row.new}" for row in report.settings]
    rows += [("settings", listed(settings, _SHOWN))] if settings else []
    for label, text in rows:
        if label:
            out.print(f"{label:10}{printable(text)}")
        else:
            out.print((printable(text), "green" if report else "red"))


def _verdict(report: Proved) -> str:
    if report.largest is None or report.relative is None:
        return "different: outputs of other shapes, or not finite"
    word = "equal" if report.equal else "different"
    word = "equal, but not fully checked" if report.unproved else word
    largest = f"largest difference {report.largest:.3g}"
    return f"{word}: {largest} (relative {report.relative:.3g}, tolerance {report.tolerance:.3g})"


def _unproved(row: Unproved) -> str:
    seen = f"an output depends on {row.reached} of its {row.numel} elements"
    shown = seen if row.reached else "no output is seen to depend on it"
    return f"{row.name}: {shown}, and its numbers are not the old model's"


def _fault(fault: Fault) -> list[tuple[str, str]]:
    """Where, and why."""
    kind = fault.kind if fault.kind == fault.new_kind else f"{fault.kind}, {fault.new_kind} in the new one"
    name = fault.where or "(the model)"
    partner = "" if fault.where == fault.new_where else f" = {fault.new_where or '(the model)'}"
    where = f"{name}{partner} ({kind})"
    if fault.place == "code":
        sides = [f"after {fault.after}" if fault.after else "", f"before {fault.before}" if fault.before else ""]
        where += f", in its own code {', '.join(filter(None, sides))}".rstrip()
    return [("differ at", where), *[("why", reason) for reason in fault.reasons]]


def print_not_signed(found: NotSigned, out: Page) -> None:
    """What a signature will not cover."""
    rows = [("values", found.values), ("metadata", found.metadata), ("files", found.files)]
    lines = [f"not signed  {label}: {listed(names, _SHOWN)}" for label, names in rows if names]
    _print([*lines, *(f"not signed  {line}" for line in _not_plain(found.not_plain))], out)


def _not_plain(found: Sequence[Scanned]) -> list[str]:
    """A line for each file that may run code."""
    more = [f"... {len(found) - _SHOWN_TENSORS} more files"] if len(found) > _SHOWN_TENSORS else []
    return [report.line for report in found[:_SHOWN_TENSORS]] + more


def print_signed(report: Signed, out: Page) -> None:
    """What was signed, by which key."""
    signs = f"{counted(report.tensors, 'tensor')} of {report.path}"
    _print([f"wrote {report.signature}", f"signs  {signs}", f"key    {report.keyid}"], out)


def print_verified(report: Verified, out: Page) -> None:
    """The verdict, and every tensor that is not the one that was signed."""
    compared = report.compared
    lines = [
        f"{report.path}: {_verified(report)}",
        f"signature  {report.signature}, of {report.signed}, is valid for the key {report.keyid}",
        f"tensors    {compared.equal} of {report.tensors} are as signed",
    ]
    lines += [f"different  {path_text(where)}: {how}" for where, how in compared.different[:_SHOWN_TENSORS]]
    if len(compared.different) > _SHOWN_TENSORS:
        lines.append(f"           ... {len(compared.different) - _SHOWN_TENSORS} more")
    for label, wheres in (("missing", compared.missing), ("unsigned", compared.unexpected)):
        if wheres:
            lines.append(f"{label:10} {listed([path_text(where) for where in wheres], _SHOWN_TENSORS)}")
    lines += [f"may run    {line}" for line in _not_plain(report.not_plain)]
    if report.beside:
        lines.append(f"beside     {listed(report.beside)}: other tensors, which are not signed")
    _print([*lines, "not signed everything else: settings, epochs, objects"], out)


def _verified(report: Verified) -> str:
    if not report.same_tensors:
        return "not what was signed"
    if report:
        return "its tensors are verified" if report.tensors_only else "verified"
    why = "it may run code" if report.not_plain else "others that are not signed lie beside them"
    return f"not verified: its tensors are as signed, but {why}"


def _print(lines: list[str], out: Page) -> None:
    for line in lines:
        out.print(printable(line))
