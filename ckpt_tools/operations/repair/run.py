"""Repair a checkpoint: save what is whole, mend what hurts, write the result beside the untouched input."""

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from ckpt_tools import limits
from ckpt_tools.edit import casts, flatten
from ckpt_tools.errors import CkptError, RepairError, UsageError
from ckpt_tools.formats import safetensors, zip_writer
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import count_tensors, find_tensors
from ckpt_tools.formats.single import collector_paused, naming
from ckpt_tools.io.content import Literal, Piece, total
from ckpt_tools.io.output import check_space, output_target, replacing
from ckpt_tools.io.source import File, as_path
from ckpt_tools.io.sources import Files
from ckpt_tools.io.writer import Progress, write
from ckpt_tools.operations.check.reading import read_checkpoint
from ckpt_tools.operations.repair.mends import Mended, Repaired, mend, tie
from ckpt_tools.operations.repair.opening import open_damaged
from ckpt_tools.operations.repair.salvage import NO_CHECKSUMS, Salvaged, find_missing, leave_out
from ckpt_tools.operations.safety import danger_in, danger_note
from ckpt_tools.parts import families, sharded
from ckpt_tools.parts.families import partition
from ckpt_tools.parts.open import open_checkpoint, part_error
from ckpt_tools.pickling.torch_objects import MAKERS
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import Entry, Global, Node, Object, Storage, Where
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.output_names import output_format, refuse_input
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import same_bytes, view_of
from ckpt_tools.values.pytorch import need_torch

Tensors: TypeAlias = dict[Where, Entry]


@natural
def repair(
    source: File, target: File, *, keep_damaged: bool = False, tie_equal: bool = False, overwrite: bool = False,
    dry_run: bool = False, progress: Progress | None = None,
) -> Repaired:  # fmt: skip
    """Write what is whole in `source` to `target`. Runs nothing in the file, and never touches it.

    Args:
        source: a torch-zip or safetensors file, damaged or not, or the address of one. target: the file to write;
            `.safetensors` makes one.
        keep_damaged: keep damaged tensors as they are, what is missing of them as zeros; take a damaged pickle.
        tie_equal: tie matrices of one state dict that are equal byte for byte.
        overwrite: replace an existing target. dry_run: only report.
        progress: called with (bytes done, bytes in total) while writing.

    Returns:
        The report: what was saved, what is missing, what was mended.

    Raises:
        RepairError: nothing can be saved. OutputError: the target cannot be written. CkptError: what an option names is wrong.
    """
    started = time.perf_counter()
    source, target = as_path(source), as_path(target)
    kind = output_format(target, None)
    if kind == "gguf":
        raise UsageError(f"{target} would be a GGUF; repair writes .pth and .safetensors.", fix="Convert what it writes.")
    report = Repaired(str(source), str(target), "safetensors" if kind == "safetensors" else "torch-zip", dry_run)
    where = output_target(target, overwrite=overwrite or dry_run)
    refuse_input(target, (source,))
    scratch = Path(tempfile.gettempdir(), where.name) if dry_run else where  # temporaries go where there is to be room anyway
    with contextlib.ExitStack() as stack, collector_paused():
        salvaged, report.was = open_damaged(source, keep_damaged, scratch, stack)
        pieces, expected = _plan(salvaged, keep_damaged, tie_equal, report)
        report.bytes = total(pieces)
        salvaged.checkpoint.root = None  # the pieces have what is written of it; reading that back makes another tree
        if not dry_run:
            with replacing(target, overwrite=overwrite, inputs=(source,)) as output:
                check_space(output.target.parent, output.target, report.bytes)
                write(pieces, output, progress)
                if output.path is not None:
                    _verify(output.path, expected, report.target)
                salvaged.checkpoint.source.check_unchanged()
    report.seconds = time.perf_counter() - started
    return report


