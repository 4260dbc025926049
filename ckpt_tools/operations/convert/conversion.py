"""A conversion into one file: planned, which decides everything, and then carried out, which moves the bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckpt_tools.edit.checksums import Leaving, leaving
from ckpt_tools.formats import zip_writer
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.content import Piece, total
from ckpt_tools.io.output import Output, check_space
from ckpt_tools.io.ranks import Ranks
from ckpt_tools.io.writer import Clone, write
from ckpt_tools.operations.convert.edits import Edited, Edits
from ckpt_tools.operations.convert.inputs import open_input
from ckpt_tools.operations.convert.report import Converted, Note
from ckpt_tools.tree.nodes import Node

CONTAINERS = {"pth": "torch-zip", "pth-legacy": "torch-legacy", "safetensors": "safetensors", "dcp": "dcp", "gguf": "gguf"}


if TYPE_CHECKING:
    from ckpt_tools.edit.casts import Casting
    from ckpt_tools.edit.flatten import Flat

_RESERVE = 4096  # bytes of room in a safetensors header, for the longer names of an edit in place


@collector_paused()
def run(
    source: str | os.PathLike[str], target: str | os.PathLike[str], edits: Edits, output: Output | None, clone: Clone | None,
    opened: Checkpoint | None = None,
) -> Converted:  # fmt: skip
    """Read (or take what is open), and convert it into one file."""
    report = Converted(str(source), str(target), CONTAINERS[edits.kind], output is None)
    with ExitStack() as stack, opened or open_input(source, edits.options) as checkpoint:
        write_one(checkpoint, edits, report, stack, output, clone)
        if output is not None:
            checkpoint.source.check_unchanged()
    return report


def plan(
    checkpoint: Checkpoint, edits: Edits, report: Converted, stack: ExitStack
) -> tuple[list[Piece], Leaving, Casting | None]:
    """Edit the tree of a checkpoint, tell the report, and lay the output out as one file; no output is touched."""
    edited = edits.apply(checkpoint, report, stack)
    pieces = lay_out(edited, checkpoint, edits, report)
    report.bytes = total(pieces)
    found = records_leaving(edited.root, pieces, checkpoint, edits)
    return found.pieces(pieces), found, edited.casting


def write_one(
    checkpoint: Checkpoint, edits: Edits, report: Converted, stack: ExitStack, output: Output | None, clone: Clone | None = None
) -> None:
    """Plan, and with an output move the bytes; whoever opened the inputs sees to it that they are unchanged then."""
    pieces, found, casting = plan(checkpoint, edits, report, stack)
    if output is None:
        return
    done = clone.done if clone is not None else 0
    check_space(output.target.parent, output.target, report.bytes, fd=output.fd, written=done)
    write(pieces, output, edits.options.progress, clone)
    found.check_rest()
    report_lost(casting, report, Ranks())


def report_lost(casting: Casting | None, report: Converted, ranks: Ranks) -> None:
    """What the casts of all processes lost."""
    for lost in ranks.agree(casting.lost) if casting is not None else ():
        of_all = report.overflowed, report.underflowed, report.saturated, report.nan
        for counts, found in zip(of_all, lost, strict=True):
            for name, count in found.items():
                counts[name] = counts.get(name, 0) + count


def records_leaving(root: Node, pieces: Iterable[Piece], checkpoint: Checkpoint, edits: Edits) -> Leaving:
    """The records whose CRC-32 is compared: those whose bytes leave it behind; none with `no_verify`."""
    if edits.options.no_verify:
        return Leaving(())
    return leaving(root, pieces, keeps=edits.kind == "pth" and checkpoint.has_checksums)


def report_flat(flat: Flat, report: Converted) -> None:
    """What became of ties, views and objects when the tree was made flat."""
    report.aliases = {name: alias["of"] for name, alias in flat.aliases.items()}
    report.notes += [Note(code, text) for code, text in flat.notes]
    if flat.aliases:
        report.note("aliases", "ckpt restores tied names from this file; other loaders see only the first of each.")
    report.objects += flat.fates


def lay_out(edited: Edited, checkpoint: Checkpoint, edits: Edits, report: Converted) -> list[Piece]:
    """The pieces of the one file, and what the report has of it."""
    if edits.kind == "safetensors":
        from ckpt_tools.edit.flatten import flatten
        from ckpt_tools.formats import safetensors

        flat = flatten(edited.root, objects=edits.options.objects, metadata=checkpoint.metadata, texts=edits.texts)
        report_flat(flat, report)
        return safetensors.lay_out(flat.tensors, flat.metadata, reserve=_RESERVE)
    if edits.kind == "gguf":
        return _lay_out_gguf(edited.root, checkpoint, edits, report)
    if checkpoint.metadata:
        from ckpt_tools.formats.safetensors import ALIASES, STATE_DICT_METADATA

        known = {ALIASES, STATE_DICT_METADATA, "format", *edited.ties}
        lost = [key for key in checkpoint.metadata if key not in known]
        report.dropped += [(key, "text next to the tensors; a .pth cannot store it") for key in lost]
    if edits.kind == "pth-legacy":
        from ckpt_tools.formats import torch_legacy

        return torch_legacy.lay_out(edited.root)
    return zip_writer.lay_out(edited.root, folder=checkpoint.root_folder, trust_crc=checkpoint.has_checksums)


def _lay_out_gguf(root: Node, checkpoint: Checkpoint, edits: Edits, report: Converted) -> list[Piece]:
    from ckpt_tools.edit.flatten import flatten
    from ckpt_tools.formats.frameworks import gguf

    flat = flatten(root, objects=edits.options.objects, metadata=checkpoint.metadata, texts=edits.texts, holder="GGUF")
    report_flat(flat, report)
    if gguf.OF_THE_INPUT in flat.metadata:
        report.dropped.append((gguf.OF_THE_INPUT, "the types of the input's tensors"))
    if "general.architecture" not in flat.metadata:
        text = "llama.cpp reads a GGUF by 'general.architecture', which is not in the metadata; `set_metadata` sets it."
        report.note("no-architecture", text)
    if quantise := edits.options.quantises:
        count = sum(gguf.becomes_q8_0(entry) for entry, _ in flat.tensors.values())
        text = f"{count} of {len(flat.tensors)} tensors become Q8_0: float matrices with a multiple of 32 elements in a row."
        report.note("quantised", text)
    return gguf.lay_out(flat.tensors, flat.metadata, quantise=quantise)
