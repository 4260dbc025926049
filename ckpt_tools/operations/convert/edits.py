"""The edits of `convert`: from the tree that was read to the tree that is to be written, step by step. Moves no byte."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.edit.account import Account, tensors_in
from ckpt_tools.edit.objects.known import is_known, tensor_attributes
from ckpt_tools.errors import ConvertError, NothingMatchedError, ObjectsError, UsageError
from ckpt_tools.formats.base import PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import (
    find_optimizers,
    find_state_dicts,
    find_tensors,
    is_tensor,
    tensors_by_name,
    tensors_outside,
)
from ckpt_tools.operations.convert.inputs import begin
from ckpt_tools.operations.convert.names import Names
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted, Note
from ckpt_tools.text import dotted, listed, some
from ckpt_tools.tree.dtypes import CAST_TARGETS, DTYPES
from ckpt_tools.tree.modules import is_lightning
from ckpt_tools.tree.nodes import Dict, Global, Node, Object
from ckpt_tools.tree.output_names import FLAT
from ckpt_tools.tree.visit import reachable

_CALLED = {"pth": "a .pth", "pth-legacy": "a .pth", "dcp": "a distributed checkpoint"}

if TYPE_CHECKING:
    from ckpt_tools.edit.casts import Casting
    from ckpt_tools.fit.retarget import Retargeting
    from ckpt_tools.tree.parametrized import Parametrized


@dataclass(slots=True, eq=False)
class Edited:
    """A tree as it is to be written."""

    root: Node
    ties: Mapping[str, str]
    casting: Casting | None


class Edits:
    """What the options do to a checkpoint: checked when this is made, done once, by `apply`."""

    def __init__(self, options: ConvertOptions, kind: str = "pth") -> None:
        if options.quantises and kind != "gguf":
            raise UsageError("`dtype='q8_0'` is for a GGUF; name OUT .gguf, or give `format='gguf'`.")
        self.texts = options.metadata_texts
        if self.texts and kind not in FLAT and not (kind == "pth" and options.shard_size):
            what = f"`set_metadata` is for a safetensors header and an index of shards; {_CALLED[kind]} has no metadata."
            raise UsageError(what, fix="Name OUT .safetensors or .gguf.")
        if options.under is not None and kind in FLAT:
            raise UsageError("`under` is for a .pth or a distributed checkpoint: this format holds one flat state dict.")
        self.options, self.kind, self.account = options, kind, Account()
        self.names = Names(options, fitted=bool(options.targeted))
        self.retag, self.retargeting = None, None
        location = options.map_location
        if isinstance(location, Mapping):
            location = ",".join(f"{tag}={device}" for tag, device in location.items()) or None
        self.map_location = None if location is None else str(location)  # a device, or `from=to` pairs with commas between
        if self.map_location is not None:
            from ckpt_tools.edit.casts import parse_map_location

            self.retag = parse_map_location(self.map_location)
        if options.targeted:  # what does the work is imported then
            from ckpt_tools.fit.retarget import Retargeting

            self.retargeting = Retargeting(options)

    def _tell_danger(self, checkpoint: Checkpoint, root: Node, report: Converted) -> None:
        """That the input is dangerous, and what that means for what is written; most are known not to be."""
        if checkpoint.is_examined and checkpoint.packed is None:
            return
        from ckpt_tools.operations.safety import danger_in, danger_note

        if not (danger := danger_in(checkpoint, str(checkpoint.path))):
            return
        keeps_objects = self.options.objects == "keep" and self.kind in ("pth", "pth-legacy")
        code, text = danger_note(danger, root, keeps_objects=keeps_objects)
        if code == "dangerous" and not self.options.allow_dangerous:
            fix = "Without its objects: `objects='plain'`. With `allow_dangerous=True` OUT is as dangerous as IN."
            raise ObjectsError(danger, why="What is written would keep its objects.", fix=fix)
        report.note(code, text)

    def apply(self, checkpoint: Checkpoint, report: Converted, stack: ExitStack) -> Edited:
        """Edit the tree and tell the report; `stack` gets what must stay open until the bytes are written."""
        options, account = self.options, self.account
        ties = begin(checkpoint, report, options, self.kind)
        report.dropped += [(key, f"`set_metadata='{key}='`") for key, text in self.texts if not text]
        if found := [repr(key) for key, text in self.texts if text]:
            report.note("metadata-set", f"Metadata: {listed(found)} set.")
        root, used = self._opened(checkpoint, report)
        report.dropped += checkpoint.lost.items()
        if self.kind in FLAT and any(name.module.startswith("numpy") for name in checkpoint.globals):
            from ckpt_tools.edit.objects.plain import arrays_as_tensors

            root, fates = arrays_as_tensors(root)  # it holds nothing else of them
            report.objects += fates
        root = self._filtered(root, used, report)
        if checkpoint.byteorder != "little":
            from ckpt_tools.edit.casts import to_little_endian

            root = to_little_endian(root, checkpoint.byteorder)
        plain = self._dequantised(root, checkpoint, report)
        root = self._merged(root, report, stack)
        self.names.apply(root, report)
        self._complete(root, checkpoint, report, stack)
        if self.retargeting is not None:
            _fit(root, self.retargeting, report, stack, checkpoint, account)
        root, casting = self._cast(self._retagged(root, checkpoint, report), report, plain)
        if self.kind in (*FLAT, "dcp"):
            _leave_attributes(root, self.kind, options.objects, report)
        self._tell_danger(checkpoint, root, report)
        left_out = {path for path, _ in report.dropped}
        left_out |= {dotted(tuple(fate.where)) for fate in report.objects if fate.became == "dropped"}
        report.tensors = account.close(root, left_out)
        had_tensors = account.had_tensors or bool(checkpoint.tensors)
        if not report.tensors and (had_tensors or checkpoint.container in PROGRAMS):
            frozen = not had_tensors
            why = "The weights of a frozen program are constants of its code, and no state dict holds them." if frozen else ""
            raise NothingMatchedError("No tensor would be left.", why=why)
        if options.under is not None:
            root = _under(options.under, root)
        elif self.kind == "safetensors":
            root = _with_settings(root, checkpoint.root, report)
        return Edited(root, ties, casting)

    def _opened(self, checkpoint: Checkpoint, report: Converted) -> tuple[Node, frozenset[str]]:
        """What `_narrow` leaves of what is selected; the account begins with that, and with --ema behind it: all else goes."""
        root, options = checkpoint.root, self.options
        if options.select is not None:
            from ckpt_tools.edit.selection import select_in

            root = select_in(checkpoint, options.select)
        if not (options.moves_tensors or options.objects or self.retargeting):
            self.account.open_whole(root)
        elif not options.ema:
            self.account.open(report.source, root)
        root, used = self._narrow(root, checkpoint, report)
        if options.ema:
            self.account.open(report.source, root)
        return root, used

    def _merged(self, root: Node, report: Converted, stack: ExitStack) -> Node:
        if self.options.fold:
            from ckpt_tools.edit.parametrized import fold_all

            _note_folded(fold_all(root), root, report)
        return merge(root, self.options.adapters, report, stack, self.account) if self.options.lora else root

    def _complete(self, root: Node, checkpoint: Checkpoint, report: Converted, stack: ExitStack) -> None:
        """What IN lacks, and what config.json says is one."""
        if self.options.fill_from is not None:
            _fill(root, self.options.fill_from, report, stack, self.account)
        if not self.options.tie:
            return
        from ckpt_tools.edit.selection import only_state_dict
        from ckpt_tools.fit.filling import tie
        from ckpt_tools.fit.values import Config

        gone = tie(only_state_dict(root, report.source), Config.beside(report.source, checkpoint.root))
        self.account.leave_out(node for _, _, node in gone)
        report.notes += [Note("tied", f"{name!r} is tied to {other!r}: they are equal.") for name, other, _ in gone]

    def _filtered(self, root: Node, used: frozenset[str], report: Converted) -> Node:
        """What --keep and --drop leave; with --slim on storages of its own size."""
        if self.options.keep or self.options.drop:
            self._filter(root, used, report)
        if self.options.slim:
            from ckpt_tools.edit.slimming import compact

            root, report.compacted, report.saved = compact(root, verify=self.kind != "pth" and not self.options.no_verify)
        return root

    def _filter(self, root: Node, used: frozenset[str], report: Converted) -> None:
        from ckpt_tools.edit.selection import filter_tensors

        before = tensors_in(root)
        gone = filter_tensors(root, self.options.keep, self.options.drop, used)
        self.account.leave_at(before, gone)
        report.dropped += [(dotted(where), "`keep` / `drop`") for where in gone]
        # --keep is about the names of state dicts: say what stays because it has no such name
        if self.options.keep and (outside := tensors_outside(root, find_state_dicts(root))):
            shown = listed([dotted(tensor.where) for tensor in outside], 1)
            report.note("outside-kept", f"`keep`: everything outside state dicts stays, {shown}; `drop` takes it by path.")

    def _retagged(self, root: Node, checkpoint: Checkpoint, report: Converted) -> Node:
        if self.retag is None:
            return root
        from ckpt_tools.edit.casts import map_devices

        root, report.devices = map_devices(root, self.retag)
        if "safetensors" in (checkpoint.container, report.container):
            report.note("no-device-tags", "safetensors has no device tags, so `map_location` changes nothing in it.")
        elif not report.devices:
            report.note("devices-unchanged", f"`map_location={self.map_location!r}`: no storage had to change.")
        return root

    def _dequantised(self, root: Node, checkpoint: Checkpoint, report: Converted) -> Casting | None:
        """Make quantised weights plain, and tell; what counts the values that their rounding loses."""
        if self.options.dequantize is None:
            return None
        if self.options.objects in ("plain", "drop") and any(map(_is_of_torchao, checkpoint.globals)):
            raise ConvertError(
                f"{checkpoint.path} has weights of torchao, and `objects` comes before `dequantize`.",
                fix="In two steps: `dequantize` with `objects='keep'`, then `objects`.",
            )
        from ckpt_tools.edit.casts import Casting
        from ckpt_tools.edit.quantised.config import plain_metadata, read_config
        from ckpt_tools.edit.quantised.dequantising import dequantise

        target = DTYPES[CAST_TARGETS[self.options.dequantize]]
        before = tensors_in(root)
        done = dequantise(root, target, read_config(checkpoint))
        if (kept := plain_metadata(checkpoint.metadata)) != checkpoint.metadata:
            checkpoint.metadata = kept
            report.note("config-quantization", "The metadata no longer says how weights were quantised.")
        if self._read_by_dequantize(checkpoint):
            from ckpt_tools.operations.convert import object_policy

            object_policy.check_plain(root, checkpoint)
        report.dequantised = {f"{scheme} -> {target.name}": count for scheme, count in Counter(done.tensors.values()).items()}
        self.account.leave_at(before, (where for where, _ in done.left_out))
        report.dropped += [(dotted(where), why) for where, why in done.left_out]
        return Casting(counts=list(done.counts.items()))

    def _read_by_dequantize(self, checkpoint: Checkpoint) -> frozenset[str]:
        """The classes of quantised tensors that `dequantize` makes plain, where nothing else is said of objects."""
        if self.options.dequantize is None or self.options.objects is not None:
            return frozenset()
        return frozenset(str(name) for name in checkpoint.globals if _is_of_torchao(name))

    def _cast(self, root: Node, report: Converted, before: Casting | None) -> tuple[Node, Casting | None]:
        """Cast floats, and tell; `before` counts what was lost already."""
        targets = {glob: DTYPES[name] for glob, name in self.options.cast_to.items() if name != "q8_0"}
        if not targets:
            return root, before
        from ckpt_tools.edit.casts import cast_floats

        root, casting = cast_floats(root, targets.pop("", None), targets)
        casting.counts += before.counts if before is not None else []
        report.casts = casting.moves
        if casting.steps:
            glob = f"*.step={next(iter(self.options.cast_to.values()))}"
            text = f"{casting.steps} step counters of optimizers keep their dtype; `dtype={glob!r}` casts them."
            report.note("steps-kept", text)
        if casting.parts:
            text = f"{casting.parts} parts of quantised weights keep their dtype; `dequantize='bf16'` makes plain ones of them."
            report.note("quantised-kept", text)
        if casting.unusual:
            text = f"{listed(casting.unusual, 3)}: sparse, nested, meta and subclassed tensors keep their dtype."
            report.note("unusual-kept", text)
        return root, casting

    def _narrow(self, root: Node, checkpoint: Checkpoint, report: Converted) -> tuple[Node, frozenset[str]]:
        """Objects as --objects says; the averaged weights, or state dicts and values, on storages of their own size."""
        options = self.options
        is_plain = checkpoint.container not in PROGRAMS and not checkpoint.unusual and all(map(is_known, checkpoint.globals))
        if is_plain and not (options.objects or options.slim or options.ema):
            return root, frozenset()
        from ckpt_tools.operations.convert import object_policy

        chosen, done = options.objects is None and (options.slim or options.ema), frozenset[str]()
        if chosen:
            root, done = object_policy.weights_alone(root, checkpoint, options.drop, report, ema=options.ema, slim=options.slim)
        objects = "plain" if options.slim and options.objects is None else options.objects
        selected = options.select is not None or (chosen and options.ema)  # what lies elsewhere does not come along
        root, used = object_policy.apply_objects(root, checkpoint, objects, report, selected=selected, drop=options.drop,
                                                 read=self._read_by_dequantize(checkpoint))  # fmt: skip
        if options.ema and not chosen:
            root, _ = object_policy.averaged_alone(root, report)
        return self._slimmed(root, report) if options.slim else root, done | used

    def _slimmed(self, root: Node, report: Converted) -> Node:
        from ckpt_tools.edit.slimming import slim

        before = tensors_in(root)
        root, gone = slim(root)
        self.account.leave_at(before, (where for where, _ in gone))
        report.dropped += [(dotted(where), what) for where, what in gone]
        return root


def _is_of_torchao(name: Global) -> bool:
    return name.module.split(".")[0] == "torchao"


def _with_settings(root: Node, whole: Node, report: Converted) -> Node:
    """The state dict of a run that Lightning saved, and beside it what its module was made with, which becomes text."""
    found = whole.get(_SETTINGS) if type(whole) is Dict and is_lightning(whole) and root is not whole else None
    if found is None or [state_dict.where for state_dict in find_state_dicts(root)] != [()]:
        return root
    if any(type(node) is Object or type(node) is Global or is_tensor(node) for node in reachable(found)):
        report.note("settings-left", f"{_SETTINGS!r} are not plain values, so they do not come along as text.")
        return root
    return Dict([("state_dict", root), (_SETTINGS, found)])


_SETTINGS = "hyper_parameters"


def _under(key: str, root: Node) -> Node:
    found = [state_dict.where for state_dict in find_state_dicts(root)]
    if found != [()]:
        there = f"The state dicts are {listed([repr(dotted(where)) for where in found])}." if found else "There is none."
        fix = "`select` makes one of them the whole output." if found else ""
        raise UsageError(f"`under={key!r}` is for a bare state dict, which the input is not.", why=there, fix=fix)
    return Dict([(key, root)])


def _fit(
    root: Node, retargeting: Retargeting, report: Converted, stack: ExitStack, whole: Checkpoint, account: Account
) -> None:  # fmt: skip
    """Fit the state dict to the target; what is then left out was chosen, or is an error of the fit."""
    from ckpt_tools.fit.retarget import note_optimizer

    before = {name: node for state_dict in find_state_dicts(root) for name, node in tensors_by_name(state_dict.node).items()}
    report.fitted, renamed = retargeting.apply(root, report.source, stack, whole)
    _note_folded(retargeting.folded, root, report)
    report.optimizer_names += renamed
    report.dropped += [(name, "`on_mismatch='skip'`") for name in report.fitted.skipped]
    report.dropped += list(report.fitted.dropped.items())
    account.leave_out(before[name] for name in retargeting.left_out if name in before)
    if text := note_optimizer(root, report.fitted):
        report.note("optimizer-of-old-tensors", text)


def _fill(root: Node, path: str | os.PathLike[str], report: Converted, stack: ExitStack, account: Account) -> None:
    """Fill the one state dict with what another checkpoint has more."""
    from ckpt_tools.edit.selection import only_state_dict
    from ckpt_tools.fit.filling import opened, said_to_stay

    node = only_state_dict(root, report.source)
    filling = stack.enter_context(opened(path, root))
    alone = filling.fill(node)
    report.filled = filling.filled
    account.open(filling.path, Dict([*filling.taken.items()]))
    if alone:
        report.note("only-in-input", said_to_stay(alone, filling.path))


def _note_folded(rows: Sequence[Parametrized], root: Node, report: Converted) -> None:
    if rows:
        from ckpt_tools.edit.parametrized import told_fold

        report.notes += [Note(code, text) for code, text in told_fold(rows)]
        _note_optimizer(root, "the parts of the weights", report)


def _leave_attributes(root: Node, container: str, policy: str | None, report: Converted) -> None:
    """Tell which attributes of tensors a container without a place for them leaves out."""
    found = tensor_attributes(root)
    lost = [dotted(where) for where, value in found.items() if next(find_tensors(value), None) is not None]
    if lost and policy != "drop":
        raise ConvertError(
            f"{container} cannot store attributes of tensors, and {some(lost)} contain tensors.",
            fix="Leave them out with `objects='drop'`, or write a .pth, which keeps them.",
        )
    report.dropped += [(dotted(where), f"an attribute of a tensor; {container} cannot store it") for where in found]


def merge(
    root: Node, adapters: Sequence[tuple[str | os.PathLike[str], float]], report: Converted, stack: ExitStack, account: Account
) -> Node:
    """Merge adapters one after the other, and tell; `stack` keeps them open until the bytes are written."""
    from ckpt_tools.edit.lora.adapter import opened
    from ckpt_tools.edit.lora.planning import Merging, Planning
    from ckpt_tools.edit.selection import only_state_dict

    merging = Merging(root, only_state_dict(root, report.source), report.source)
    for path, weight in adapters:
        adapter = stack.enter_context(opened(path))
        report.merged.append(Planning(merging, adapter, str(path), weight).run())
        account.open(str(path), Dict([*adapter.tensors.items()]))
        account.leave_out(node for name, node in adapter.tensors.items() if name.endswith(".alpha"))
        if weight != 1 and (whole := report.merged[-1].saved + report.merged[-1].added):
            text = f"{path} holds {len(whole)} tensors whole; its weight of {weight:g} does not count for them."
            report.note("saved-whole", text)
    report.notes += [Note(code, text) for code, text in merging.notes]
    account.leave_out(merging.taken_in)
    root = merging.apply()
    _note_optimizer(root, "the weights as they were", report)
    return root


def _note_optimizer(root: Node, old: str, report: Converted) -> None:
    if (state := next((dotted(where) for where, _ in find_optimizers(root)), None)) is not None:
        text = f"The state in {state} belongs to {old}; leave it out: `drop={state!r}`"
        report.note("optimizer-of-old-tensors", text)