def _plan(salvaged: Salvaged, keep_damaged: bool, tie_equal: bool, report: Repaired) -> tuple[list[Piece], Tensors]:
    """Leave out what is lost, mend the rest, lay it out; fill in the report."""
    checkpoint = salvaged.checkpoint
    report.notes += salvaged.notes
    if not (checkpoint.has_checksums or "no-checksums" in dict(report.notes)):
        report.notes.append(("no-checksums", NO_CHECKSUMS))
    danger = danger_in(checkpoint, report.source)
    to_safetensors = report.container == "safetensors"
    _check(checkpoint, keep_damaged, report)
    _count(salvaged, keep_damaged, report)
    root = checkpoint.root if keep_damaged else leave_out(checkpoint.root, salvaged.lost)
    none_whole = report.tensors and not report.saved and not (keep_damaged and report.missing)
    if none_whole or (root is None and checkpoint.root is not None):
        why = f"{report.missing[0].why}." if report.missing else ""
        what = f"Nothing can be saved from {report.source}: none of {report.tensors} tensors is whole."
        raise RepairError(what, why=why)
    report.mended += [Mended(row.code, [], f"{row.found}; it is not kept") for row in checkpoint.warnings]
    if checkpoint.container == "safetensors" and to_safetensors:  # what writing the header anew mends in it
        if "format" not in checkpoint.metadata:
            report.mended.append(Mended("no-format", [], "the header's metadata gets format: pt"))
        if int.from_bytes(checkpoint.source.read(0, 8), "little") % 8:
            report.mended.append(Mended("unaligned", [], "the header is padded, so that every tensor is aligned"))
    report.mended += mend(root, [tuple(row.where) for row in report.missing])
    root = casts.to_little_endian(root, checkpoint.byteorder)
    checkpoint = salvaged.checkpoint = replace(checkpoint, root=root, byteorder="little")
    if tie_equal:
        report.mended += tie(root, _equal(checkpoint))
    if danger:
        report.notes.append(danger_note(danger, root, keeps_objects=not to_safetensors))
    if to_safetensors:
        flat = flatten.flatten(root, metadata=checkpoint.metadata)
        report.notes += flat.notes
        return safetensors.lay_out(flat.tensors, flat.metadata), {(name,): entry for name, (entry, _) in flat.tensors.items()}
    pieces = zip_writer.lay_out(root, folder=checkpoint.root_folder, trust_crc=checkpoint.has_checksums)
    return pieces, _entries(root)


def _check(checkpoint: Checkpoint, keep_damaged: bool, report: Repaired) -> None:
    """A pickle with damaged names, or in legacy values, is not written as whole: torch would refuse it. A part stays one."""
    names = [f"names {name!r}, where {near!r} is meant" for name, near in _damaged_names(checkpoint.globals)]
    values = list(_impossible_values(checkpoint.root)) if checkpoint.container == "torch-legacy" else []
    if (names or values) and not keep_damaged:
        raise RepairError(
            f"The pickle of {report.source} is damaged: {f'it {names[0]}' if names else values[0]}.",
            why="The file has no checksum by which the damage could be found, and nothing says what else has changed.",
            fix="Get the file again; `keep_damaged` writes it as it is.",
        )
    for row in checkpoint.warnings if checkpoint.container == "torch-legacy" else ():
        if row.code == "trailing-bytes":
            text = (
                f"There are {row.found}, and nothing proves that these are too many: the bytes of tensors may begin too early."
            )
            report.notes.append(("unproved-places", text))
    report.notes += [("damaged-names", f"the pickle {name}") for name in names]
    report.notes += [("damaged-values", value) for value in values]
    if (part := partition(checkpoint)) is not None:  # it is mended as the records that it is, and never becomes a model
        if report.container == "safetensors":
            raise part_error(checkpoint, part)
        report.notes.append(("partition", f"The file is a part of a model, and stays one: {part.found}."))


def _damaged_names(names: Iterable[Global]) -> Iterator[tuple[str, str]]:
    """Each name that torch does not allow, but that differs from an allowed one in one letter; and that one."""
    rebuilds = {name.name: str(name) for name in ALLOWED if name.module == "torch._utils"}
    for name in (str(name) for name in names if name not in ALLOWED and name not in MAKERS):
        alike = (allowed for allowed in map(str, ALLOWED) if len(allowed) == len(name))
        near = next((allowed for allowed in alike if sum(map(operator.ne, name, allowed)) == 1), None)
        if meant := near or rebuilds.get(name.rpartition(".")[2]):
            yield name, meant


