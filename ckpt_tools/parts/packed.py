"""A checkpoint in a compressed file or in a tar, read as what it is; what it lies in is told.

    model.tar.gz (SageMaker), model.nemo (NeMo), run.tar with a folder of shards

Members of a tar that is not compressed are read where they lie; what is compressed is inflated once. All share one budget.
"""

from __future__ import annotations

import contextlib
import shlex
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, NotACheckpointError
from ckpt_tools.formats import torch_tar
from ckpt_tools.formats.checkpoint import Checkpoint, Packed
from ckpt_tools.formats.compressed import inflate, kind_of
from ckpt_tools.formats.contents import count_tensors
from ckpt_tools.formats.single import HEAD, container_of, decode_content
from ckpt_tools.formats.torch_tar import entries, is_file, odd
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Files, Window, is_plain_name
from ckpt_tools.parts import families
from ckpt_tools.parts.names import is_index
from ckpt_tools.text import listed, printable

_DEEPEST = 100  # folders in one another
_Members = Mapping[str, Window]


class Folder(Files):
    """A folder in an archive, as the files of one checkpoint. `order` is the names of all members, sorted."""

    def __init__(self, archive: Source, name: str, members: _Members, order: Sequence[str]) -> None:
        self.archive, self.files = archive, members
        if name:
            first, last = (bisect_left(order, f"{name}{end}") for end in ("/", chr(ord("/") + 1)))
            self.files = {path[len(name) + 1 :]: members[path] for path in order[first:last]}
        place = _inside(archive.path, name) if name else archive.path
        super().__init__(place, place, self._member, lambda: list(dict.fromkeys(path.partition("/")[0] for path in self.files)))

    def _member(self, name: str) -> Source:
        if name not in self.files:
            raise NotACheckpointError(f"{_inside(self.path, name)} cannot be read.", why="The archive has no such member.")
        return self.files[name]

    def check_unchanged(self) -> None:
        self.archive.check_unchanged()


def _inside(path: Path, name: str) -> Path:
    """What a member of the archive at a path is called; one without a name ends in the `!`."""
    return Path(f"{path}/{name}" if "!" in str(path) else f"{path}!{name}")


def is_packed(source: Source, head: bytes) -> bool:
    return kind_of(head) is not None or _is_tar(source, head)


def _head(source: Source) -> bytes:
    return source.read(0, min(HEAD, source.size))


def _is_tar(source: Source, head: bytes) -> bool:
    return torch_tar.sniff(head) and any(head) and not torch_tar.is_torchs(source)


def decode(source: Source, head: bytes, wanted: str) -> Checkpoint:
    kind = kind_of(head)
    with limits.of_file(source.size):
        if kind is None:
            return _in_tar(source, source, "tar", wanted)
        whole = inflate(source, kind)
        if _is_tar(whole, _head(whole)):
            return _in_tar(source, whole, f"tar{kind.suffix}", wanted)
        name = source.path.name
        member = name[: -len(kind.suffix)] if name.lower().endswith(kind.suffix) else ""
        if wanted not in ("", member):
            raise NotACheckpointError(f"{source.path} is one compressed file, and has no member {wanted!r}.")
        whole.path = _inside(source.path, member)
        try:
            decoded = _read(whole)
        except NotACheckpointError as error:
            error.what = f"{source.path} is {kind.called} of something that is not a checkpoint."
            error.fix = "Unpack it to see what it is."
            raise
        decoded.packed = Packed(kind.name, member, source, whole, source.path)
        return decoded


def _read(place: Source) -> Checkpoint:
    """Read what is inside; errors say which member they are about, and give no command that takes only what is not packed."""
    try:
        if isinstance(place, Folder):
            return families.layout(place.folder, place.names()).decode(place)
        return decode_content(place)
    except CkptError as error:
        error.about(place.path)
        if "ckpt repair" in error.fix or (isinstance(error, DamagedFileError) and error.whole and not error.fix):
            error.fix = "Get it again, or unpack it and give ckpt repair the file that was in it."
        raise


