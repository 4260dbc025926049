"""Findings about a checkpoint, made without reading a tensor; each with the command that fixes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

from ckpt_tools.edit.objects.known import is_known
from ckpt_tools.formats.base import PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.operations.loaders import Loads
from ckpt_tools.operations.safety import Safety
from ckpt_tools.parts.partition import Partition, without_advice
from ckpt_tools.parts.training import is_state_of_step
from ckpt_tools.pickling.weights_only import is_newer_dtype
from ckpt_tools.text import dotted, listed, printable
from ckpt_tools.tree.findings import Finding, may_be_of_several, mending
from ckpt_tools.tree.modules import is_lightning
from ckpt_tools.tree.names import MODULE, of_all, split_by_module, unwrapping, wrapped_part
from ckpt_tools.tree.nodes import Entry, Global, Object, Storage
from ckpt_tools.tree.parametrized import part_of, told
from ckpt_tools.tree.visit import walk

_DEAD_FROM = 1 << 20
_STRIP_MODULE, _UNWRAP = "--strip-module", "--unwrap"
_FOLD, _TO_CPU, _PLAIN = "--fold", "--map-location cpu", "--objects plain"


@dataclass(slots=True, eq=False, repr=False)
class Facts:
    """What findings are told from."""

    checkpoint: Checkpoint
    state_dicts: list[dict[str, Any]]
    totals: dict[str, Any]
    safety: Safety
    loads: Loads
    part: Partition | None
    adapter: dict[str, Any] | None = None

    @property
    def needed(self) -> str:
        """The option without which convert refuses the file, so that every command that is shown has it; or nothing."""
        return "" if all(map(is_known, self.checkpoint.globals)) else _PLAIN

    def fix(self, options: str = "") -> str:
        """The conversion with these options, and with what the file needs anyway."""
        every = " ".join(dict.fromkeys(filter(None, (options, self.needed))))
        return mending("convert", str(self.checkpoint.path), every)


# A finding, and the option that mends it together with others; "" for one that has its own way.
_Advised: TypeAlias = tuple[Finding, str]


def findings(facts: Facts) -> Iterator[Finding]:
    """What is worth knowing, dangers first; of a part before all that it is one."""
    path = facts.checkpoint.path
    is_state = is_state_of_step(path)
    found: Iterator[Finding] = chain(facts.safety.findings(str(path)), _findings(facts))
    if facts.part is not None:
        severity = "info" if is_state else "warning"
        yield Finding("partition", severity, [], facts.part.found, "whole tensors under their names", facts.part.fix)
        found = (finding for finding in without_advice(found) if finding.code != "together")
    yield from (of_training(finding) for finding in found) if is_state else found


def of_training(finding: Finding) -> Finding:
    """A finding about a file of a training's state: that its framework alone reads it is worth a note, and no more."""
    return replace(finding, severity="info", fix="") if finding.code in ("weights-only-refused", "not-importable") else finding


def _findings(facts: Facts) -> Iterator[Finding]:
    """Each finding, and last the command that mends several at once."""
    sources = (
        _alone, _lightning, _adapters, _wrappers, _mixed_prefixes, _wrapped_parts, _prefixes, _parametrized, _arrays, _devices,
        _big_endian, _oversized, _dead_bytes, _loading, _warnings, _tied_names,
    )  # fmt: skip
    options: dict[str, None] = {}
    for finding, option in chain.from_iterable(source(facts) for source in sources):
        yield finding
        options[option] = None
    options.pop("", None)
    if _UNWRAP in options:  # which does what --strip-module does
        options.pop(_STRIP_MODULE, None)
    if len(options) > 1:
        fix = mending("convert", str(facts.checkpoint.path), " ".join(options))
        yield Finding("together", "info", [], "one command fixes all of this", "", fix)


def _alone(facts: Facts) -> Iterator[_Advised]:
    if may_be_of_several(facts.checkpoint.path.name):
        from ckpt_tools.operations.in_folders import alone

        if (finding := alone(facts.checkpoint)) is not None:
            yield finding, ""


def _lightning(facts: Facts) -> Iterator[_Advised]:
    """How the weights come out of a run that Lightning saved, under the names of the network inside of its module."""
    weights = next((found for found in facts.checkpoint.state_dicts if found.where == ("state_dict",)), None)
    if not is_lightning(facts.checkpoint.root) or weights is None:
        return
    parts: dict[str, bool] = {}
    for name in weights.names:
        part, _, rest = name.partition(".")
        parts[part] = parts.get(part, False) or rest.rpartition(".")[2] in ("weight", "bias")
    inner = [part for part, has_weights in parts.items() if has_weights]
    names = f" --strip-prefix {shlex.quote(f'{inner[0]}.')}" if len(inner) == 1 else ""
    keep = f" --keep {shlex.quote(f'{inner[0]}.*')}" if names and len(parts) > 1 else ""
    expected = f"only the network {inner[0]!r}, by its own names" if names else "only the state dict"
    option = f"--select state_dict{keep}{names}"
    found = "a Lightning checkpoint with the weights in 'state_dict'"
    yield Finding("lightning-run", "info", [], found, expected, facts.fix(option)), option


