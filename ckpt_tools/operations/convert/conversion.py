"""What `convert` does to a checkpoint: edit its tree, lay the result out in a container, move the bytes, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.edit import renaming
from ckpt_tools.edit.objects.known import is_known
from ckpt_tools.errors import NothingMatchedError, PartError, UsageError
from ckpt_tools.formats.base import PROGRAMS, Decoded
from ckpt_tools.formats.open import (
    Checkpoint,
    collector_paused,
    count_tensors,
    find_state_dicts,
    tensors_outside,
)
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.formats.zip import torch_layout
from ckpt_tools.io.cloning import Clone
from ckpt_tools.io.content import Piece, total
from ckpt_tools.io.output import Output, check_space
from ckpt_tools.io.sources import Files
from ckpt_tools.io.writer import write
from ckpt_tools.operations.convert.names import Names
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted, Note, ObjectFate
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree.arguments import Location
from ckpt_tools.tree.dtypes import CAST_TARGETS, DTYPES, DType
from ckpt_tools.tree.nodes import Node

CONTAINERS = {"pth": "torch-zip", "pth-legacy": "torch-legacy", "safetensors": "safetensors", "dcp": "dcp"}
_RESERVE = 4096  # bytes of room in a safetensors header

if TYPE_CHECKING:  # what only some conversions need is imported by those
    from ckpt_tools.edit.casts import Casting
    from ckpt_tools.edit.flatten import Flat
    from ckpt_tools.fit.options import FitOptions
    from ckpt_tools.fit.retarget import Retargeting


@collector_paused()
def run(
    source: str | os.PathLike[str], target: str | os.PathLike[str], edits: Edits, output: Output | None, clone: Clone | None
) -> Converted:  # fmt: skip
    """Read, plan and, with an output, write; the input must still be what was read when the output takes its name."""
    report = Converted(str(source), str(target), CONTAINERS[edits.kind], output is None)
    with open_input(source, partial=edits.options.partial) as checkpoint:
        pieces = edits.plan(checkpoint, report)
        report.bytes = total(pieces)
        if output is not None:
            done = clone.done if clone is not None else 0
            check_space(output.target.parent, output.target, report.bytes, fd=output.fd, written=done)
            write(pieces, output, edits.options.progress, clone)
            checkpoint.decoded.source.check_unchanged()
            if edits.casting is not None:
                report.overflowed, report.underflowed = edits.casting.overflowed(), edits.casting.underflowed()
    return report


def open_input(source: str | os.PathLike[str], *, partial: bool) -> Checkpoint:
    """Open what is to be converted.

    Raises:
        PartError: it is not whole; where something in it is, the error names the option. CkptError: see `open_whole`.
    """
    try:
        return open_whole(source, partial=partial)
    except PartError as error:
        if error.rest and not partial:
            from ckpt_tools.formats.parts.siblings import has_partial

            if has_partial(source):
                error.fix = f"{error.fix} `partial=True` writes what is whole and lists the rest.".lstrip()
        raise


class Edits:
    """What the options do to a checkpoint."""

    def __init__(self, options: ConvertOptions, kind: str = "pth") -> None:
        if options.reserve is not None and kind != "safetensors":
            raise UsageError("`reserve` is the room in a safetensors header; a .pth puts a longer pickle behind its tensors.")
        self.options, self.kind, self.names = options, kind, Names(options)
        self.map_location = _spec(options.map_location)
        self.retag = _retagging(self.map_location)
        self.retargeting = _retargeting(options)
        self.reserve = options.reserve if options.reserve is not None else 0 if options.compact else _RESERVE
        self.stack = ExitStack()  # what must stay open until the bytes are written: a target that is a checkpoint
        self.casting: Casting | None = None
        self.ties: dict[str, str] = {}
        self.used: frozenset[str] = frozenset()  # globs of --drop that named what objects would have lost

    def plan(self, checkpoint: Checkpoint, report: Converted) -> list[Piece]:
        """Edit the tree, fill in the report, lay the output out as one file."""
        root = self.edit(checkpoint, report)
        return _lay_out(root, checkpoint, self, report)

    def edit(self, checkpoint: Checkpoint, report: Converted) -> Node:
        """Edit the tree and fill in the report; returns the root."""
        self._begin(checkpoint, report)
        root = self._narrow(self._selected(checkpoint), checkpoint, report)
        if self.kind == "safetensors" and any(name.module.startswith("numpy") for name in checkpoint.decoded.globals):
            root = self._arrays(root, report)  # it holds nothing else of them
        if self.options.keep or self.options.drop:
            self._filter(root, report)
        self.names.apply(root, report)
        if checkpoint.decoded.byteorder != "little":
            from ckpt_tools.edit.casts import to_little_endian

            root = to_little_endian(root, checkpoint.decoded.byteorder)
        if self.retargeting is not None:
            self._fit(root, report)
        if self.retag is not None:
            from ckpt_tools.edit.devices import map_devices

            root, report.devices = map_devices(root, self.retag)
            _note_devices(report, checkpoint, self.kind, self.map_location)
        if self.options.verify and report.dry_run:
            report.notes.append(Note("not-verified", "`verify`: the bytes are checked while copying, not in a dry run."))
        if self.options.dtype is not None:
            root = self._cast(root, DTYPES[CAST_TARGETS[str(self.options.dtype)]], report)
        if self.kind in ("safetensors", "dcp"):
            from ckpt_tools.operations.convert.object_policy import leave_attributes

            leave_attributes(root, self.kind, self.options.objects, report)
        report.tensors = count_tensors(root)
        if not report.tensors and (checkpoint.tensors or checkpoint.container in PROGRAMS):
            frozen = not checkpoint.tensors
            why = "The weights of a frozen program are constants of its code, and no state dict holds them." if frozen else ""
            raise NothingMatchedError("No tensor would be left.", why=why)
        return root

    def _selected(self, checkpoint: Checkpoint) -> Node:
        """The root, or what --select names in its place."""
        if self.options.select is None:
            return checkpoint.root
        from ckpt_tools.edit.selection import select_in

        return select_in(checkpoint, self.options.select)

    def _filter(self, root: Node, report: Converted) -> None:
        """Keep and drop tensors by their names."""
        from ckpt_tools.edit.selection import filter_tensors

        gone = filter_tensors(root, self.options.keep, self.options.drop, self.used)
        report.dropped += [(dotted(where), "`keep` / `drop`") for where in gone]
        if self.options.keep:
            _note_outside(root, report)

    def _begin(self, checkpoint: Checkpoint, report: Converted) -> None:
        """Find the bytes, tell what is odd about the input, tie what its metadata says is tied."""
        checkpoint.locate()
        report.dropped += checkpoint.decoded.lost
        report.notes += [Note(warned.code, f"The input: {warned.found}.") for warned in checkpoint.warnings]
        _note_beside(checkpoint, report)
        self.ties = renaming.restore_named_ties(checkpoint.root, checkpoint.decoded.metadata)
        if self.ties:
            names = ", ".join(f"{name} = {kept}" for name, kept in self.ties.items())
            report.notes.append(Note("ties-restored", f"Tied names put back from the metadata: {names}."))

    def _cast(self, root: Node, dtype: DType, report: Converted) -> Node:
        """Cast floats, and tell."""
        from ckpt_tools.edit.casts import cast_floats

        root, self.casting = cast_floats(root, dtype, self.options.dtype_only)
        report.casts = self.casting.moves
        if self.casting.steps:
            text = f"{self.casting.steps} step counters of optimizers keep their dtype; `dtype_only='*.step'` casts them."
            report.notes.append(Note("steps-kept", text))
        return root

    def _fit(self, root: Node, report: Converted) -> None:
        """Fit the state dict to the target."""
        from ckpt_tools.fit.retarget import note_optimizer

        assert self.retargeting is not None
        report.fitted, renamed = self.retargeting.apply(root, report.source, self.stack)
        report.optimizer_names += renamed
        report.dropped += [(name, "`on_mismatch='skip'`") for name in report.fitted.skipped]
        if text := note_optimizer(root, report.fitted):
            report.notes.append(Note("optimizer-of-old-tensors", text))

    def _narrow(self, root: Node, checkpoint: Checkpoint, report: Converted) -> Node:
        """Objects as --objects says; the averaged weights, or state dicts and values, on storages of their own size."""
        if not (self.options.objects or self.options.slim or self.options.ema) and _is_plain(checkpoint):
            return root
        from ckpt_tools.operations.convert import object_policy

        chosen = self.options.objects is None and (self.options.slim or self.options.ema)
        if chosen:
            root, self.used = object_policy.weights_alone(
                root, checkpoint, self.options.drop, report, ema=self.options.ema, slim=self.options.slim
            )  # fmt: skip
        objects = "plain" if self.options.slim and self.options.objects is None else self.options.objects
        selected = self.options.select is not None or (chosen and self.options.ema)  # what lies elsewhere does not come along
        root, used = object_policy.apply_objects(root, checkpoint, objects, report, selected=selected, drop=self.options.drop)
        self.used |= used
        if self.options.ema and not chosen:
            root, _ = object_policy.averaged_alone(root, report)
        return self._slimmed(root, report) if self.options.slim else root

    def _arrays(self, root: Node, report: Converted) -> Node:
        """NumPy's arrays of numbers as tensors."""
        from ckpt_tools.edit.objects.plain import arrays_as_tensors

        root, fates = arrays_as_tensors(root)
        report.objects += [ObjectFate(list(fate.where), fate.name, fate.became) for fate in fates]
        return root

    def _slimmed(self, root: Node, report: Converted) -> Node:
        from ckpt_tools.edit import compaction, slimming

        root, gone = slimming.slim(root)
        report.dropped += [(dotted(where), what) for where, what in gone]
        root, done = compaction.compact(root, verify=self.options.verify)
        report.compacted, report.saved = done.storages, done.saved
        return root


