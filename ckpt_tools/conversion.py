"""What `convert` does to a checkpoint: edit its tree, lay the result out in a container, move the bytes, report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_tools import casts, flatten, plain, transforms, tree
from ckpt_tools.checkpoint import (
    Checkpoint,
    StateDict,
    collector_paused,
    count_tensors,
    find_state_dicts,
    find_tensors,
    open_checkpoint,
)
from ckpt_tools.cloning import Clone
from ckpt_tools.containers import safetensors, torch_zip_layout
from ckpt_tools.dtypes import CAST_TARGETS, DTYPES
from ckpt_tools.errors import NothingMatchedError, ObjectsError, UsageError
from ckpt_tools.files import Output, check_space
from ckpt_tools.modules import is_module
from ckpt_tools.names import strip_inner, strip_leading, strip_module, uneven, unwrap
from ckpt_tools.plan import Piece, total
from ckpt_tools.transforms import Rename, dotted
from ckpt_tools.tree import DROP, Entry, Node, Where
from ckpt_tools.writer import Progress, write

CONTAINERS = {"pth": "torch-zip", "pth-legacy": "torch-legacy", "safetensors": "safetensors"}
_RESERVE = 4096  # bytes of room in a safetensors header

if TYPE_CHECKING:
    from ckpt_tools.retarget import FittedTo, Retargeting


@dataclass(frozen=True, slots=True)
class RenamedNames:
    """What happened to the names of one state dict."""

    where: list[str | int]
    tensors: int
    renamed: int
    examples: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ObjectFate:
    """What became of one object."""

    where: list[str | int]
    name: str
    became: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something the user should know: `code` is stable, `text` a sentence."""

    code: str
    text: str


@dataclass(slots=True)
class Converted:
    """The report of a conversion.

    Attributes:
        source, target: the two paths. container: the output's. dry_run: whether nothing was written.
        state_dicts: what happened to the names, per state dict.
        dropped: paths of the tensors and values that were left out, with the reason.
        objects: every object that was exchanged or dropped.
        devices: "from -> to": number of storages.
        casts: number of tensors cast, by "from -> to". overflowed, underflowed: path -> finite values that
            became infinite, values that became zero.
        optimizer_names: how many `param_names` changed.
        aliases: tied names that the output keeps as aliases, name -> the name that holds the bytes.
        compacted: storages that were cut down to what their tensors use; saved: the bytes that this saves.
        fitted: what was done to fit a target; None without one.
        notes: what else the user should know.
        tensors, files, bytes: tensors and files in the output, and its size. seconds: how long it took.
    """

    source: str
    target: str
    container: str = ""
    dry_run: bool = False
    state_dicts: list[RenamedNames] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    objects: list[ObjectFate] = field(default_factory=list)
    devices: dict[str, int] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    overflowed: dict[str, int] = field(default_factory=dict)
    underflowed: dict[str, int] = field(default_factory=dict)
    optimizer_names: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    compacted: int = 0
    saved: int = 0
    fitted: FittedTo | None = None
    notes: list[Note] = field(default_factory=list)
    tensors: int = 0
    files: int = 1
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def run(
    source: str | os.PathLike[str], target: str | os.PathLike[str], edits: Edits, output: Output | None, clone: Clone | None,
    progress: Progress | None,
) -> Converted:  # fmt: skip
    """Read, plan and, with an output, write; the input must still be what was read when the output takes its name."""
    report = Converted(str(source), str(target), CONTAINERS[edits.kind], output is None)
    with open_checkpoint(source) as checkpoint:
        with collector_paused():
            pieces = edits.plan(checkpoint, report)
        report.bytes = total(pieces)
        if output is not None:
            check_space(output.target.parent, output.target, report.bytes, written=clone.done if clone is not None else 0)
            write(pieces, output, progress, clone)
            checkpoint.decoded.source.check_unchanged()
            if edits.casting is not None:
                report.overflowed, report.underflowed = edits.casting.overflowed(), edits.casting.underflowed()
    return report