def _wrappers(facts: Facts) -> Iterator[_Advised]:
    for row in facts.state_dicts:
        if row["wrappers"]:
            option = _STRIP_MODULE if row["wrappers"] == [MODULE] else _UNWRAP
            wrappers = ", ".join(map(repr, row["wrappers"]))
            found, expected = f"names start with {wrappers}", f"names without {wrappers}"
            yield Finding("wrapper-prefix", "warning", row["where"], found, expected, facts.fix(option)), option


def _mixed_prefixes(facts: Facts) -> Iterator[_Advised]:
    """State dicts of which some names have `module.`, others of the same module not."""
    for state_dict in facts.checkpoint.state_dicts:
        if (halved := split_by_module(state_dict.names)) is not None:
            found = f"some names start with 'module.', others do not: {halved!r} is split"
            fix = mending("repair", str(facts.checkpoint.path))
            yield Finding("mixed-prefix", "warning", list(state_dict.where), found, "all names with it, or none", fix), ""


def _wrapped_parts(facts: Facts) -> Iterator[_Advised]:
    """State dicts of models of which DataParallel wrapped one part, as PyTorch's ImageNet example does."""
    for state_dict, row in zip(facts.checkpoint.state_dicts, facts.state_dicts, strict=True):
        part = None if row["wrappers"] else wrapped_part(state_dict.names)
        if part is not None:
            found = f"every name below '{part}.' continues with 'module.': DataParallel wrapped that part of the model"
            expected = "names without 'module.', if your model does not wrap that part"
            fix = facts.fix(f"--rename {shlex.quote(unwrapping(part))}")
            yield Finding("inner-module", "info", list(state_dict.where), found, expected, fix), ""


def _has_its_base(names: Iterable[str]) -> bool:
    """Whether every weight that an adapter changes is in the same file, as where a whole PEFT model was saved."""
    from ckpt_tools.edit.lora.names import read_name

    parts = [read_name(name) for name in names]
    changed = {part.module for part in parts if part.role in ("down", "embedding_down")}
    return bool(changed) and changed <= {part.module for part in parts if part.role == "base"}


def _adapters(facts: Facts) -> Iterator[_Advised]:
    if facts.adapter is None:
        return
    found = f"an adapter ({facts.adapter['kind']}), not a whole model"
    if _has_its_base(facts.checkpoint.state_dicts[0].names):
        found = f"a PEFT model: an adapter ({facts.adapter['kind']}) and the weights that it changes"
        fix = "Merge it where it was trained: PEFT's merge_and_unload, then save_pretrained."
        yield Finding("adapter", "info", [], found, "weights with the adapter merged", fix), ""
    elif (problem := facts.adapter["problem"]) is not None:
        yield Finding("adapter", "warning", [], f"{found}; {problem}", "one that can be merged into its base"), ""
    else:
        fix = printable(f"ckpt convert BASE MERGED.safetensors --lora {shlex.quote(str(facts.checkpoint.path))}")
        yield Finding("adapter", "info", [], found, "its base with the adapter merged", fix), ""


def _prefixes(facts: Facts) -> Iterator[_Advised]:
    """State dicts of which every name starts with an attribute of a training module, as Lightning's do."""
    if facts.adapter is not None or is_lightning(facts.checkpoint.root):  # PEFT's own prefix
        return
    for state_dict, row in zip(facts.checkpoint.state_dicts, facts.state_dicts, strict=True):
        prefix = None if row["wrappers"] else of_all(state_dict.names)
        if prefix is not None:
            select = f" --select {shlex.quote(dotted(state_dict.where))}" if state_dict.where else ""
            fix = facts.fix(f"--strip-prefix {shlex.quote(prefix.text)}{select}")
            expected = "names without it, if your model has no such attribute"
            where, found = list(state_dict.where), f"every name starts with {prefix.text!r}"
            yield Finding("common-prefix", "info", where, found, expected, fix), ""


def _parametrized(facts: Facts) -> Iterator[_Advised]:
    """Weights that weight norm and its like keep in parts."""
    for state_dict in facts.checkpoint.state_dicts:
        if not any(map(part_of, state_dict.names)):
            continue
        from ckpt_tools.edit.parametrized import find

        if rows := find(state_dict.node):
            found, option = told(rows), _FOLD if all(row.kind for row in rows) else ""
            expected = "plain weights, if your model is built without it"
            fix = facts.fix(option) if option else ""
            yield Finding("parametrized", "info", list(state_dict.where), found, expected, fix), option