def _retargeting(options: FitOptions) -> Retargeting | None:
    """The target, where one is named; what does the work is imported then."""
    if not options.targeted:
        return None
    from ckpt_tools.fit.retarget import Retargeting

    return Retargeting(options)


def _is_plain(checkpoint: Checkpoint) -> bool:
    """Whether it holds plain data only, by what its pickle names: nothing in it is anything else then."""
    decoded = checkpoint.decoded
    return checkpoint.container not in PROGRAMS and not decoded.unusual and all(map(is_known, decoded.globals))


def _retagging(spec: str | None) -> Callable[[str], str] | None:
    if spec is None:
        return None
    from ckpt_tools.edit.devices import parse_map_location

    return parse_map_location(spec)


def _spec(location: Location | None) -> str | None:
    """A device, or `from=to` pairs with commas between."""
    if isinstance(location, Mapping):
        return ",".join(f"{tag}={device}" for tag, device in location.items()) or None
    return None if location is None else str(location)


def _note_beside(checkpoint: Checkpoint, report: Converted) -> None:
    """A folder is one checkpoint; others in it, the state of an optimizer for example, are not converted with it."""
    if not os.path.isdir(report.source):
        return
    from ckpt_tools.operations.in_folders import find_checkpoints

    folder, source = Path(report.source), checkpoint.decoded.source
    own = {folder, source.folder if isinstance(source, Files) else source.path}  # of several steps, that which is read
    if others := [str(path.relative_to(folder)) for path in find_checkpoints(folder).checkpoints if path not in own]:
        text = f"{report.source} holds other checkpoints too, which are converted one by one: {listed(others)}."
        report.notes.append(Note("others-beside", text))


