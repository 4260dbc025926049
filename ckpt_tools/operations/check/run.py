"""Check checkpoints: every byte read once, every promise of the format compared, and what stands in the way of loading."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_tools.errors import (
    ChecksumError,
    CkptError,
    DamagedFileError,
    MissingPackageError,
    NotACheckpointError,
    PartError,
    RemoteError,
    UsageError,
)
from ckpt_tools.formats.base import PART_CONTAINERS, is_zip
from ckpt_tools.formats.open import (
    HEAD,
    Checkpoint,
    collector_paused,
    open_checkpoint,
    open_source,
)
from ckpt_tools.formats.parts.named import partition, without_advice
from ckpt_tools.formats.zip.directory import has_end
from ckpt_tools.formats.zip.truncated import said_of_cut
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.member_paths import AnyPath, File, as_path
from ckpt_tools.io.output import Source, is_address, replacing
from ckpt_tools.io.processes import in_processes
from ckpt_tools.io.sources import Files
from ckpt_tools.io.writer import Progress, write
from ckpt_tools.operations.check import (
    digests,
    loading,
    structure,
    torch_errors,
    values,
)
from ckpt_tools.operations.check.passes import Advance
from ckpt_tools.operations.check.reading import Read, read_checkpoint
from ckpt_tools.operations.check.report import Checked, Verdict
from ckpt_tools.operations.inspect import find_findings
from ckpt_tools.operations.safety import Safety, of_checkpoint, of_unreadable
from ckpt_tools.text import did_you_mean, dotted, listed
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.findings import CODES, Finding, mending
from ckpt_tools.tree.nodes import Entry, Where
from ckpt_tools.tree.output_names import check_document_name
from ckpt_tools.values.numeric import one_thread
from ckpt_tools.values.pytorch import need_torch, torch_told

_EQUAL_FROM = 1024
_ORDER = ("problem", "warning", "info")


@dataclass(slots=True, unsafe_hash=True)
class Wanted:
    """What is asked for beyond the bytes."""

    values: bool = False
    digest: bool = False
    against: tuple[str, list[digests.Digest]] | None = None
    ignore: Collection[str] = ()
    device: str | None = None

    def __post_init__(self) -> None:
        if self.device is not None and not loading.is_device(self.device):
            raise UsageError(f"`device={self.device!r}` is not a device.", fix="Give cpu, cuda:0, mps ...")
        for code in self.ignore:
            if code not in CODES:
                fix = did_you_mean(code, sorted(CODES))
                raise UsageError(f"`ignore={code!r}`: no finding has this code.", fix=fix or "docs/check.md lists the codes.")


@natural
def check(
    path: File, *, values: bool = False, digest: bool = False,
    against: File | None = None, ignore: Collection[str] = (), device: str | None = None,
    progress: Progress | None = None,
) -> Checked:  # fmt: skip
    """Check one checkpoint. Runs and imports nothing that the file names; memory does not grow with the tensors.

    Args:
        path: a checkpoint.
        values: count NaN and infinite values per tensor; find tensors of zeros, garbage, and heads that look untrained.
        digest: a SHA-256 of every tensor (see `ckpt_tools.operations.check.digests`).
        against: a digest file or another checkpoint to compare with.
        ignore: codes of findings to leave out.
        device: what the machine has that will load it ("cpu", "cuda:1" for two cuda devices): tags of other devices are a
            problem. Without it they are a note.
        progress: called with (bytes read, bytes in total) after each block.

    Returns:
        The report; a file that cannot be read is one with the verdict "unreadable".

    Raises:
        CkptError: what `against` names cannot be read. UsageError: no finding has a code that is to be ignored.
    """
    ignore = (ignore,) if isinstance(ignore, str) else ignore
    wanted = Wanted(values, digest, None if against is None else load_digests(as_path(against)), ignore, device)
    place = as_path(path)
    return check_one(place, wanted, None if progress is None else _Steps(progress, _size(place)).advance)


def load_digests(path: AnyPath) -> tuple[str, list[digests.Digest]]:
    """The digests in a digest file, or of the tensors of a checkpoint; with the path as text."""
    if not is_address(path) and digests.is_digest_file(Path(path)):
        return str(path), digests.read(Path(path))
    with collector_paused(), open_checkpoint(path) as checkpoint:
        return str(path), read_checkpoint(checkpoint, digest=True).digests


def save_digests(report: Checked, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the digests of a report to a digest file, whole or not at all."""
    if report.container is None:
        raise NotACheckpointError(f"{report.path} cannot be read, so there are no digests of it.")
    check_document_name(path, "digests", ".digest")
    with replacing(path, overwrite=overwrite) as output:
        write([Piece(Literal(digests.text(report.digests, report.path).encode()))], output)


