"""Check checkpoints: every byte read once, every promise of the format compared, and what stands in the way of loading."""

from __future__ import annotations

import contextlib
import os
import re
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.errors import (
    CkptError,
    DamagedFileError,
    MissingFileError,
    MissingPackageError,
    NotACheckpointError,
    PartError,
    RemoteError,
    TensorError,
    UsageError,
)
from ckpt_tools.formats.base import PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.formats.zip_directory import Record
from ckpt_tools.io.content import Deflated, Range, chunks
from ckpt_tools.io.processes import in_processes
from ckpt_tools.io.source import AnyPath, File, as_path, is_address
from ckpt_tools.io.sources import Files, Window
from ckpt_tools.io.writer import Advance, Progress, advancing, write_document
from ckpt_tools.operations import loaders
from ckpt_tools.operations.check import digests, values
from ckpt_tools.operations.check.reading import DamagedRecord, Read, in_file, read_checkpoint, storages_of
from ckpt_tools.operations.check.report import Checked
from ckpt_tools.operations.findings import of_training
from ckpt_tools.operations.in_folders import indexed_files
from ckpt_tools.operations.inspect import find_findings
from ckpt_tools.operations.safety import Safety, of_checkpoint, of_unreadable
from ckpt_tools.operations.scan import size_of
from ckpt_tools.parts.families import partition
from ckpt_tools.parts.names import INDEX_SUFFIX
from ckpt_tools.parts.open import open_checkpoint, open_source
from ckpt_tools.parts.partition import without_advice
from ckpt_tools.parts.training import is_state_of_step
from ckpt_tools.pickling.torch_objects import SPARSE, SparseParts, is_device, sparse_parts, unwrapped
from ckpt_tools.text import did_you_mean, dotted, listed
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.nodes import Entry, Object, Storage, Where
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import one_thread, row_major
from ckpt_tools.values.pytorch import need_torch, torch_told

# --- whether the records, storages and headers of a checkpoint are what the formats promise, once its bytes were


_SHARD = re.compile(r"(?:-\d{5}-of-\d{5}\.(?:safetensors|bin)|\.distcp)$")