class Edits:
    """The options, checked; and what they do to a checkpoint."""

    def __init__(
        self, names: Names, keep: Sequence[str], drop: Sequence[str], select: str | None, map_location: str | None,
        dtype: str | None, dtype_only: Sequence[str], objects: str | None, kind: str, verify: bool,
        reserve: int | None = None, compact: bool = False,
    ) -> None:  # fmt: skip
        if reserve is not None and (kind != "safetensors" or reserve < 0):
            raise UsageError("--reserve is the room in a safetensors header; a .pth puts a longer pickle behind its tensors.")
        if dtype is not None and dtype not in CAST_TARGETS:
            raise UsageError(f"--dtype {dtype!r} is none of bf16, fp16, fp32, fp64.")
        if dtype_only and dtype is None:
            raise UsageError("--dtype-only says which tensors --dtype casts; --dtype is missing.")
        if objects not in (None, "keep", "plain", "drop"):
            raise UsageError(f"--objects {objects!r} is none of keep, plain, drop.")
        self.names, self.keep, self.drop, self.select = names, keep, drop, select
        self.map_location = map_location
        self.retag = transforms.parse_map_location(map_location) if map_location is not None else None
        self.dtype = DTYPES[CAST_TARGETS[dtype]] if dtype is not None else None
        self.dtype_only, self.objects, self.kind, self.verify = dtype_only, objects, kind, verify
        self.compact = compact
        self.reserve = reserve if reserve is not None else 0 if compact else _RESERVE
        self.slim = self.ema = False
        self.retargeting: Retargeting | None = None
        self.stack = ExitStack()  # what must stay open until the bytes are written: a target that is a checkpoint
        self.casting: casts.Casting | None = None
        self.ties: dict[str, str] = {}

    def narrow(self, *, slim: bool, ema: bool) -> None:
        """Keep the weights alone, or the averaged ones."""
        if slim and self.objects == "keep":
            raise UsageError("--slim drops objects, so --objects keep contradicts it.")
        self.slim, self.ema = slim, ema

    def fit_to(self, retargeting: Retargeting | None) -> None:
        """Fit the state dict to a target as well."""
        if retargeting is not None and retargeting.plan is not None and self.names.steps:
            raise UsageError(f"{self.names.steps[0][0]} does not go with --plan, which says every name.")
        self.retargeting = retargeting

    def plan(self, checkpoint: Checkpoint, report: Converted) -> list[Piece]:
        """Edit the tree, fill in the report, lay the output out as one file."""
        root = self.edit(checkpoint, report)
        return _lay_out(root, checkpoint, self, report)

    def edit(self, checkpoint: Checkpoint, report: Converted) -> Node:
        """Edit the tree and fill in the report; returns the root."""
        checkpoint.locate()
        report.notes += [Note(warned.code, f"The input has {warned.found}.") for warned in checkpoint.warnings]
        self.ties = transforms.restore_named_ties(checkpoint.root, checkpoint.decoded.metadata)
        if self.ties:
            names = ", ".join(f"{name} = {kept}" for name, kept in self.ties.items())
            report.notes.append(Note("ties-restored", f"Tied names put back from the metadata: {names}."))
        root = checkpoint.root if self.select is None else transforms.select(checkpoint.root, self.select)
        root = self._narrow(root, checkpoint, report)
        if self.keep or self.drop:
            gone = transforms.filter_tensors(root, self.keep, self.drop)
            report.dropped += [(dotted(where), "--keep / --drop") for where in gone]
            self._note_outside(root, report)
        self.names.apply(root, report)
        root = casts.to_little_endian(root, checkpoint.decoded.byteorder)
        if self.retargeting is not None:
            self._fit(root, report)
        if self.retag is not None:
            root, report.devices = transforms.map_devices(root, self.retag)
            _note_devices(report, checkpoint, self.kind, self.map_location)
        if self.verify and report.dry_run:
            report.notes.append(Note("not-verified", "--verify: the bytes are checked while copying, not in a dry run."))
        if self.dtype is not None:
            root, self.casting = casts.cast_floats(root, self.dtype, self.dtype_only)
            report.casts = self.casting.moves
            if self.casting.steps:
                text = f"{self.casting.steps} step counters of optimizers keep their dtype; --dtype-only '*.step' casts them."
                report.notes.append(Note("steps-kept", text))
        report.tensors = count_tensors(root)
        if not report.tensors and checkpoint.tensors:
            raise NothingMatchedError("No tensor would be left.")
        return root

    def _fit(self, root: Node, report: Converted) -> None:
        """Fit the state dict to the target."""
        from ckpt_tools.retarget import note_optimizer

        assert self.retargeting is not None
        report.fitted, renamed = self.retargeting.apply(root, report.source, self.stack)
        report.optimizer_names += renamed
        report.dropped += [(name, "--on-mismatch skip") for name in report.fitted.skipped]
        if text := note_optimizer(root, report.fitted):
            report.notes.append(Note("optimizer-of-old-tensors", text))

    def _narrow(self, root: Node, checkpoint: Checkpoint, report: Converted) -> Node:
        """Objects as --objects says; the averaged weights, or state dicts and values, on storages of their own size."""
        chosen = self.objects is None and (self.slim or self.ema)
        if chosen:
            root = _modules_first(root, report)
            if self.ema:
                root = _averaged(root, report)
            if self.slim:
                root, fates = plain.drop_unknown(root)
                report.objects += [ObjectFate(list(fate.where), fate.name, fate.became) for fate in fates]
        objects = "plain" if self.slim and self.objects is None else self.objects
        selected = self.select is not None or (chosen and self.ema)  # what lies elsewhere does not come along
        root = _apply_objects(root, checkpoint, objects, report, selected=selected)
        if self.ema and not chosen:
            root = _averaged(root, report)
        return self._slimmed(root, report) if self.slim else root

    def _slimmed(self, root: Node, report: Converted) -> Node:
        from ckpt_tools import compaction, slimming

        report.dropped += [(dotted(where), what) for where, what in slimming.slim(root)]
        root, done = compaction.compact(root, verify=self.verify)
        report.compacted, report.saved = done.storages, done.saved
        return root

    def _note_outside(self, root: Node, report: Converted) -> None:
        """--keep is about the names of state dicts: say what stays because it has no such name."""
        inside = {state_dict.where for state_dict in find_state_dicts(root)}
        outside = [dotted(tensor.where) for tensor in find_tensors(root) if tensor.where[:-1] not in inside]
        if self.keep and outside:
            text = f"--keep: {len(outside)} tensors outside of state dicts stay ({outside[0]} ...); --drop takes them by path."
            report.notes.append(Note("outside-kept", text))