def _arrays(facts: Facts) -> Iterator[_Advised]:
    """Arrays of NumPy's that objects hold: they become tensors with the objects."""
    from ckpt_tools.edit.objects.values import as_array, is_array

    names = facts.checkpoint.globals
    if not any(map(is_array, names)) or all(map(is_known, names)):
        return
    inside: dict[int, int] = {}
    for _, node in walk(facts.checkpoint.root, plain=False, entries=False):
        if type(node) is Object and type(node.function) is Global and not is_known(node.function):
            for _, below in walk(node, plain=False, entries=False):
                if (array := as_array(below)) is not None:
                    inside[id(below)] = array.numel
    if inside:
        count = f"{len(inside)} array{'s' * (len(inside) != 1)} of numbers, {sum(inside.values()):,} elements,"
        found = f"{count} inside objects"
        yield (Finding("arrays-in-objects", "info", [], found, "plain tensors", facts.fix(_PLAIN)), "")


def _devices(facts: Facts) -> Iterator[_Advised]:
    devices = [device for device in facts.totals["devices"] if device not in ("cpu", "meta")]
    if devices:
        expected = "cpu, if your machine lacks that device"
        yield Finding("device-tags", "info", [], f"tensors are on {', '.join(devices)}", expected, facts.fix(_TO_CPU)), _TO_CPU


def _big_endian(facts: Facts) -> Iterator[_Advised]:
    if facts.checkpoint.byteorder == "big":
        yield Finding("big-endian", "info", [], "big-endian tensor bytes", "little-endian", facts.fix()), ""


def _oversized(facts: Facts) -> Iterator[_Advised]:
    """Storages of which the tensors use less than half, a megabyte or more in all."""
    used: dict[Storage, int] = {}
    for tensor in facts.checkpoint.tensors:
        if type(tensor.node) is Entry:
            storage = tensor.node.storage
            used[storage] = used.get(storage, 0) + tensor.node.nbytes
    wasted = sum(storage.nbytes - count for storage, count in used.items() if count * 2 < storage.nbytes)
    totals = facts.totals
    if wasted >= 1 << 20 or (wasted and wasted * 2 > totals["storage_bytes"]):
        found = f"the tensors use {totals['bytes']} of {totals['storage_bytes']} bytes of storage"
        expected = "no unused bytes (`slim` also drops optimizers and objects)"
        fix = mending("convert", str(facts.checkpoint.path), "--slim")
        yield Finding("oversized-storage", "info", [], found, expected, fix), ""


def _dead_bytes(facts: Facts) -> Iterator[_Advised]:
    dead_bytes, size = facts.checkpoint.dead_bytes, facts.checkpoint.file_bytes
    dead = dead_bytes() if dead_bytes is not None else 0
    kept = dead * 64 <= facts.totals["storage_bytes"]  # so small a gap may stay when the file is written anew
    if not kept and (dead >= _DEAD_FROM or (dead >= _DEAD_FROM >> 6 and dead * 10 > size)):
        found = f"{dead} of {size} bytes of the file are unused"
        yield Finding("dead-bytes", "info", [], found, "a file without gaps", facts.fix()), ""


def _loading(facts: Facts) -> Iterator[_Advised]:
    """What keeps torch.load, or safetensors, from loading it."""
    loads = facts.loads
    if loads.misnamed:
        yield Finding("misnamed", "warning", [], loads.misnamed, "a name that matches the format", facts.fix()), ""
    if newer := [name for name in loads.refused if is_newer_dtype(Global(*name.rsplit(".", 1)))]:
        found = f"it needs a newer PyTorch, for {listed(newer)}"
        yield Finding("newer-dtype", "warning", [], found, "dtypes that PyTorch 2.13 has"), ""
    others = [name for name in loads.refused if name not in newer]
    if others or (loads.is_refused and not newer):
        found = f"torch.load(weights_only=True) refuses it: {listed(others or loads.reasons)}"
        yield Finding("weights-only-refused", "warning", [], found, "only tensors and plain data", facts.fix(_PLAIN)), _PLAIN


def _tied_names(facts: Facts) -> Iterator[_Advised]:
    """Names that a safetensors file has in its metadata alone."""
    metadata = facts.checkpoint.metadata
    if facts.checkpoint.container != "safetensors" or not metadata:
        return

    from ckpt_tools.formats.safetensors import aliases_in

    if count := len(aliases_in(metadata)):
        names = "1 tied name is" if count == 1 else f"{count} tied names are"
        yield Finding("tied-names", "info", [], f"{names} only in the metadata; safetensors itself does not return them"), ""


def _warnings(facts: Facts) -> Iterator[_Advised]:
    """What the reader of the container had to say."""
    programs = {code for code, _ in PROGRAMS.values()}
    for warned in facts.checkpoint.warnings:
        fix = warned.fix or facts.fix(_PLAIN if warned.code in programs else "")
        if warned.code == "several-archives" and facts.checkpoint.path.suffix == ".distcp":
            from ckpt_tools.operations.in_folders import whole_folder

            fix = whole_folder(facts.checkpoint.path)
        yield Finding(warned.code, warned.severity, [], warned.found, warned.expected, fix), ""
