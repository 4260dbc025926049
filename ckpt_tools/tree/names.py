"""Dotted tensor names and the wrapper prefixes that training puts in front of them. Pure functions.

`nn.DataParallel` and `DistributedDataParallel` register the model as `module`, `torch.compile` as `_orig_mod`, FSDP1 as
`_fsdp_wrapped_module`, activation checkpointing as `_checkpoint_wrapped_module`, Lightning as `_forward_module`, Opacus'
GradSampleModule as `_module`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError

MODULE = "module."
# Names that no user gives an attribute: safe to remove at any depth. "module" is not one of them: real models have a
# sub-module of that name (model.norm1.module.weight), so it is only removed where it leads.
INNER_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")
# Nor is "_module": AllenNLP's TimeDistributed calls what it holds so.
LEADING_WRAPPERS = (MODULE, "_module.")
WRAPPERS = (*LEADING_WRAPPERS, *INNER_WRAPPERS)
_WRAPPER = re.compile("|".join(map(re.escape, WRAPPERS)))
_ALL_LEAD = re.compile(f"(?:{_WRAPPER.pattern})+(?=.)", re.DOTALL)
_LEAD = re.compile(f"(?:{'|'.join(map(re.escape, LEADING_WRAPPERS))})+(?=.)", re.DOTALL)
Row = TypeVar("Row")
_INNER_PARTS = frozenset(wrapper[:-1] for wrapper in INNER_WRAPPERS)


def wrapped_part(names: Sequence[str]) -> str | None:
    """The part of a model that DataParallel seems to have wrapped alone: "features" of features.module.0.weight."""
    parts: dict[str, list[str]] = {}
    for name in names if any(f".{MODULE}" in name for name in names) else ():
        part, _, rest = name.partition(".")
        parts.setdefault(part, []).append(rest)
    for part, below in parts.items():
        if all(rest.startswith(MODULE) for rest in below) and any("." in rest[len(MODULE) :] for rest in below):
            return part
    return None


def unwrapping(part: str) -> str:
    r"""The rule for `rename` that takes the wrapper of one part out."""
    return rf"^{re.escape(part)}\.module\.={part}."


def strip_prefix(name: str, prefix: str) -> str:
    """Remove `prefix` from the front of `name`, once; a name that is nothing else stays as it is."""
    return name.removeprefix(prefix) or name


def strip_module(name: str) -> str:
    """Remove leading `module.`, repeated ones too."""
    while len(name) > len(MODULE) and name.startswith(MODULE):
        name = name[len(MODULE) :]
    return name


def split_by_module(names: Sequence[str]) -> str | None:
    """A module that `module.` splits in two: some of its tensors have the prefix, others have not."""
    if sum(name.startswith(MODULE) for name in names) in (0, len(names)):
        return None
    wrapped, bare = set[str](), set[str]()
    for name in names:
        (wrapped if name.startswith(MODULE) else bare).add(strip_module(name).rpartition(".")[0])
    return min(wrapped & bare - {""}, default=None)


def uneven(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names of which one starts with more `module.` than the other: what is left of the longer may be the user's own."""
    inside = [name for name in names if name.startswith(MODULE)]
    if not any(name.startswith(MODULE * 2) for name in inside):
        return None
    depths = {(len(name) - len(strip_module(name))) // len(MODULE): name for name in inside}
    depths.pop(0, None)
    return (depths[min(depths)], depths[max(depths)]) if len(depths) > 1 else None


def strip_inner(name: str) -> str:
    """Remove the wrappers that no user gives an attribute (all but `module.`), at any depth."""
    if "._" not in name and not name.startswith("_"):  # as most names; each of these wrappers begins with an underscore
        return name
    *modules, leaf = name.split(".")
    return ".".join([part for part in modules if part not in _INNER_PARTS] + [leaf])


def unwrap(name: str) -> str:
    """Remove every known wrapper, in any order; `module.` and `_module.` only where they lead.

    >>> unwrap("_orig_mod.module.layer1._checkpoint_wrapped_module.norm.module.weight")
    'layer1.norm.module.weight'
    """
    name = strip_inner(name)
    lead = _LEAD.match(name)
    return name[lead.end() :] if lead else name


def leading_wrappers(name: str) -> tuple[str, ...]:
    """The run of wrapper prefixes in front of `name`, in order."""
    lead = _ALL_LEAD.match(name)
    return tuple(_WRAPPER.findall(lead.group())) if lead else ()


def wrappers_in(names: Iterable[str]) -> tuple[str, ...]:
    """The wrappers around a model with these names, each once, in order of appearance."""
    found: dict[str, None] = {}
    leads: dict[str, tuple[str, ...]] = {"": ()}
    dotted: set[str] = set()  # leads of names with a dot
    for name in names:
        lead = _ALL_LEAD.match(name)
        text = lead.group() if lead is not None else ""
        if text not in leads:
            leads[text] = leading_wrappers(name)
            found.update(dict.fromkeys(leads[text]))
        if "." in name:
            dotted.add(text)
        if "._" in name:
            found.update(dict.fromkeys(w for w in INNER_WRAPPERS if f".{w}" in name))
    bare = {wrapper for wrapper in LEADING_WRAPPERS if any(wrapper not in leads[text] for text in dotted)}
    return tuple(wrapper for wrapper in found if wrapper not in bare)


def check_unique(renamed: Mapping[str, str]) -> None:
    """Raise ConvertError when two old names (the keys) get one new name (the values)."""
    if len(set(renamed.values())) == len(renamed):
        return
    first: dict[str, str] = {}
    for old, new in renamed.items():
        if new in first:
            raise ConvertError(
                f"{first[new]!r} and {old!r} would both be named {new!r}.",
                why="One of the two tensors would be lost.",
                fix="Rename one of them: `rename='REGEX=REPLACEMENT'`.",
            )
        first[new] = old


MOST_DOTS = 1000  # in the name of a tensor that is renamed: each module above it is looked at


def module_paths(renamed: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    """Where each module path (a key of a state dict's `_metadata`) goes when tensors are renamed."""
    moves: dict[str, set[str | None]] = {}
    for old, new in renamed.items():
        limits.check_depth(old.count("."), f"A tensor's name has {old.count('.')} dots.", MOST_DOTS)
        path, rest = "", old
        while True:
            moves.setdefault(path, set()).add(_moved(new, rest))
            head, dot, tail = rest.partition(".")
            if not dot:
                break
            path, rest = f"{path}.{head}" if path else head, tail
    result: dict[str, str] = {}
    taken: set[str] = set()
    for path in sorted(paths, key=lambda path: path.count(".") + bool(path), reverse=True):
        target = _target(path, moves)
        if target is not None and target not in taken:
            result[path] = target
            taken.add(target)
    return result


def move_metadata(
    renamed: Mapping[str, str], rows: list[tuple[str, Row]], new_root: Callable[[], Row]
) -> list[tuple[str, Row]]:
    """The rows of `_metadata` under their new module paths."""
    targets = module_paths(renamed, [path for path, _ in rows])
    moved = [(targets[path], row) for path, row in rows if path in targets]
    if "" not in targets.values() and any(path == "" for path, _ in rows):
        moved.insert(0, ("", new_root()))
    return moved


def _moved(new: str, rest: str) -> str | None:
    """The module path in front of `rest` in its new name; None when the modules within `rest` are no longer there."""
    inner, within = new.rpartition(".")[0], rest.rpartition(".")[0]
    if not within:
        return inner
    if inner == within:
        return ""
    return inner[: -len(within) - 1] if inner.endswith(f".{within}") else None


def _target(path: str, moves: Mapping[str, set[str | None]]) -> str | None:
    anchor, tail = path, ""
    while anchor and anchor not in moves:
        anchor, _, last = anchor.rpartition(".")
        tail = f"{last}.{tail}" if tail else last
    targets = moves.get(anchor, {anchor}) - {None}
    if len(targets) != 1:
        return "" if targets and not path else None
    (target,) = targets
    return f"{target}.{tail}" if target and tail else str(target) + tail


# What people call the attribute.
HOLDERS = frozenset((
    "model", "_model", "net", "_net", "network", "_network", "backbone", "base_model", "student", "teacher", "policy", "core",
))  # fmt: skip


@dataclass(slots=True, unsafe_hash=True)
class Prefix:
    """What names have in front of others."""

    text: str
    longer: list[str]
    shorter: list[str]


def between(names: Sequence[str], wanted: Sequence[str]) -> Prefix | None:
    """The prefix under which `names` has most of `wanted`; None where it has fewer than half of them under any."""
    there, shorts = frozenset(names), frozenset(wanted)
    dots = min(max((name.count(".") for name in shorts), default=0), MOST_DOTS)
    counts = Counter(name.removesuffix(short) for name in there for short in _ends(name, dots) if short in shorts)
    best = max(counts, key=lambda prefix: (counts[prefix], -len(prefix), prefix), default=None)
    if best is None or counts[best] * 2 < len(shorts):
        return None
    found = [short for short in wanted if best + short in there]
    return Prefix(best, [best + short for short in found], found)


def _ends(name: str, dots: int) -> Iterator[str]:
    """What a name has behind each of its dots, as far as there are so many dots in it at most."""
    at = name.rfind(".")
    while at >= 0 and dots >= 0:
        yield name[at + 1 :]
        at, dots = name.rfind(".", 0, at), dots - 1


def of_all(names: Sequence[str]) -> Prefix | None:
    """The first part that all names have, where it is what people call such an attribute."""
    part = names[0].partition(".")[0] if names else ""
    prefix = f"{part}."
    if len(names) < 2 or part not in HOLDERS:
        return None
    if not all(name.startswith(prefix) and len(name) > len(prefix) for name in names):
        return None
    return Prefix(prefix, list(names), [name.removeprefix(prefix) for name in names])
