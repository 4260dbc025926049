"""Scan files and folders: what would run if each file were loaded without weights_only. Everything goes by content."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.errors import CkptError, NotACheckpointError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.single import HEAD, collector_paused
from ckpt_tools.io.processes import in_processes
from ckpt_tools.io.source import File, Handed, as_path, is_address, is_there, leads_out, missing
from ckpt_tools.io.writer import Progress, advancing
from ckpt_tools.operations.safety import Safety, Verdict, examine
from ckpt_tools.parts.open import open_source
from ckpt_tools.text import Report, printable
from ckpt_tools.tree.options import natural

# Worst first. The first two make the exit code 1.
VERDICTS: tuple[Verdict, ...] = ("dangerous", "unexamined", "needs-code", "plain", "nothing")
_FAILING = frozenset(VERDICTS[:2])
_MANY = 200  # files from which on several processes are faster than one


@dataclass(frozen=True, slots=True, repr=False)
class Scanned(Report):
    """One file, scanned. The fields are the contract of `ckpt scan --json`, see docs/json.md.

    Attributes:
        path: the file. file_bytes: its size. safety: what loading it would run.
    """

    path: str
    file_bytes: int
    safety: Safety

    @property
    def verdict(self) -> Verdict:
        """The word for it."""
        return self.safety.verdict

    @property
    def line(self) -> str:
        """Its path and what loading it would run, in one line, safe to show."""
        return f"{printable(self.path)}: {self.safety.text}"

    @property
    def failed(self) -> bool:
        """Whether it is dangerous, or not all of it could be examined."""
        return self.verdict in _FAILING

    def __bool__(self) -> bool:
        """Whether it is not dangerous, and all of it could be examined: what exit code 0 means."""
        return not self.failed

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"path": self.path, "file_bytes": self.file_bytes, **self.safety.to_json()}


class Scans(list[Scanned]):
    """The reports of files, in order: true where each is, so that `if scan(folder):` means what exit code 0 does."""

    def __bool__(self) -> bool:
        return all(self)


@natural
def scan(path: File, *, jobs: int = 1) -> Scans:
    """Examine a file, a folder with everything below it, or an address. Runs and imports nothing, reads no tensor.

    Args:
        path: what is scanned. jobs: how many processes share the files of a folder.

    Returns:
        A report for every file, in the order of their names; one that cannot be read is "unexamined". As a truth value: whether
        none is dangerous and all could be examined.

    Raises:
        NotACheckpointError: there is no such file or folder, or nothing in it.
    """
    return Scans(scan_files(list(files_of([as_path(path)])), jobs=jobs))


def scan_files(
    paths: Sequence[str | os.PathLike[str]], *, jobs: int = 1, progress: Progress | None = None
) -> Iterator[Scanned]:
    """Examine files, in processes of their own where there are many; the reports come in the order of the paths."""
    advance = advancing(progress, sum(map(size_of, paths)) if progress is not None else 0)
    for report in in_processes(scan_file, paths, jobs if len(paths) >= _MANY else 1, batch=16):
        advance(report.file_bytes)
        yield report


def scan_file(path: str | os.PathLike[str]) -> Scanned:
    """Examine one file."""
    size = 0
    if not isinstance(path, Handed) and not is_address(path) and os.path.isdir(path):
        why = "a link to a folder elsewhere, which is not followed"
        if not os.path.islink(path):
            try:
                os.scandir(path).close()
                why = "The folder could not be listed."
            except OSError as error:
                why = f"The folder cannot be listed. {error.strerror or error}."
        return Scanned(str(path), 0, Safety("unexamined", unexamined=[("", why)]))
    try:
        with collector_paused(), contextlib.closing(open_source(path)) as source:
            size = source.size
            safety = examine(source)
            if safety.verdict == "nothing" and safetensors.sniff(source.read(0, min(size, HEAD))):
                safety = Safety("plain")
    except CkptError as error:
        why = error.why if error.what == f"{path} cannot be read." else error.what
        safety = Safety("unexamined", unexamined=[("", why)])
    return Scanned(str(path), size, safety)


def files_of(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str | os.PathLike[str]]:
    """The files that are meant: addresses and files as they are, of a folder all that is below it, by name."""
    for path in paths:
        given = isinstance(path, Handed) or is_address(path)
        if given or not os.path.isdir(path):
            if not given and not is_there(path):
                raise missing(Path(path))
            yield path
            continue
        found = sorted(_below(path))
        if not found:
            raise NotACheckpointError(f"{path} is a folder without files.")
        yield from found


def _below(top: str | os.PathLike[str]) -> Iterator[Path]:
    """All that is below a folder but folders; of those the ones that cannot be listed, and links that lead elsewhere."""
    unlisted: list[OSError] = []
    for folder, folders, names in os.walk(top, onerror=unlisted.append):
        yield from (Path(folder, name) for name in names)
        links = (Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name)))
        yield from (link for link in links if leads_out(link, top))
    yield from (Path(error.filename) for error in unlisted)


def counts(reports: Iterable[Scanned]) -> dict[Verdict, int]:
    """How many files there are of each verdict, worst first."""
    found = Counter(report.verdict for report in reports)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file, or of the files in a folder; 0 where that cannot be told, which is said when it is opened."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0