class Names:
    """The name options, checked and put together into one function of a name."""

    def __init__(
        self, strip: bool, add: bool, unwrapping: bool, strip_prefix: str | None, add_prefix: str | None, rename: Sequence[str]
    ) -> None:
        if strip and add:
            raise UsageError("--strip-module and --add-module contradict each other.")
        if strip_prefix == "" or add_prefix == "":
            raise UsageError("A prefix cannot be empty.")
        self.steps: list[tuple[str, Rename]] = []
        self.known: dict[str, str] = {}  # names that have been renamed already, each asked for several times
        if strip:
            self.steps.append(("--strip-module", strip_module))
        if unwrapping:
            self.steps.append(("--unwrap", unwrap))
        if strip_prefix is not None:
            self.steps.append((f"--strip-prefix {strip_prefix}", lambda name: strip_leading(name, strip_prefix)))
        for text in rename:
            pattern, replacement = transforms.parse_rename(text)
            self.steps.append((f"--rename {text!r}", lambda name, p=pattern, r=replacement: p.sub(r, name)))  # type: ignore[misc]
        for prefix in (add_prefix, "module." if add else None):
            if prefix is not None:
                self.steps.append(("--add-prefix", lambda name, prefix=prefix: prefix + name))  # type: ignore[misc]

    def apply(self, root: Node, report: Converted) -> None:
        """Rename in every state dict and every optimizer, and report it."""
        found = find_state_dicts(root)
        if self.steps:
            self._check_matches(found, report)
            self._note_uneven(found, report)
        for state_dict in found:
            renamed = transforms.rename_state_dict(state_dict, self.rename)
            examples = list(renamed.changes.items())[:3]
            report.state_dicts.append(RenamedNames(list(renamed.where), renamed.tensors, len(renamed.changes), examples))
        if self.steps:
            report.optimizer_names = transforms.rename_optimizers(root, self.rename)

    def rename(self, name: str) -> str:
        """The new name."""
        new = self.known.get(name)
        if new is None:
            new = name
            for _, step in self.steps:
                new = step(new)
            self.known[name] = new
        return new

    def _check_matches(self, found: list[StateDict], report: Converted) -> None:
        """A --rename that changes nothing is refused; another option that changes nothing is noted."""
        if not found:
            raise NothingMatchedError("There is no state dict to rename in.", why="No mapping of names to tensors was found.")
        old = names = [name for state_dict in found for name in state_dict.names]
        for option, step in self.steps:
            new = [step(name) for name in names]
            if new == names and option.startswith("--rename"):
                raise NothingMatchedError(f"{option} changes no name.", fix="ckpt inspect --all FILE lists the names.")
            if new == names:
                report.notes.append(Note("no-prefix", f"{option}: no name has the prefix; the names stay as they are."))
            names = new
        self.known = dict(zip(old, names, strict=True))

    def _note_uneven(self, found: list[StateDict], report: Converted) -> None:
        """Say so where some names of a state dict lose more than one `module.`, and others one."""
        options = [option for option, _ in self.steps if option in ("--strip-module", "--unwrap")]
        for state_dict in found if options else ():
            pair = uneven(map(strip_inner, state_dict.names) if "--unwrap" in options else state_dict.names)
            if pair is not None:
                text = (
                    f"{options[0]}: {pair[0]!r} loses one 'module.', {pair[1]!r} more. Where the model itself has a sub-module "
                )
                fix = r"of that name, remove one only: --rename '^module\.='."
                report.notes.append(Note("uneven-prefix", text + fix))