def disorder(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the directory, the header or the folder tells, worst first."""
    if checkpoint.records:
        yield from _zip(checkpoint)
    if isinstance(checkpoint.source, Files):
        yield from _sharded(checkpoint)
    if checkpoint.misplaced is not None and (found := list(checkpoint.misplaced())):
        text = f"{len(found)} archives do not lie where .metadata says: {listed(found)}"
        fix = "Get the files again, or take an earlier checkpoint."
        yield Finding("misplaced-chunk", "problem", [], text, "archives as .metadata says: torch loads no others", fix)
    if checkpoint.container == "safetensors":
        yield from _safetensors(checkpoint)


def damage(checkpoint: Checkpoint, mismatches: Sequence[DamagedRecord]) -> Iterator[Finding]:
    """Records whose bytes do not match their CRC-32, with the tensors on them."""
    users = _users(checkpoint, mismatches)
    written_twice = [row for row in mismatches if row.other_writer]
    for row in mismatches:
        record, names = row.record, users.get(id(row.record), [])
        on = f" holds {listed(names)}, and" if names else ""
        given = "they cannot be inflated" if row.found is None else f"the bytes give {row.found:08x}"
        of = f" of {row.source.path.name}" if row.source is not checkpoint.source else ""
        text = f"the record {record.name!r}{of}{on} does not match its CRC-32: the file says {record.crc:08x}, {given}"
        part = f"Get {row.source.path.name} again, or take an earlier checkpoint."
        is_part = isinstance(row.source, Window) or row.source.path.suffix == ".distcp"
        no_repair = is_part or checkpoint.container in (*PROGRAMS, "dcp-part", "npz")
        fix = part if no_repair else mending("repair", str(row.source.path))
        yield Finding("damaged-record", "problem", [], text, "the bytes that were saved; torch.load does not notice", fix)
    if written_twice:
        text = (
            f"{len(written_twice)} damaged records match the CRC-32 right behind them, and not the one in the directory: "
            "two processes wrote to this file at once"
        )
        fix = "Save on rank 0 only: if torch.distributed.get_rank() == 0: torch.save(...)"
        yield Finding("mixed-writers", "problem", [], text, "one writer", fix)


def sparse(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Sparse tensors with an index that is none: torch 2.13 loads them as they are."""
    for tensor in checkpoint.tensors:
        node = unwrapped(tensor.node) if type(tensor.node) is Object else None
        if node is None or node.name not in SPARSE:
            continue
        parts, order = sparse_parts(node.args), checkpoint.byteorder
        if any(_is_outside(entry, most, order) for entry, most in zip(parts.indices, _bounds(parts), strict=True)):
            text = f"the sparse tensor {dotted(tensor.where)} has an index outside its shape {list(parts.shape)}"
            expected = "indices within the shape: torch 2.13 loads the file, 2.14 refuses it"
            fix = "Take an earlier checkpoint, or save the tensor again with indices that are right."
            yield Finding("sparse-indices", "problem", list(tensor.where), text, expected, fix)


def _bounds(parts: SparseParts) -> list[Sequence[int]]:
    """What the indices of each entry stay below; one number for each row of an entry."""
    if parts.layout == "sparse_coo":
        return [parts.shape[: parts.indices[0].shape[0]]]
    columns = parts.layout in ("sparse_csr", "sparse_bsr")
    block = parts.values.shape[-1 if columns else -2] if parts.layout in ("sparse_bsr", "sparse_bsc") else 1
    return [[parts.indices[1].shape[-1] + 1], [parts.shape[-1 if columns else -2] // max(1, block)]]


def _is_outside(entry: Entry, most: Sequence[int], byteorder: str) -> bool:
    """Whether a number of these, whose rows have a bound each, is negative or not below it."""
    little = to_little_endian(entry, byteorder)
    assert type(little) is Entry
    run, at = prod(entry.shape) // max(1, len(most)), 0
    for chunk in chunks(row_major(little)):
        numbers = memoryview(chunk).cast("B").cast("q" if entry.dtype.itemsize == 8 else "i")
        while len(numbers):
            row = numbers[: run - at % run]
            if min(row) < 0 or max(row) >= most[at // run]:
                return True
            at, numbers = at + len(row), numbers[len(row) :]
    return False


def _users(checkpoint: Checkpoint, damaged: Sequence[DamagedRecord]) -> dict[int, list[str]]:
    """The id of a damaged record -> dotted paths of the tensors in it."""
    users: dict[int, list[str]] = {}
    places = sorted(((id(file), start), number) for number, row in enumerate(damaged)
                    for file, start in [in_file(row.source, row.record.data)])  # fmt: skip
    for tensor in checkpoint.tensors if damaged else ():
        below = {id(node): node.content for node in reachable(tensor.node) if type(node) is Storage}
        for content in below.values():
            if not isinstance(content, Range | Deflated):
                continue
            file, start = in_file(content.source, content.offset)
            at = bisect_right(places, ((id(file), start), len(damaged))) - 1  # the last record that begins before
            (holder, begin), number = places[at]
            record = damaged[number].record
            if at >= 0 and holder == id(file) and start < begin + max(1, record.compressed):
                users.setdefault(id(record), []).append(dotted(tensor.where))
    return users


def _zip(checkpoint: Checkpoint) -> Iterator[Finding]:
    path = str(checkpoint.path)
    records = checkpoint.records if checkpoint.container in ("torch-zip", "torchscript") else ()  # others have other names
    unused = _unused(checkpoint, (storage.key for storage in storages_of(checkpoint)), records)
    if unused:  # by tensors; a storage may also stand in the tree by itself
        every = (node.key for node in reachable(checkpoint.root) if type(node) is Storage)
        unused = _unused(checkpoint, every, unused)
    if unused:
        size = sum(record.compressed for record in unused)
        text = f"{len(unused)} storages ({size} bytes) that no tensor uses: {listed([record.name for record in unused])}"
        yield Finding("unused-storage", "info", [], text, "", mending("convert", path))
    if not checkpoint.has_checksums:
        text = "the file carries no checksums (every CRC-32 is 0): damage to tensors cannot be seen"
        yield Finding("no-checksums", "info", [], text, "", mending("convert", path))


def _safetensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    source, path = checkpoint.source, str(checkpoint.path)
    if checkpoint.metadata.get("format") is None:
        text = "the header's metadata has no format"
        expected = "format: pt, as safetensors.torch and transformers write it"
        yield Finding("no-format", "info", [], text, expected, mending("repair", path))
    if int.from_bytes(source.read(0, 8), "little") % 8:
        text = "the tensors do not begin at a multiple of 8 bytes"
        expected = "a header padded with spaces, as safetensors writes it"
        yield Finding("unaligned", "info", [], text, expected, mending("repair", path))


def _unused(checkpoint: Checkpoint, keys: Iterable[str], records: Sequence[Record]) -> list[Record]:
    """The records of storages whose keys are not among these."""
    folder = f"{checkpoint.root_folder}/data/"
    used = {f"{folder}{key}" for key in keys}
    return [record for record in records if record.name.startswith(folder) and record.name not in used]


def _sharded(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that look like shards and that no index names; what this one names was found, or the file did not open."""
    files = checkpoint.source
    if not isinstance(files, Files):
        return
    there = sorted(files.names())
    indexes = [files.folder / name for name in there if name.endswith(INDEX_SUFFIX) and name not in files.members]
    named = {name for path in indexes for name in indexed_files(path) or ()}
    stray = [name for name in there if _SHARD.search(name) and name not in files.members and name not in named]
    if stray:
        text = f"{len(stray)} shards that the index does not name: {listed(stray)}"
        yield Finding("stray-shard", "warning", [], text, "the shards of one checkpoint", "Remove what an earlier save left.")


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
        if self.device is not None and not is_device(self.device):
            raise UsageError(f"`device={self.device!r}` is not a device.", fix="Give cpu, cuda:0, mps ...")
        if not self.ignore:
            return
        from ckpt_tools.operations.explain import codes

        known = codes()
        for code in (code for code in self.ignore if code not in known):
            fix = did_you_mean(code, sorted(known))
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
    return check_one(place, wanted, advancing(progress, size_of(place)))


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
    write_document(path, digests.text(report.digests, report.path), overwrite=overwrite)


def check_one(path: AnyPath, wanted: Wanted, advance: Advance = lambda _: None) -> Checked:
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
    if report.container is not None:
        report.verdict = "findings" if any(finding.severity != "info" for finding in report.findings) else "healthy"
    report.seconds = time.perf_counter() - started
    return report


def _check_open(checkpoint: Checkpoint, wanted: Wanted, advance: Advance) -> Checked:
    # What is told before the bytes are read: torch, which counts values, takes as much memory as a large tree
    judged = checkpoint.state_dicts if wanted.values else ()
    heads = frozenset((*found.where, name) for found in judged for name in values.head_names(found))
    safety, disorders = of_checkpoint(checkpoint), list(disorder(checkpoint))
    loads = list(_loading(checkpoint, safety, wanted))
    state_dicts = [state_dict.where for state_dict in checkpoint.state_dicts]
    in_parts = checkpoint.locator is not None  # whose ranks are compared when all was read
    if not in_parts:
        checkpoint.let_go()
    with_digests = wanted.digest or wanted.against is not None
    with one_thread() if wanted.values else contextlib.nullcontext():
        read = read_checkpoint(checkpoint, digest=with_digests, count_values=wanted.values, heads=heads, advance=advance)
    report = Checked(
        str(checkpoint.path), checkpoint.container, checkpoint.file_bytes, "healthy", len(checkpoint.tensors), read.bytes,
        read.records, digests=read.digests, skipped=[list(where) for where in read.skipped], safety=safety,
    )  # fmt: skip
    report.values = [
        {"where": list(row.where), "nan": row.count.nan, "inf": row.count.inf, "values": row.entry.numel}
        for row in read.counted if row.count.nan or row.count.inf
    ]  # fmt: skip
    found = [*damage(checkpoint, read.mismatches), *disorders]
    if not read.mismatches:
        found += sparse(checkpoint)
    found += values.findings(read.counted, heads)
    if wanted.against is not None:
        name, other = wanted.against
        report.against = digests.compare(read.digests, other, name)
        found += _differences(report.against)
    found += _equal(checkpoint, read, state_dicts)
    if read.skipped:
        text = f"{len(read.skipped)} tensors have no digest and were not counted: {_paths(read.skipped)}"
        found.append(Finding("skipped", "info", [], text, "plain views on storages, in a type that torch has"))
    if in_parts:
        try:
            checkpoint.locate()
        except (PartError, TensorError, DamagedFileError) as error:
            found.append(Finding("parts-disagree", "problem", [], error.what, error.why, error.fix))
    report.findings = [*found, *loads]
    if checkpoint.packed is not None:  # ckpt repair takes only what is not
        unpack = "Unpack it, and give ckpt repair the file that was in it."
        report.findings = [replace(row, fix=unpack) if row.fix.startswith("ckpt repair ") else row for row in report.findings]
    return report


def _loading(checkpoint: Checkpoint, safety: Safety, wanted: Wanted) -> Iterator[Finding]:
    loads = list(loaders.obstacles(checkpoint, wanted.device))
    if is_state_of_step(checkpoint.path):
        loads = list(map(of_training, loads))
    if partition(checkpoint) is not None:
        loads = list(without_advice(loads))
    for finding in find_findings(checkpoint, safety):
        replaced = finding.code == "device-tags" and any(other.code == "no-such-device" for other in loads)
        if finding.code != "together" and not replaced:
            yield finding
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
            text = f"{len(several)} groups of equal matrices that are not tied: {shown}"
            fix = mending("repair", str(checkpoint.path), "--tie-equal")
            yield Finding("equal-tensors", "info", list(found), text, "one storage, if they were tied", fix)


def _differences(compared: digests.Compared) -> Iterator[Finding]:
    for where, how in compared.different:
        yield Finding("different", "problem", list(where), f"{how}, compared with {compared.against}")
    rows = (("missing", compared.missing, "only in"), ("unexpected", compared.unexpected, "not in"))
    for code, wheres, what in rows:
        if wheres:
            yield Finding(code, "problem", [], f"{len(wheres)} tensors are {what} {compared.against}: {_paths(wheres)}")


def _paths(wheres: Sequence[Where]) -> str:
    return listed([dotted(where) or "(root)" for where in wheres])


def _unreadable(path: str | os.PathLike[str], error: CkptError) -> Checked:
    """The report of a file that cannot be read: our error."""
    size, repairable = 0, False
    if not isinstance(error, (RemoteError, MissingFileError)):  # which has been waited for once
        with contextlib.suppress(CkptError), contextlib.closing(open_source(path)) as source:
            size = source.size
            if not isinstance(source, Files):
                from ckpt_tools.operations.repair.opening import may_be_saved  # few files need it

                repairable = isinstance(error, DamagedFileError) and may_be_saved(source, error)
    found = error.what + (f" {error.why}" if error.why else "")
    fix = error.fix or (mending("repair", str(path)) if repairable else "")
    findings = [Finding("unreadable", "problem", [], found, "", fix)]
    safety = of_unreadable(path, error)
    if safety is not None and safety.calls:
        findings += safety.findings(str(path), opens=False)
    return Checked(str(path), None, size, "unreadable", findings=findings, safety=safety)


def check_many(
    paths: Sequence[str | os.PathLike[str]], wanted: Wanted, *, jobs: int = 1, progress: Progress | None = None
) -> Iterator[Checked]:
    """Check several checkpoints, in processes of their own where that pays; the reports come in the order of the paths."""
    sizes = list(map(size_of, paths))
    advance = advancing(progress, sum(sizes))
    if min(jobs, len(paths)) < 2 or sum(sizes) < _POOL_FROM:
        yield from (check_one(path, wanted, advance) for path in paths)
        return
    for size, report in zip(sizes, in_processes(partial(check_one, wanted=wanted), paths, jobs), strict=True):
        advance(size)
        yield report


_POOL_FROM = 64 << 20