def check_one(path: AnyPath, wanted: Wanted, advance: Advance | None = None) -> Checked:
    """Check one checkpoint; see `check`."""
    started = time.perf_counter()
    if wanted.values:
        need_torch("Values are counted with it.")
    try:
        with torch_told(), collector_paused(), open_checkpoint(path) as checkpoint:
            report = _check_open(checkpoint, wanted, advance)
    except MissingPackageError:
        raise
    except CkptError as error:
        report = _unreadable(path, error)
    report.findings = [finding for finding in report.findings if finding.code not in wanted.ignore]
    report.findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    report.verdict = _verdict(report)
    report.seconds = time.perf_counter() - started
    return report


def _verdict(report: Checked) -> Verdict:
    if report.container is None:
        return "unreadable"
    return "findings" if any(finding.severity != "info" for finding in report.findings) else "healthy"


def _check_open(checkpoint: Checkpoint, wanted: Wanted, advance: Advance | None) -> Checked:
    heads = _heads(checkpoint) if wanted.values else frozenset()
    told = _tell(checkpoint, wanted)
    if checkpoint.container not in PART_CONTAINERS:  # of which the ranks are compared when all was read
        checkpoint.let_go()
    with_digests = wanted.digest or wanted.against is not None
    with one_thread() if wanted.values else contextlib.nullcontext():
        read = read_checkpoint(checkpoint, digest=with_digests, count_values=wanted.values, heads=heads, advance=advance)
    report = Checked(
        str(checkpoint.path), checkpoint.container, checkpoint.file_bytes, "healthy", len(checkpoint.tensors), read.bytes,
        read.records, safety=told.safety,
    )  # fmt: skip
    report.digests, report.skipped = read.digests, [list(where) for where in read.skipped]
    report.values = [_counts(row) for row in read.counted if row.count.nan or row.count.inf]
    if wanted.against is not None:
        name, other = wanted.against
        report.against = digests.compare(read.digests, other, name)
    report.findings = list(_findings(checkpoint, read, report, told, heads))
    if checkpoint.packed is not None:
        report.findings = list(map(_unpacked_first, report.findings))
    return report


@dataclass(slots=True, unsafe_hash=True)
class _Told:
    """What is told before the bytes are read: torch, which counts values, takes as much memory as a large tree."""

    safety: Safety
    disorder: list[Finding]
    loading: list[Finding]
    state_dicts: list[Where]


def _tell(checkpoint: Checkpoint, wanted: Wanted) -> _Told:
    safety = of_checkpoint(checkpoint)
    disorder = list(structure.disorder(checkpoint))
    wheres = [found.where for found in checkpoint.state_dicts]
    return _Told(safety, disorder, list(_loading(checkpoint, safety, wanted)), wheres)


def _unpacked_first(finding: Finding) -> Finding:
    """A finding about what is packed: ckpt repair takes only what is not."""
    is_repair = finding.fix.startswith("ckpt repair ")
    return replace(finding, fix="Unpack it, and give ckpt repair the file that was in it.") if is_repair else finding


def _heads(checkpoint: Checkpoint) -> frozenset[Where]:
    return frozenset((*found.where, name) for found in checkpoint.state_dicts for name in values.head_names(found))


def _counts(row: values.Counted) -> dict[str, object]:
    return {"where": list(row.where), "nan": row.count.nan, "inf": row.count.inf, "values": row.entry.numel}


def _findings(checkpoint: Checkpoint, read: Read, report: Checked, told: _Told, heads: frozenset[Where]) -> Iterator[Finding]:
    yield from structure.damage(checkpoint, read.mismatches)
    yield from told.disorder
    if not read.mismatches:
        yield from structure.sparse(checkpoint)
    yield from values.findings(read.counted, heads)
    if report.against is not None:
        yield from _differences(report.against)
    yield from _equal(checkpoint, read, told.state_dicts)
    if read.skipped:
        text = f"{len(read.skipped)} tensors have no digest and were not counted: {_paths(read.skipped)}"
        yield Finding("skipped", "info", [], text, "plain views on storages, in a type that torch has")
    yield from _disagreeing(checkpoint)
    yield from told.loading


def _loading(checkpoint: Checkpoint, safety: Safety, wanted: Wanted) -> Iterator[Finding]:
    loads = list(loading.findings(checkpoint, wanted.device))
    if partition(checkpoint) is not None:
        loads = list(without_advice(loads))
    for finding in find_findings(checkpoint, safety):
        replaced = finding.code == "device-tags" and any(other.code == "no-such-device" for other in loads)
        if finding.code != "together" and not replaced:
            yield loading.explained(finding, checkpoint)
    yield from loads


