"""The account of a conversion: every tensor that was opened is written, or left out by an option that the user gave.

It is kept by comparing what was opened with what the writer got: a tensor is there where its entry is, or where its bytes are
among those that the contents of the output are worked out of. What is not there, and no option left out, is an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence

from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.contents import count_tensors, is_tensor
from ckpt_tools.io.content import Range, made_of
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import Entry, Node, Storage, Where
from ckpt_tools.tree.visit import reachable, walk

_DEFECT = "This is a defect of ckpt, which writes nothing then; please report it."


class Account:
    """What was opened, and what options left out of it."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, list[tuple[Where, Node]]]] = []
        self.count: int | None = None
        self.left: dict[int, Node] = {}  # the nodes themselves, so that their ids stay in use

    def open(self, path: str, root: Node) -> None:
        self.opened.append((path, tensors_in(root)))

    def open_whole(self, root: Node) -> None:
        """The tensors of the one input, where no option may leave out or exchange any: their number is enough."""
        self.count = count_tensors(root)

    @property
    def had_tensors(self) -> bool:
        return bool(self.count) or any(tensors for _, tensors in self.opened)

    def leave_out(self, nodes: Iterable[Node]) -> None:
        """Tensors that an option left out, or whose numbers were taken in already."""
        self.left.update((id(node), node) for node in nodes)

    def leave_at(self, before: Sequence[tuple[Where, Node]], gone: Iterable[Where]) -> None:
        """Tensors that a step left out and told by their paths; `before` are those that there were (`tensors_in`)."""
        wheres = set(gone)
        self.leave_out(node for where, node in before if any(where[:end] in wheres for end in range(len(where) + 1)))

    def close(self, root: Node, dropped: Collection[str]) -> int:
        if self.count is not None:
            if (count := count_tensors(root)) < self.count:  # arrays may have become tensors
                raise ConvertError(
                    f"Of {self.count} tensors {count} would be written, and no option leaves any out.", fix=_DEFECT
                )
            return count
        written = [node for _, node in tensors_in(root)]
        there, names, bytes_of = set(map(id, written)) | self.left.keys(), set(dropped), None

        def is_told(where: Where) -> bool:
            """Whether a tensor, or something that it is in, is reported as left out: by its path, or its name."""
            paths = (dotted(where[:end]) for end in range(len(where), 0, -1))
            return bool(names) and ((where and str(where[-1]) in names) or any(path in names for path in paths))

        for path, tensors in self.opened:
            missed = [row for row in tensors if id(row[1]) not in there and not is_told(row[0])]
            if missed:
                bytes_of = bytes_of or _Written([*written, *self.left.values()])
                missed = [row for row in missed if not bytes_of.hold(row[1])]
            if missed:
                lost = listed([repr(dotted(where)) for where, _ in missed], 6)
                raise ConvertError(
                    f"{path}: {len(missed)} of {len(tensors)} tensors would be lost: {lost}.",
                    why="No option leaves them out, and nothing that would be written is made of them.",
                    fix=_DEFECT,
                )
        return len(written)


def tensors_in(root: Node) -> list[tuple[Where, Node]]:
    found = walk(root, stop=is_tensor, plain=False, bare=False)
    return [row for row in found if type(row[1]) is Entry or is_tensor(row[1])]


class _Written:
    """The bytes that are written: contents by identity, and ranges of files."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.whole: set[int] = set()
        self.ranges: dict[int, list[tuple[int, int]]] = {}
        for entry in (entry for node in nodes for entry in _entries(node)):
            for content in made_of(entry.storage.content):
                if content is not entry.storage.content or type(content) is not Range:
                    self.whole.add(id(content))
                if isinstance(content, Range):
                    start, end = _span(entry) if content is entry.storage.content else (0, content.length)
                    self.ranges.setdefault(id(content.source), []).append((content.offset + start, content.offset + end))
        for key, ranges in self.ranges.items():  # those that touch are one
            found: list[tuple[int, int]] = []
            for start, end in sorted(ranges):
                if found and start <= found[-1][1]:
                    found[-1] = found[-1][0], max(found[-1][1], end)
                else:
                    found.append((start, end))
            self.ranges[key] = found

    def hold(self, node: Node) -> bool:
        if type(node) is Entry:
            return self._holds(node)
        return all(self._holds(entry) or id(entry.storage.content) in self.whole for entry in _entries(node))

    def _holds(self, entry: Entry) -> bool:
        content = entry.storage.content
        if not entry.numel:
            return True
        if not isinstance(content, Range):
            return any(id(below) in self.whole for below in made_of(content))
        start, end = _span(entry)
        found = self.ranges.get(id(content.source), [])
        at = bisect_right(found, content.offset + start, key=lambda row: row[0]) - 1
        return at >= 0 and content.offset + end <= found[at][1]


def _entries(node: Node) -> Iterator[Entry]:
    """An entry, or those of an unusual tensor; of one that has storages alone each as a run of bytes."""
    for below in [node] if type(node) is Entry else reachable(node):
        if type(below) is Entry:
            yield below
        elif type(below) is Storage:
            yield Entry(below, UINT8, (below.nbytes,), (1,), 0)


def _span(entry: Entry) -> tuple[int, int]:
    """The bytes of its storage from its first element to its last."""
    start = entry.offset * entry.dtype.bits // 8
    return start, start + max(entry.span * entry.dtype.bits // 8, 1)