def _note_outside(root: Node, report: Converted) -> None:
    """--keep is about the names of state dicts: say what stays because it has no such name."""
    if outside := tensors_outside(root, find_state_dicts(root)):
        shown = listed([dotted(tensor.where) for tensor in outside], 1)
        text = f"`keep`: what lies outside state dicts stays, {shown}; `drop` takes it by path."
        report.notes.append(Note("outside-kept", text))


def _note_devices(report: Converted, checkpoint: Checkpoint, kind: str, spec: str | None) -> None:
    if "safetensors" in (checkpoint.container, report.container):
        report.notes.append(Note("no-device-tags", "safetensors has no device tags, so `map_location` changes nothing in it."))
    elif not report.devices:
        report.notes.append(Note("devices-unchanged", f"`map_location={spec!r}`: no storage had to change."))


def report_flat(flat: Flat, report: Converted) -> None:
    """What became of ties, views and objects when the tree was made flat."""
    report.aliases = {name: alias["of"] for name, alias in flat.aliases.items()}
    report.notes += [Note(code, text) for code, text in flat.notes]
    if flat.aliases:
        text = "Tied names are kept as aliases: ckpt puts them back, another loader sees the first name of each only."
        report.notes.append(Note("aliases", text))
    report.objects += [ObjectFate(list(fate.where), fate.name, fate.became) for fate in flat.fates]


def not_verified(decoded: Decoded) -> Note:
    """Why --verify compares nothing."""
    if decoded.container in ("dcp", "rank-files"):
        return Note("not-verified", "`verify`: the checksums of the parts of many ranks are compared by ckpt check, not here.")
    return Note("no-checksums", "`verify`: the input carries no checksums.")


def _lay_out(root: Node, checkpoint: Checkpoint, edits: Edits, report: Converted) -> list[Piece]:
    decoded, verify = checkpoint.decoded, edits.options.verify and checkpoint.decoded.has_checksums
    if edits.options.verify and not verify:
        report.notes.append(not_verified(decoded))
    if edits.kind == "safetensors":
        pieces = _lay_out_flat(root, decoded, edits, report)
    else:
        if decoded.container in ("safetensors", "sharded", "dcp"):
            _tell_lost_text(decoded, edits, report)
        pieces = _lay_out_torch(root, decoded, edits, verify=verify)
    if not verify:
        return pieces
    from ckpt_tools.edit.casts import checked

    return checked(pieces, root)


def _lay_out_flat(root: Node, decoded: Decoded, edits: Edits, report: Converted) -> list[Piece]:
    from ckpt_tools.edit.flatten import flatten
    from ckpt_tools.formats import safetensors

    flat = flatten(root, objects=edits.options.objects, metadata=decoded.metadata)
    report_flat(flat, report)
    return safetensors.lay_out(flat.tensors, flat.metadata, reserve=edits.reserve)


def _tell_lost_text(decoded: Decoded, edits: Edits, report: Converted) -> None:
    from ckpt_tools.formats.safetensors import ALIASES, STATE_DICT_METADATA

    known = {ALIASES, STATE_DICT_METADATA, "format", *edits.ties}
    lost = [key for key in decoded.metadata if key not in known]
    report.dropped += [(key, "text beside the tensors; a .pth has no place for it") for key in lost]


def _lay_out_torch(root: Node, decoded: Decoded, edits: Edits, *, verify: bool) -> list[Piece]:
    if edits.kind == "pth-legacy":
        from ckpt_tools.formats.legacy import torch_legacy

        return torch_legacy.lay_out(root)
    folder, trust_crc = decoded.root_folder, decoded.has_checksums
    return torch_layout.lay_out(root, folder=folder, trust_crc=trust_crc, verify=verify, compact=edits.options.compact)