def _impossible_values(root: Node) -> Iterator[str]:
    """What torch refuses to make of tensors: a device of no kind that it has, a gradient of whole numbers; a sentence each."""
    kinds = {type(node) for node in reachable(root)}
    if Storage in kinds and Object in kinds and next(find_tensors(root), None) is None:
        yield "it names storages, and makes no tensor of them"
    for where, entry in _entries(root).items():
        if not casts.has_values(entry.storage.device or "cpu"):
            yield f"{dotted(where)} lies on {entry.storage.device!r}, which is not a device"
        elif entry.requires_grad and entry.dtype.family not in ("float", "complex"):
            yield f"{dotted(where)} needs a gradient, and holds {entry.dtype.name}"


def _count(salvaged: Salvaged, keep_damaged: bool, report: Repaired) -> None:
    root = salvaged.checkpoint.root
    report.missing = find_missing(root, salvaged.lost, kept=keep_damaged)
    report.tensors = count_tensors(root)
    report.saved = report.tensors - len(report.missing)
    sizes = {id(node): node.nbytes for node in reachable(root, bare=False) if type(node) is Storage}
    report.tensor_bytes = sum(sizes.values())
    report.saved_bytes = sum(size for key, size in sizes.items() if key not in salvaged.lost)
    if keep_damaged:
        zeros, size = report.tensor_bytes - report.saved_bytes, salvaged.checkpoint.source.size
        limits.MEMORY.check(zeros // limits.STREAMED, f"What is lost comes to {zeros} bytes, and the file has {size}.", size)


def _equal(checkpoint: Checkpoint) -> dict[Where, str]:
    """The digests of matrices that are not all zero."""
    need_torch("`tie_equal` counts values with it: zeros are equal and not tied.")
    read = read_checkpoint(checkpoint, digest=True, count_values=True)
    matrices = {
        row.where
        for row in read.counted
        if row.count.nonzero and type(row.entry) is Entry and len(row.entry.shape) > 1 and row.entry.numel > 1
    }
    return {row.where: row.sha256 for row in read.digests if row.where in matrices}


# --- what was written is read back before it gets its name, and every tensor compared with the source, as restic does


def _verify(written: Path, expected: Tensors, target: str) -> None:
    """Compare the tensors of a file that will be called `target` with those that it is made of."""
    alike: dict[tuple[object, object], bool] = {}  # views that come again are read once
    left, differ = limits.STREAMED * limits.MEMORY.most(written.stat().st_size), 0
    try:
        with open_checkpoint(written) as checkpoint:
            found = _entries(checkpoint.root)
            for where, entry in expected.items():
                other = found.get(where)
                if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
                    differ += 1
                    continue
                pair = view_of(entry), view_of(other)
                if pair not in alike:
                    left -= entry.nbytes  # no more is read than a file of this size may ask for
                    alike[pair] = left < 0 or same_bytes(entry, other)
                differ += not alike[pair]
    except CkptError as error:
        raise RepairError(f"{target} could not be read back, and is not there.", why=f"{error.what} {error.why}") from None
    if differ:
        raise RepairError(
            f"What was written of {differ} tensors is not what was read, and {target} is not there.",
            why="The disk or the memory of this machine does not give back the bytes that it was given.",
        )


def _entries(root: Node) -> Tensors:
    return {tensor.where: tensor.node for tensor in find_tensors(root) if type(tensor.node) is Entry}


def write_index(path: str | os.PathLike[str], *, dry_run: bool = False) -> Repaired:
    """Write the index that a folder of shards lacks; the shards stay as they are."""
    started = time.perf_counter()
    with contextlib.closing(Files(Path(path), Path(path))) as files, collector_paused(), naming(files):
        layout = families.layout(files.folder, files.names())
        if layout.family != "shards":
            raise UsageError(
                f"{path} holds no shards that lack an index.", fix="To repair anything else, name a file and an OUT."
            )
        shards, _ = sharded.read_loose(layout.names, files)
        text = sharded.missing_index(shards)
        target = files.folder / sharded.index_name(layout.names[0])
        report = Repaired(str(path), str(target), "sharded", dry_run, "The index of the shards is missing.")
        report.tensors = report.saved = sum(count_tensors(checkpoint.root) for checkpoint in shards.values())
        report.tensor_bytes = report.saved_bytes = sum(checkpoint.storage_bytes for checkpoint in shards.values())
        report.bytes = len(text)
        if not dry_run:
            with replacing(target) as output:
                write([Piece(Literal(text))], output)
                files.check_unchanged()
    report.notes.append(("index-written", f"It names {len(shards)} shards, which are unchanged."))
    report.seconds = time.perf_counter() - started
    return report