def _modules_first(root: Node, report: Converted) -> Node:
    """Pickled modules as their state dicts, since their weights are wanted whatever becomes of other objects."""
    from ckpt_tools.slimming import modules_as_state_dicts

    seen: set[int] = set()
    for where, module in tree.walk(root, stop=is_module, plain=False):
        if is_module(module) and id(module) not in seen:
            seen.add(id(module))
            report.objects.append(ObjectFate(list(where), module.name, "dict"))
            inner = [(below, name) for below, name in plain.find_unknown(module) if below]
            report.objects += [ObjectFate([*where, *below], name, plain.WITH_OUTER) for below, name in inner]
    return modules_as_state_dicts(root)


def _averaged(root: Node, report: Converted) -> Node:
    """The averaged weights alone."""
    from ckpt_tools.slimming import averaged

    root, where = averaged(root)
    report.notes.append(Note("ema", f"The averaged weights were in {dotted(where) or 'the root'}."))
    return root


def _apply_objects(root: Node, checkpoint: Checkpoint, policy: str | None, report: Converted, *, selected: bool) -> Node:
    decoded = checkpoint.decoded
    if checkpoint.container == "torchscript":
        _check_program(checkpoint, policy, report)
    simple = all(map(plain.is_known, decoded.globals)) and not decoded.unusual  # then nothing can be unknown
    unknown = [] if simple else plain.find_unknown(root)
    present = {name for _, name in unknown}
    hidden = [] if selected else [g for g in decoded.globals if not plain.is_resolved(g) and str(g) not in present]
    if policy is None and (unknown or hidden):
        raise _objects_error(checkpoint, unknown, [str(name) for name in hidden])
    told = {fate.name for fate in report.objects}
    for name in (name for name in hidden if str(name) not in told):
        report.objects.append(ObjectFate([], str(name), "dropped"))
    if policy in (None, "keep"):
        return root
    before = {_view(tensor.node): tensor.where for tensor in find_tensors(root)}
    root, fates = plain.make_plain(root, oldest=True) if policy == "plain" else plain.drop_unknown(root)
    report.objects += [ObjectFate(list(fate.where), fate.name, fate.became) for fate in fates]
    left = {_view(tensor.node) for tensor in find_tensors(root)}
    lost = [where for view, where in before.items() if view not in left]
    report.dropped += [(dotted(where), "a tensor that its object's plain form does not hold") for where in lost]
    if policy == "plain" and (newer := plain.newer_dtypes(root)):
        text = f"weights_only takes {', '.join(newer)} since torch 2.5; torch 2.4 refuses the file."
        report.notes.append(Note("newer-dtypes", text))
    if root is None or root is DROP:
        raise NothingMatchedError("Nothing would be left.", why="The whole checkpoint is one object that has no plain form.")
    return root


