"""Adapters merged into a state dict: its weights become computed contents, which are worked out while they are written."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.edit.lora.adapter import Adapter
from ckpt_tools.edit.lora.planning import Base, Merged, Planning
from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.contents import find_tensors, tensors_by_name
from ckpt_tools.io.content import Content
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage, contiguous_stride
from ckpt_tools.values.low_rank import Addend, Delta, Matrix, biased, merged, recast
from ckpt_tools.values.numeric import row_major, view_of
from ckpt_tools.values.pytorch import need_torch
from ckpt_tools.values.same_bytes import same_content


class Merging:
    """The adapters that are merged into one state dict: planned one by one, then applied together."""

    def __init__(self, root: Node, node: Dict, path: str) -> None:
        self.root, self.node = root, node
        self.base = Base(dict(tensors_by_name(node)), path)
        self.entries: dict[tuple[int, str], tuple[str, Entry]] = {}
        self.deltas: dict[tuple[int, str], list[Delta]] = {}
        self.addends: dict[tuple[int, str], list[Addend]] = {}
        self.own: dict[str, tuple[str, Entry]] = {}
        self.based: dict[tuple[int, str], tuple[str, Entry | None]] = {}
        self.changed: dict[str, str] = {}  # name -> the adapter that changed it last
        self.equal_bases: list[Node] = []
        self.notes: list[tuple[str, str]] = []

    @property
    def taken_in(self) -> list[Node]:
        """What is not written: the base's tensors in whose place the adapter's come, and the adapter's that are equal."""
        replaced = [node for name in self.own if (node := self.base.tensors.get(name)) is not None]
        replaced += [self.entries[key][1] for key, (_, own) in self.based.items() if own is not None]
        return replaced + self.equal_bases

    def plan(self, adapter: Adapter, given: str, weight: float) -> Merged:
        return Planning(self.base, self, adapter, given, weight).run()

    def change(self, name: str, given: str, delta: Delta) -> None:
        self.changed[name] = given
        self.deltas.setdefault(self._key(name), []).append(delta)

    def base_of(self, name: str, given: str, entry: Entry) -> None:
        """What the weight was before the change, by the adapter: the base's own, or it comes in its place, as PEFT loads it."""
        old = self.base.entry(name)
        is_same = old.shape == entry.shape and same_content(row_major(old), _as_dtype(name, entry, old.dtype))
        new = None if is_same else entry
        self.equal_bases += [entry] * is_same
        key = self._key(name)
        before = self.based.setdefault(key, (given, new))
        if before[1] is not new and given != before[0]:
            raise ConvertError(f"{before[0]} and {given} were trained on different weights {name!r}, which both hold.")
        if new is not None and before[1] is new:
            text = (
                f"{given} was trained on another {name!r} than {self.base.path} has, and holds it; that is changed and written."
            )
            self.notes.append(("adapters-base", text))

    def add(self, name: str, given: str, addend: Addend) -> None:
        self.changed[name] = given
        self.addends.setdefault(self._key(name), []).append(addend)

    def put(self, name: str, given: str, entry: Entry) -> None:
        """A tensor is exchanged for the adapter's own, or is new."""
        if name in self.own:
            raise ConvertError(f"Two adapters have a {name!r} of their own: {self.own[name][0]} and {given}.")
        self.own[name] = given, entry

    def _key(self, name: str) -> tuple[int, str]:
        entry = self.base.entry(name)
        key = view_of(entry)
        self.entries.setdefault(key, (name, entry))
        return key

    def apply(self) -> Node:
        """Put what was planned into the tree; returns its root."""
        need_torch("`lora` adds an adapter to the weights with it.")
        if (name := next((name for name in self.own if name in self.changed), None)) is not None:
            raise ConvertError(f"{self.changed[name]} changes {name!r}, which {self.own[name][0]} holds whole.")
        self._check_alone()
        made = {key: self._made(key, number) for number, key in enumerate(self.entries)}

        def swap(node: Node) -> Node:
            if type(node) is not Entry or (key := view_of(node)) not in made:
                return node
            return replace(made[key], kind=node.kind, requires_grad=node.requires_grad)

        root = exchange.replace(self.root, swap)
        self._put_own()
        return root

    def _made(self, key: tuple[int, str], number: int) -> Entry:
        """A changed weight or bias, on a storage of its own."""
        name, entry = self.entries[key]
        if (own := self.based.get(key, ("", None))[1]) is not None:
            content = _as_dtype(name, own, entry.dtype)
            entry = _alone(entry, "", content, entry.dtype, own.shape)
        matrix = Matrix(name, row_major(entry), entry.dtype, entry.shape)
        content = merged(matrix, self.deltas[key]) if key in self.deltas else biased(matrix, self.addends[key])
        extras = replace(entry.extras, metadata=None) if entry.extras else None  # the conj and neg bits are worked in
        return _alone(replace(entry, extras=extras), f"merged{number}", content, entry.dtype, entry.shape)

    def _put_own(self) -> None:
        """Exchange what the adapters hold whole, in the dtype of the base; what is new comes last."""
        tensors = tensors_by_name(self.node)
        like = next((node for node in tensors.values() if type(node) is Entry), None)
        new: dict[str, Entry] = {}
        for number, (name, (_, entry)) in enumerate(self.own.items()):
            base = tensors.get(name)
            both_floats = type(base) is Entry and {base.dtype.family, entry.dtype.family} == {"float"}
            dtype = base.dtype if type(base) is Entry and both_floats else entry.dtype
            content = _as_dtype(name, entry, dtype)
            new[name] = _alone(base if type(base) is Entry else like or entry, f"own{number}", content, dtype, entry.shape)
        self.node.items[:] = [(key, new.pop(key, value) if type(key) is str else value) for key, value in self.node.items]
        self.node.items += new.items()

    def _check_alone(self) -> None:
        """Views that overlap what is changed, and are not it, would no longer be views of it."""
        changed: dict[int, list[tuple[str, Entry]]] = {}
        for name, entry in self.entries.values():
            changed.setdefault(id(entry.storage), []).append((name, entry))
        for tensor in find_tensors(self.root):
            node = tensor.node
            if type(node) is not Entry or id(node.storage) not in changed:
                continue
            for name, entry in changed[id(node.storage)]:
                apart = node.offset >= entry.offset + entry.span or entry.offset >= node.offset + node.span
                if not apart and view_of(node) != view_of(entry):
                    raise ConvertError(
                        f"{self.base.path}: {tensor.where[-1]!r} lies on the memory of {name!r}, and is not the same tensor.",
                        why="One would be changed and not the other.",
                        fix="Convert the base to safetensors first, where each tensor has its own memory.",
                    )


def _as_dtype(name: str, entry: Entry, dtype: DType) -> Content:
    return recast(Matrix(name, row_major(entry), entry.dtype, entry.shape), dtype)


def _alone(like: Entry, key: str, content: Content, dtype: DType, shape: tuple[int, ...]) -> Entry:
    """An entry like another, row-major on a storage of its own."""
    storage = Storage(key, dtype if dtype.storage else None, content.length, like.storage.device, content)
    return replace(like, storage=storage, dtype=dtype, shape=shape, stride=contiguous_stride(shape), offset=0)
