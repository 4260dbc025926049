"""The page of `ckpt check`."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.operations.check.digests import shape_text
from ckpt_tools.operations.check.report import Checked
from ckpt_tools.render.text import Page, Row, console, counted, path_text, print_finding, print_rows, size_text
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

_COLOURS = {"healthy": "green", "findings": "yellow", "unreadable": "red"}
_SHOWN = 20


def print_checked(reports: Sequence[Checked], out: Page, *, digests: bool = False) -> None:
    """A page for each checkpoint, and a table of all where there are several."""
    for number, report in enumerate(reports):
        if number:
            out.print()
        _print_one(report, out, digests=digests)
    if len(reports) > 1:
        out.print()
        _print_summary(reports, out)


def print_unreadable(reports: Sequence[Checked]) -> None:
    """What keeps checkpoints from being read, on standard error: all that --quiet leaves."""
    for report in reports:
        for finding in report.findings if report.verdict == "unreadable" else ():
            print_finding(finding, Page(console(stderr=True)))


def _print_one(report: Checked, out: Page, *, digests: bool) -> None:
    out.print((f"{printable(report.path)}: ", "bold"), (report.verdict, _COLOURS[report.verdict]))
    if report.container is not None:
        print_rows(_facts(report), out)
    if digests and report.digests:
        out.print()
        for digest in report.digests:
            out.print(f"{digest.sha256}  {digest.dtype} {shape_text(digest.shape)}  {path_text(digest.where)}")
    by_code: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_code.setdefault(finding.code, []).append(finding)
    for code, findings in by_code.items():
        for finding in findings[:_SHOWN]:
            out.print()
            print_finding(finding, out)
        if len(findings) > _SHOWN:
            out.print(f"\n... {len(findings) - _SHOWN} more of {code} (--json shows all)")


def _facts(report: Checked) -> list[Row]:
    damaged = sum(finding.code == "damaged-record" for finding in report.findings)
    whole = f"{report.records - damaged} of {report.records}" if damaged else str(report.records)
    sums = f", {whole} records match their CRC-32" if report.records else ", no checksums in the file"
    rows = [
        ("container", f"{report.container}, {size_text(report.file_bytes)}, {counted(report.tensors, 'tensor')}"),
        ("read", f"{size_text(report.bytes_read)}{sums}"),
    ]
    if (compared := report.against) is not None:
        renamed = f" ({compared.renamed} under another path)" if compared.renamed else ""
        total = compared.equal + len(compared.different)
        rows.append(("against", printable(f"{compared.against}: {compared.equal} of {total} tensors equal{renamed}")))
    return rows


def _print_summary(reports: Sequence[Checked], out: Page) -> None:
    counts = {
        f"{severity}s": [str(sum(finding.severity == severity for finding in report.findings)) for report in reports]
        for severity in ("problem", "warning")
    }
    numbers = {"tensors": [str(report.tensors) for report in reports],
               "bytes": [size_text(report.file_bytes) for report in reports], **counts}  # fmt: skip
    names = [printable(report.path) for report in reports]
    verdicts = [report.verdict for report in reports]
    styles = [_COLOURS[verdict] for verdict in verdicts]
    out.table({"checkpoint": names, "verdict": verdicts, **numbers}, right=numbers, styles=styles)
