"""Several slices of a DeepSpeed checkpoint as one model: tensor parallel ranks, or the stages of a pipeline.

Stages have other weights each, and the tied ones alike. How tensor parallel ranks were cut, a checkpoint says that can become a
universal one: `universal_checkpoint_info` in the model file, patterns of names by their kinds.

Source: deepspeed/checkpoint/ds_to_universal.py (`merge_tp_slices`), deepspeed/checkpoint/constants.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

from ckpt_tools.errors import PartError
from ckpt_tools.formats.parts.merging import Merger, along
from ckpt_tools.formats.parts.zero_slice import NamedState, Slice
from ckpt_tools.formats.sharded import Keys
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Pair

_SWIGLU, _ROWS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_row_parallelism_patterns"
_WHOLE = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
Held = Sequence[tuple[int, Node]]


class Rules:
    """How tensor parallel ranks are joined, by `universal_checkpoint_info`. It speaks of parameters; buffers are whole."""

    def __init__(self, info: Dict, buffers: AbstractSet[str]) -> None:
        self.buffers = buffers
        self.whole = Patterns([pattern for key in _WHOLE for pattern in _texts(info.get(key))])
        self.swiglu, self.rows = Patterns(_texts(info.get(_SWIGLU))), Patterns(_texts(info.get(_ROWS)))
        several = info.get("parameter_with_sub_params")
        rows = several.items if type(several) is List else []
        self.refused = Patterns([
            *(pattern for row in rows if type(row) is Dict for pattern in _texts(row.get("patterns"))),
            *_texts(info.get("autotp_unsupported_parameter_patterns")),
        ])  # fmt: skip

    def join(self, merger: Merger, name: str, held: Sequence[tuple[int, Entry]]) -> Entry:
        """One tensor of what each slice has of it."""
        if self.refused.fit(name):
            raise PartError(
                f"{name!r} is several matrices in one, cut among tensor parallel ranks in a way that is not read.", rest=True
            )
        if name in self.buffers or self.whole.fit(name) or not held[0][1].shape:
            return merger.replicated(name, held)
        pieces = 2 if self.swiglu.fit(name) else 1
        return along(merger, name, 1 if self.rows.fit(name) else 0, [held], pieces=pieces)


def _texts(node: Node) -> list[str]:
    """The texts of a list, or the keys of a dict."""
    found = node.items if type(node) is List else [key for key, _ in node.items] if type(node) is Dict else node
    return [text for text in (found if isinstance(found, (list, tuple)) else ()) if type(text) is str]


class Slices:
    """Several slices on their way into one model. `rules`: of tensor parallel ranks; None for the stages of a pipeline."""

    def __init__(
        self, slices: Mapping[int, Slice], keys: Keys, rules: Rules | None, module: Dict | None, *, partial: bool
    ) -> None:
        self.slices, self.rules, self.layers, self.partial = slices, rules, module, partial
        self.merger = Merger(keys, {number: f"mp_rank_{number:02d}" for number in slices})
        self.lost = dict[str, str]()

    @cached_property
    def weights(self) -> Dict:
        """The state dict of the fp32 weights, with buffers and frozen weights as they are; in the model's order."""
        if not self.partial:
            self._check_layers()
        found = self._joined({number: own.weights for number, own in self.slices.items()})
        for own in self.slices.values():
            self.lost.update({name: why for name, why in own.lost.items() if name not in found})
        layers = self.layers.named if self.layers is not None else {}
        rest = {name: value for name, value in layers.items() if name not in self.lost}
        order = dict.fromkeys((*rest, *found))
        return Dict([(name, found[name] if name in found else rest[name]) for name in order], ordered=True)

    def _check_layers(self) -> None:
        """Each layer with weights in the optimizer has its file: what is frozen, and buffers, are in there alone."""
        there = {name.partition(".")[0] for name in self.layers.named} if self.layers is not None else set()
        names = [name for own in self.slices.values() for shapes in own.model.shapes for name in shapes]
        numbers = dict.fromkeys(number for name in names if (number := name.partition(".")[0]).isdecimal())
        if self.layers is not None and (missing := [number for number in numbers if number not in there]):
            raise PartError(
                f"Layers have no file: {listed([f'layer_{int(number):02d}-model_states.pt' for number in missing])}.",
                why="Frozen weights and buffers of a pipeline are in there alone.", fix="Get the files of all layers.",
                rest=True,
            )  # fmt: skip

    def module(self) -> Dict:
        """The weights as they were trained with."""
        if self.layers is None:
            found = self._joined({number: own.module() for number, own in self.slices.items()})
            self.merger.check_replicas()
            return Dict(list(found.items()), ordered=True)
        there = self.layers.named
        if missing := [name for name in self.weights.named if name not in there]:
            raise PartError(f"No file layer_*-model_states.pt has {listed(missing)}.", fix="Get the files of all layers.")
        return self.layers

    def optimizer(self) -> NamedState:
        """The optimizer's state by the parameters' names; the rest as the first slice has it."""
        every = {number: own.optimizer() for number, own in self.slices.items()}
        found: dict[str, dict[int, Dict]] = {}
        for number, own in every.items():
            for name, values in own.state.items():
                found.setdefault(name, {})[number] = values
        made = {name: self._state(name, held) for name, held in found.items()}
        self.merger.check_replicas()
        groups = []
        for at, (said, _) in enumerate(next(iter(every.values())).groups):
            names = dict.fromkeys(name for own in every.values() for _, params in own.groups[at : at + 1] for name in params)
            groups.append((said, list(names)))
        return NamedState(made, groups)

    def check_evidence(self) -> None:
        """What the bytes say against the names of the files."""
        for own in self.slices.values():
            own.check_evidence(self.layers.named if self.layers is not None else None)

    def differing_buffers(self) -> list[str]:
        """What each slice says of its own; and what several slices have whole is compared."""
        found = [name for own in self.slices.values() for name in own.differing_buffers()]
        self.merger.check_replicas()
        return found

    def _state(self, name: str, held: Mapping[int, Dict]) -> Dict:
        """The optimizer's state of one parameter: what has its shape is joined as it is."""
        (first, *_) = held.values()
        rows = list[Pair]()
        for key, value in first.items:
            own = [(number, values.get(key)) for number, values in held.items()] if type(key) is str else []
            is_cut = type(value) is Entry and value.shape and own and all(type(entry) is Entry for _, entry in own)
            rows.append((key, self._one(name, own) if is_cut else value))
        return Dict(rows)

    def _joined(self, roots: Mapping[int, Dict]) -> dict[str, Node]:
        every: dict[str, list[tuple[int, Node]]] = {}
        for number, root in roots.items():
            for name, value in root.named.items():
                every.setdefault(name, []).append((number, value))
        made: dict[str, Node] = {}
        for name, held in every.items():
            try:
                made[name] = self._one(name, held)
            except PartError as error:
                if not (self.partial and error.rest):
                    raise
                self.lost[name] = error.what.removeprefix(f"{name!r} ").rstrip(".")
        return made

    def _one(self, name: str, held: Held) -> Node:
        """One tensor, or value, of what the slices have under a name."""
        if len(held) == 1 and self.rules is None:
            return held[0][1]
        entries = [(number, entry) for number, entry in held if type(entry) is Entry]
        if self.rules is not None and len(held) < len(self.slices):
            lacking = [f"mp_rank_{number:02d}" for number in self.slices if number not in dict(held)]
            raise PartError(f"{name!r} is not whole: {listed(lacking)} do not have it.", rest=True)
        if not entries:
            return held[0][1]
        if len(entries) < len(held):
            raise PartError(f"{name!r} is a tensor in some slices, and something else in others.", rest=True)
        return self.merger.replicated(name, entries) if self.rules is None else self.rules.join(self.merger, name, entries)


