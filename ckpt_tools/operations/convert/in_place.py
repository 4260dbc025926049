"""Edit a checkpoint in place: names and device tags change, the tensors stay where they lie. Work in names, not in bytes."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ckpt_tools.edit import flatten
from ckpt_tools.errors import ConvertError, OutputError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.folders import DCP_METADATA, INDEX_SUFFIX
from ckpt_tools.formats.legacy import torch_legacy
from ckpt_tools.formats.open import Checkpoint, collector_paused, open_checkpoint
from ckpt_tools.formats.parts.named import part_error, partition
from ckpt_tools.formats.zip import torch_layout
from ckpt_tools.io import journal
from ckpt_tools.io.content import (
    CHUNK,
    Piece,
    Range,
    to_bytes,
    total,
)
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.operations.convert.conversion import report_flat
from ckpt_tools.operations.convert.edits import Edits
from ckpt_tools.operations.convert.names import Names
from ckpt_tools.operations.convert.options import ConvertOptions, InPlaceOptions
from ckpt_tools.operations.convert.report import Converted, Note
from ckpt_tools.operations.in_folders import indexed_files
from ckpt_tools.text import printable
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.nodes import Node
from ckpt_tools.tree.options import as_keywords

_FORMATS = {"torch-zip": "pth", "torch-legacy": "pth-legacy", "safetensors": "safetensors"}
_LIMIT = 256 << 20  # bytes to rewrite; more than this is work for a copy


@as_keywords(InPlaceOptions)
@natural
def edit_in_place(path: str | os.PathLike[str], options: InPlaceOptions) -> Converted:
    """Change names and device tags of a checkpoint in its own file. Durable; a kill leaves the old file or the new one.

    Args:
        path: a torch-zip, torch-legacy or safetensors file.
        options: those of `InPlaceOptions`, as keywords.

    Returns:
        The report of `convert`; its `bytes` are the file's new size.

    Raises:
        ConvertError: the edit would move tensor bytes, or there is no room for it before them; the file is one of
            several, and another one says where in it things lie, or what they are called.
        CkptError: see `ckpt_tools.errors`; the file is as it was then.
    """
    started = time.perf_counter()
    if is_address(path):
        raise OutputError(f"{path} is not on this machine.", why="Only local files are edited in place.", fix="Name an OUT.")
    asked = ConvertOptions(**options.asked())
    Names(asked)  # a rule that cannot be read is told before the file is touched
    if not options.dry_run and os.path.lexists(path):  # what is no path at all is told by whoever opens it
        journal.recover(Path(os.path.realpath(path)))
    with ExitStack() as stack, open_checkpoint(path) as checkpoint, collector_paused():
        source, kind = checkpoint.decoded.source, _FORMATS.get(checkpoint.container)
        if kind is None or type(source) is not Source:  # a local file, whole
            raise ConvertError(
                f"{path} is a {checkpoint.described} file, which cannot be edited in place.", fix="Convert it to another file."
            )
        _check_alone(checkpoint.path)
        part = partition(checkpoint)
        if part is not None and options.objects in ("plain", "drop"):
            raise part_error(checkpoint, part)
        report = Converted(str(path), str(path), checkpoint.container, options.dry_run)
        if part is not None:
            report.notes.append(Note("partition", f"The file is a part of a model, and stays one: {part.found}."))
        edits = Edits(asked, kind)
        pieces = _lay_out(edits.apply(checkpoint, report, stack).root, checkpoint, edits, report)
        if any(row.renamed for row in report.state_dicts):
            _check_not_indexed(checkpoint.path)
        report.bytes = total(pieces)
        patches = _differing(source, _patches(pieces, source))
        rewritten = sum(len(data) for _, data in patches)
        report.notes.append(Note("in-place", f"{rewritten} bytes are rewritten; the tensors stay where they are."))
        if not options.dry_run and (patches or report.bytes != source.size):
            journal.patch(Path(os.path.realpath(source.path)), patches, report.bytes, source.identity)
    report.seconds = time.perf_counter() - started
    return report


def _check_alone(path: Path) -> None:
    """Raise ConvertError for a part of a distributed checkpoint: each place in it stands in .metadata too."""
    for place in (path, Path(os.path.realpath(path))):
        if place.suffix == ".distcp" and (place.parent / DCP_METADATA).exists():
            why = f"{DCP_METADATA} says where everything in it lies, and would not be true any more."
            raise ConvertError(f"{path} is a part of a distributed checkpoint.", why=why, fix=_whole(place.parent))


def _check_not_indexed(path: Path) -> None:
    """Raise ConvertError for a shard whose index has its names, when these change."""
    for place in (path, Path(os.path.realpath(path))):
        for index in place.parent.glob(f"*{INDEX_SUFFIX}"):
            if place.name in (indexed_files(index) or ()):
                why = f"The names in it stand in {index.name} too, and would not be true any more."
                raise ConvertError(f"{path} is a shard of a model.", why=why, fix=_whole(place.parent))


def _whole(folder: Path) -> str:
    return f"Convert the whole to another place: {printable(f'ckpt convert {shlex.quote(str(folder))} OUT')}"


def _lay_out(root: Node, checkpoint: Checkpoint, edits: Edits, report: Converted) -> list[Piece]:
    decoded = checkpoint.decoded
    if checkpoint.container == "torch-zip":
        return torch_layout.lay_out_in_place(root, folder=decoded.root_folder, byteorder=decoded.byteorder)
    if checkpoint.container == "torch-legacy":
        return torch_legacy.lay_out_in_place(root, decoded)
    flat = flatten.flatten(root, metadata=decoded.metadata, edit=edits.metadata)
    report_flat(flat, report)
    return safetensors.lay_out_in_place(flat.tensors, flat.metadata, decoded.source)


def _patches(pieces: Sequence[Piece], source: Source) -> dict[int, bytearray]:
    """What does not stay, by the offset where it goes, adjacent pieces together."""
    patches: dict[int, bytearray] = {}
    at = amount = start = 0
    for piece in pieces:
        content = piece.content
        if isinstance(content, Range):
            assert (content.source, content.offset) == (source, at), "a layout in place keeps every range"
            start = at + content.length
        else:
            amount += content.length
            if amount > _LIMIT:
                raise ConvertError(
                    f"The edit would rewrite more than {_LIMIT >> 20} MiB of the file.", fix="Convert to another file."
                )
            patches.setdefault(start, bytearray()).extend(to_bytes([piece]))
        at += content.length
    return patches


def _differing(source: Source, patches: Mapping[int, bytearray]) -> list[journal.Patch]:
    """The patches in steps of a few megabytes, without those that the file holds already."""
    steps = [(at + i, bytes(data[i : i + CHUNK])) for at, data in patches.items() for i in range(0, len(data), CHUNK)]
    return [(at, data) for at, data in steps if source.read(at, min(len(data), max(source.size - at, 0))) != data]