def _check_program(checkpoint: Checkpoint, policy: str | None, report: Converted) -> None:
    """A program cannot be kept: its state dict can be taken out, when that is asked for."""
    if policy != "plain":
        raise ObjectsError(
            f"{checkpoint.path} is a TorchScript program, not a plain checkpoint.", why="convert keeps no code.",
            fix="Take its state dict out: --objects plain",
        )  # fmt: skip
    report.dropped.append(("code", "a state dict holds no program"))


def _view(node: Node) -> tuple[Any, ...]:
    """What makes a tensor the same before and after its object was made plain: the storage and the view on it."""
    return (id(node.storage), node.offset, node.shape, node.stride, node.dtype) if type(node) is Entry else (id(node),)


def _objects_error(checkpoint: Checkpoint, unknown: list[tuple[Where, str]], hidden: list[str]) -> ObjectsError:
    lines = [f"{dotted(where) or 'the root'}: {name}" for where, name in unknown]
    lines += [f"{name} (named by the pickle, not part of what it makes)" for name in hidden]
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return ObjectsError(
        f"{checkpoint.path} holds objects that are not plain data.", why="; ".join(lines[:8]) + more + ".",
        fix="Choose with --objects: 'plain' makes data of them, 'drop' leaves them out, 'keep' keeps them as they are.",
    )  # fmt: skip


def _note_devices(report: Converted, checkpoint: Checkpoint, kind: str, spec: str | None) -> None:
    if "safetensors" in (checkpoint.container, report.container):
        report.notes.append(Note("no-device-tags", "safetensors has no device tags, so --map-location changes nothing in it."))
    elif not report.devices:
        report.notes.append(Note("devices-unchanged", f"--map-location {spec}: no storage had to change."))


def report_flat(flat: flatten.Flat, report: Converted) -> None:
    """What became of ties, views and objects when the tree was made flat."""
    report.aliases = {name: alias["of"] for name, alias in flat.aliases.items()}
    report.notes += [Note(code, text) for code, text in flat.notes]
    if flat.aliases:
        text = "Tied names are kept as aliases: ckpt puts them back, another loader sees the first name of each only."
        report.notes.append(Note("aliases", text))
    report.objects += [ObjectFate(list(fate.where), fate.name, fate.became) for fate in flat.fates]


def _lay_out(root: Node, checkpoint: Checkpoint, edits: Edits, report: Converted) -> list[Piece]:
    decoded, verify = checkpoint.decoded, edits.verify
    if verify and not decoded.has_checksums:
        report.notes.append(Note("no-checksums", "--verify: the input carries no checksums."))
    if edits.kind == "safetensors":
        flat = flatten.flatten(root, objects=edits.objects, metadata=decoded.metadata)
        report_flat(flat, report)
        pieces = safetensors.lay_out(flat.tensors, flat.metadata, reserve=edits.reserve)
        return casts.checked(pieces, root) if verify and decoded.has_checksums else pieces
    if decoded.container in ("safetensors", "sharded", "dcp"):
        known = {safetensors.ALIASES, safetensors.STATE_DICT_METADATA, "format", *edits.ties}
        lost = [key for key in decoded.metadata if key not in known]
        report.dropped += [(key, "text beside the tensors; a .pth has no place for it") for key in lost]
    verify = verify and decoded.has_checksums
    if edits.kind == "pth-legacy":
        from ckpt_tools.containers import torch_legacy

        pieces = torch_legacy.lay_out(root)
    else:
        folder, trust_crc = decoded.root_folder, decoded.has_checksums
        pieces = torch_zip_layout.lay_out(root, folder=folder, trust_crc=trust_crc, verify=verify, compact=edits.compact)
    return casts.checked(pieces, root) if verify else pieces