def _in_tar(source: Source, tar: Source, kind: str, wanted: str) -> Checkpoint:
    members = _members(tar)
    order = sorted(members)
    if not wanted:
        names, lacks = list(_candidates(tar, members)), "is a tar archive without a checkpoint in it"
    else:
        is_there = wanted in members or any(name.startswith(f"{wanted}/") for name in members)
        names, lacks = [wanted] if is_there else [], f"has no member {wanted!r}"
    if not names:
        raise NotACheckpointError(f"{tar.path} {lacks}.", why=f"It holds {listed(order) or 'nothing'}.")
    places = {name: members[name] if name in members else Folder(tar, name, members, order) for name in names}
    read: dict[str, Checkpoint | None] = {}
    for name, place in places.items() if len(places) > 1 else ():  # those count that have tensors, or cannot be read
        decoded = None
        if len(read) < 2:
            with contextlib.suppress(CkptError):
                decoded = _read(place)
        if decoded is None or count_tensors(decoded.root):
            read[name] = decoded
    names = list(read or places)
    if len(names) > 1:
        raise NotACheckpointError(
            f"{source.path} holds {len(names)} checkpoints: {listed(names)}.", why="Each is one of its own.",
            fix=f"Name one of them, behind a `!`: {printable(shlex.quote(str(_inside(source.path, names[0]))))}",
        )  # fmt: skip
    name, found = names[0], places[names[0]]
    decoded = read.get(name) or _read(found)
    folder = found if isinstance(found, Folder) else Folder(tar, name.rpartition("/")[0], members, order)
    decoded.packed = Packed(kind, name, source, tar, found.path if wanted else source.path, folder)
    return decoded


def _members(tar: Source) -> dict[str, Window]:
    found: dict[str, Window] = {}
    for info in entries(tar, limits.RECORDS.value):
        name = info.name.removeprefix("./").rstrip("/")
        if info.islnk() or info.issym():
            raise odd(f"the link {name!r}")
        if name not in ("", ".") and (not is_plain_name(name) or name.count("/") > _DEEPEST):
            raise odd(f"a member {info.name!r}, which is not a name inside a folder")
        if name in found:
            raise odd(f"two members {name!r}")
        if is_file(info):
            found[name] = Window(tar, info.offset_data, info.size)
            found[name].path = _inside(tar.path, name)
    if any(name in found for name in torch_tar.NEEDED):
        raise DamagedFileError("The tar has a second name for what torch 0.1 wrote.", why=TWO_FILES)
    return found


def _candidates(archive: Source, members: _Members) -> Iterator[str]:
    """What in an archive may be a checkpoint: folders that are one, and beside those the files that begin as one."""
    held: dict[str, list[str]] = defaultdict(list)
    for path in members:
        folder, _, name = path.rpartition("/")
        held[folder].append(name)
    whole, loose = list[str](), set[str]()
    for folder in sorted(held, key=lambda folder: f"{folder}/" if folder else ""):  # a folder is followed by all below it
        if not (whole and (not whole[-1] or folder.startswith(f"{whole[-1]}/"))):
            is_whole = _is_whole(_inside(archive.path, folder), sorted(held[folder]), f"{folder}/" if folder else "", members)
            (whole.append if is_whole else loose.add)(folder)
    yield from whole
    for path, member in members.items():
        if path.rpartition("/")[0] in loose and container_of(_head(member)):
            yield path


def _is_whole(place: Path, names: Sequence[str], start: str, members: _Members) -> bool:
    """Whether a folder is one checkpoint; an index of something else makes none of it."""
    found = families.layout_of(place, names)
    if found is None:
        return False
    if found.family == "sharded" and (index := members.get(start + found.names[0])) is not None:
        return is_index(index, _head(index))
    return all(start + name in members for name in found.names)