_MOST = 256  # patterns with something else than characters in them
_PLAIN = frozenset("_-/:,@ ")

Token = tuple[str, bool]  # a character, "any" or "digit"; whether it may come any number of times


class Patterns:
    """Patterns of one list."""

    def __init__(self, patterns: Sequence[str]) -> None:
        parsed = [_parsed(pattern) for pattern in patterns]
        self.exact = {"".join(kind for kind, _ in tokens) for tokens, to_end in parsed if to_end and _is_text(tokens)}
        self.others = [row for row in parsed if not (row[1] and _is_text(row[0]))]
        if len(self.others) > _MOST:
            raise PartError(f"universal_checkpoint_info has {len(self.others)} patterns of names in one list.")

    def fit(self, name: str) -> bool:
        """Whether one of them fits the name."""
        return name in self.exact or any(_fits(tokens, to_end, name) for tokens, to_end in self.others)


def _is_text(tokens: Sequence[Token]) -> bool:
    return all(len(kind) == 1 and not repeated for kind, repeated in tokens)


def _parsed(pattern: str) -> tuple[list[Token], bool]:
    """The tokens of a pattern, and whether the name ends where it ends."""
    text = pattern.removeprefix("^")
    to_end = text.endswith("$") and not text.endswith("\\$")
    text = text.removesuffix("$") if to_end else text
    tokens, at = list[Token](), 0
    while at < len(text):
        kind, at = _kind(pattern, text, at)
        tokens.append((kind, False))
        if text[at : at + 1] in ("+", "*"):
            tokens[-1:] = [(kind, True)] if text[at] == "*" else [(kind, False), (kind, True)]
            at += 1
    return tokens, to_end


def _kind(pattern: str, text: str, at: int) -> tuple[str, int]:
    """What a pattern says at a place, and where the next begins."""
    character, after = text[at], text[at + 1 : at + 2]
    if character == "." or character.isalnum() or character in _PLAIN:
        return ("any" if character == "." else character), at + 1
    if character == "\\" and after and (after == "d" or not after.isalnum()):
        return ("digit" if after == "d" else after), at + 2
    raise PartError(f"universal_checkpoint_info tells names by the pattern {pattern[:100]!r}, which is not read.")


def _fits(tokens: Sequence[Token], to_end: bool, name: str) -> bool:
    """All places in the pattern that the name so far may have led to, at once."""
    places = _with_skipped({0}, tokens)
    for character in name:
        if not to_end and len(tokens) in places:
            return True
        places = _with_skipped({
            at if tokens[at][1] else at + 1 for at in places if at < len(tokens) and _takes(tokens[at][0], character)
        }, tokens)  # fmt: skip
        if not places:
            return False
    return len(tokens) in places


def _takes(kind: str, character: str) -> bool:
    return kind == character or kind == "any" or (kind == "digit" and character.isdigit())


def _with_skipped(places: set[int], tokens: Sequence[Token]) -> set[int]:
    found = set(places)
    for at in places:
        while at < len(tokens) and tokens[at][1]:
            at += 1
            found.add(at)
    return found
