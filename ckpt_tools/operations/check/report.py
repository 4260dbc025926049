"""What `ckpt check` found about one checkpoint. The fields are the contract of `ckpt check --json`, see docs/json.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_tools.operations.check.digests import Compared, Digest
from ckpt_tools.operations.safety import Safety
from ckpt_tools.text import Report
from ckpt_tools.tree.findings import Finding

Verdict = Literal["healthy", "findings", "unreadable"]


@dataclass(slots=True, repr=False)
class Checked(Report):
    """One checkpoint, checked.

    Attributes:
        path, container, file_bytes: the file; an unreadable one has no container.
        verdict: "healthy", "findings" (a warning or a problem among them), or "unreadable".
        tensors, bytes_read, records: how many tensors there are, how many bytes were read, how many records were checked
            against their CRC-32.
        findings: worst first. seconds: how long it took.
        values: (with --values) path, and counts of NaN and infinite values, of every tensor that has some.
        digests: (with --digest or --against) one for each tensor. skipped: paths of tensors that have none.
        against: (with --against) what the comparison found.
        safety: what loading it without weights_only would run; None for a file that is not there.
    """

    path: str
    container: str | None = None
    file_bytes: int = 0
    verdict: Verdict = "healthy"
    tensors: int = 0
    bytes_read: int = 0
    records: int = 0
    findings: list[Finding] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    skipped: list[list[str | int]] = field(default_factory=list)
    against: Compared | None = None
    seconds: float = 0.0
    safety: Safety | None = None

    def __bool__(self) -> bool:
        """Whether it is healthy: what exit code 0 means."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 findings, 3 unreadable."""
        return {"healthy": 0, "findings": 1, "unreadable": 3}[self.verdict]