def _equal(checkpoint: Checkpoint, read: Read, state_dicts: Sequence[Where]) -> Iterator[Finding]:
    """Matrices of one state dict that are equal byte for byte and lie in storages of their own."""
    entries = {tensor.where: tensor.node for tensor in checkpoint.tensors if type(tensor.node) is Entry}
    for found in state_dicts:
        groups: dict[str, dict[int, Where]] = {}
        for digest in read.digests:
            entry = entries[digest.where]
            if digest.where[:-1] == found and len(entry.shape) > 1 and entry.nbytes >= _EQUAL_FROM:
                groups.setdefault(digest.sha256, {}).setdefault(id(entry.storage), digest.where)
        several = [list(group.values()) for group in groups.values() if len(group) > 1]
        if several:
            shown = listed([where[-1] for where in several[0]])
            text = f"{len(several)} groups of equal matrices, each with bytes of its own: {shown}"
            fix = mending("repair", str(checkpoint.path), "--tie-equal")
            yield Finding("equal-tensors", "info", list(found), text, "one storage, if they were tied", fix)


def _differences(compared: digests.Compared) -> Iterator[Finding]:
    for where, how in compared.different:
        yield Finding("different", "problem", list(where), f"{how}: not as in {compared.against}")
    rows = (("missing", compared.missing, "only in"), ("unexpected", compared.unexpected, "not in"))
    for code, wheres, what in rows:
        if wheres:
            yield Finding(code, "problem", [], f"{len(wheres)} tensors are {what} {compared.against}: {_paths(wheres)}")


def _disagreeing(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What several ranks hold, and do not hold alike."""
    if checkpoint.container in PART_CONTAINERS:
        try:
            checkpoint.locate()
        except PartError as error:
            yield Finding("parts-disagree", "problem", [], error.what, error.why, error.fix)


def _paths(wheres: Sequence[Where]) -> str:
    return listed([dotted(where) or "(root)" for where in wheres])


def _unreadable(path: str | os.PathLike[str], error: CkptError) -> Checked:
    """The report of a file that cannot be read: our error, and what PyTorch says in its place."""
    says, size, repairable = "", 0, False
    if not isinstance(error, RemoteError):  # which has been waited for once
        with contextlib.suppress(CkptError), contextlib.closing(open_source(path)) as source:
            size = source.size
            if not isinstance(source, Files):
                says = _torch_says(source, error)
                repairable = isinstance(error, DamagedFileError) and _may_be_saved(source, error)
    found = error.what + (f" {error.why}" if error.why else "")
    fix = error.fix or (mending("repair", str(path)) if repairable else "")
    findings = [Finding("unreadable", "problem", [], found, "", fix, says)]
    safety = of_unreadable(path, error)
    if safety is not None and safety.calls:
        findings += safety.findings(str(path), opens=False)
    return Checked(str(path), None, size, "unreadable", findings=findings, safety=safety)


def _may_be_saved(source: Source, error: DamagedFileError) -> bool:
    from ckpt_tools.operations.repair.opening import may_be_saved  # few files need it

    return may_be_saved(source, error)


def _torch_says(source: Source, error: CkptError) -> str:
    """PyTorch's own error for a file that we refuse; it sees no checksums and no disorder inside a pickle."""
    if isinstance(error, DamagedFileError) and error.says:
        return error.says
    head = source.read(0, min(HEAD, source.size))
    if is_zip(head):
        cut = isinstance(error, DamagedFileError) and not isinstance(error, ChecksumError) and not has_end(source)
        return said_of_cut(source.size) if cut else ""
    return torch_errors.of_bytes(source.path, head, source.size)


def check_many(
    paths: Sequence[str | os.PathLike[str]], wanted: Wanted, *, jobs: int = 1, progress: Progress | None = None
) -> Iterator[Checked]:
    """Check several checkpoints, in processes of their own where that pays; the reports come in the order of the paths."""
    sizes = [_size(path) for path in paths]
    advance = _Steps(progress, sum(sizes)).advance if progress is not None else None
    jobs = min(jobs, len(paths))
    if jobs < 2 or sum(sizes) < _POOL_FROM:
        yield from (check_one(path, wanted, advance) for path in paths)
        return
    for size, report in zip(sizes, in_processes(partial(check_one, wanted=wanted), paths, jobs), strict=True):
        if advance is not None:
            advance(size)
        yield report


_POOL_FROM = 64 << 20


class _Steps:
    """Adds up the bytes that are done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def advance(self, count: int) -> None:
        self.done += count
        self.progress(self.done, max(self.total, self.done))


def _size(path: str | os.PathLike[str]) -> int:
    """Bytes of a file, or of the files in a folder; 0 where that cannot be told, which is said when it is opened."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0
