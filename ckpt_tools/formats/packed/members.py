"""The members of a tar as files to choose from: names that mean one file each, and the one checkpoint among them.

    model.tar.gz (SageMaker)    config.json, model.safetensors, code/inference.py
    model.nemo (NeMo)           model_config.yaml, model_weights.ckpt; or a torch_dist folder model_weights/
    run.tar                     run/pytorch_model.bin.index.json, run/pytorch_model-00001-of-00002.bin ...

Source: SageMaker's "Model artifacts" (`model.tar.gz`), nemo/core/connectors/save_restore_connector.py.
"""

from __future__ import annotations

import shlex
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, DamagedFileError, NotACheckpointError
from ckpt_tools.formats.folders import layout_of
from ckpt_tools.formats.packed.tars import BYTES_PER_CONTAINER, OddHeaderError, entries
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files, Window, is_plain_name
from ckpt_tools.text import listed, printable

HEAD = 4096
_OF_TORCH = ("storages", "pickle")  # members of what torch 0.1 wrote


class Member(Window):
    """A member of an archive as a file of its own; its path is the archive's with the member's name behind a `!`."""

    def __init__(self, archive: Source, name: str, start: int, size: int) -> None:
        super().__init__(archive, start, size)
        self.path = inside(archive.path, name)


class Folder(Files):
    """A folder in an archive, as the files of one checkpoint. `order` is the names of all members, sorted, if that is known."""

    def __init__(self, archive: Source, name: str, members: Mapping[str, Member], order: Sequence[str] | None = None) -> None:
        self.archive = archive
        self.files = _below(name, members, sorted(members) if order is None else order)
        place = inside(archive.path, name) if name else archive.path
        super().__init__(place, place, self._member, lambda: list(dict.fromkeys(path.partition("/")[0] for path in self.files)))

    def _member(self, name: str) -> Source:
        if name not in self.files:
            raise NotACheckpointError(f"{inside(self.path, name)} cannot be read.", why="The archive has no such member.")
        return self.files[name]

    def check_unchanged(self) -> None:
        """As the archive."""
        self.archive.check_unchanged()


def inside(path: Path, name: str) -> Path:
    """What a member of the archive at a path is called; one without a name ends in the `!`."""
    return Path(f"{path}/{name}" if "!" in str(path) else f"{path}!{name}")


def members_of(tar: Source) -> dict[str, Member]:
    """The files in a tar by their names, in order."""
    found: dict[str, Member] = {}
    try:
        for header, part in entries(tar, limits.RECORDS.value, long_names=True):
            name = header.name.removeprefix("./").rstrip("/")
            if header.is_link:
                raise OddHeaderError(f"the link {name!r}")
            if name not in ("", ".") and not is_plain_name(name):
                raise OddHeaderError(f"a member {header.name!r}, which is not a name inside a folder")
            if not header.is_file:
                continue
            if name in found:
                raise OddHeaderError(f"two members {name!r}")
            found[name] = Member(tar, name, part.start, part.end - part.start)
    except OddHeaderError as error:
        raise DamagedFileError(
            f"The tar has {error}.", why=TWO_FILES, fix="Unpack it where that does no harm, and give ckpt the file in it."
        ) from None
    if any(name in found for name in _OF_TORCH):
        raise DamagedFileError("The tar has a second name for what torch 0.1 wrote.", why=TWO_FILES)
    return found


def _below(folder: str, members: Mapping[str, Member], order: Sequence[str]) -> dict[str, Member]:
    """The members in a folder and in those below, by their names from there; of the sorted names they are some in a row."""
    if not folder:
        return dict(members)
    first, last = (bisect_left(order, f"{folder}{end}") for end in ("/", chr(ord("/") + 1)))
    return {name[len(folder) + 1 :]: members[name] for name in order[first:last]}


def candidates(archive: Source, members: Mapping[str, Member], begins: Callable[[bytes], bool]) -> dict[str, Folder | Member]:
    """What in an archive may be a checkpoint: folders that are one, and beside those the files that begin as one."""
    found: dict[str, Folder | Member] = {}
    taken: set[str] = set()  # folders that are one, and all below
    held, order = _folders(members, limits.budget(archive.size)), sorted(members)
    for name in sorted(held, key=lambda name: (name.count("/") if name else -1, name)):  # those above before those below
        if name and _above(name) in taken:
            taken.add(name)
        elif _is_whole(inside(archive.path, name), name, sorted(held[name]), members):
            found[name] = Folder(archive, name, members, order)
            taken.add(name)
    for name, member in members.items():
        if _above(name) not in taken and begins(member.read(0, min(HEAD, member.size))):
            found[name] = member
    return found


def _above(name: str) -> str:
    return name.rpartition("/")[0]


def _folders(members: Mapping[str, Member], budget: limits.Budget) -> dict[str, set[str]]:
    """The folders in an archive, and what is in each. Each name is paid for: a long path is of many folders."""
    found: dict[str, set[str]] = {"": set()}
    for path in members:
        folder, _, name = path.rpartition("/")
        while folder not in found:
            budget.take(limits.NODES, 1 + len(folder) // BYTES_PER_CONTAINER, "The tar has too many folders.")
            found[folder] = {name}
            folder, _, name = folder.rpartition("/")
        found[folder].add(name)
    return found


def _is_whole(place: Path, folder: str, names: list[str], members: Mapping[str, Member]) -> bool:
    """Whether a folder of these names is one checkpoint; an index of something else makes none of it."""
    layout = layout_of(place, names)
    if layout is None:
        return False
    files = [members.get(f"{folder}/{name}" if folder else name) for name in layout.names]
    if layout.container == "sharded" and files[0] is not None:
        return _indexes_shards(files[0])
    return None not in files


def _indexes_shards(index: Member) -> bool:
    from ckpt_tools.formats import sharded

    return sharded.sniff(index.read(0, min(HEAD, index.size)), index)


def chosen(archive: Source, members: Mapping[str, Member], wanted: str) -> Folder | Member:
    """The member or folder of this name."""
    if wanted in members:
        return members[wanted]
    if any(name.startswith(f"{wanted}/") for name in members):
        return Folder(archive, wanted, members)
    raise NotACheckpointError(
        f"{archive.path} has no member {wanted!r}.", why=f"It holds {listed(sorted(members)) or 'nothing'}."
    )


def none_inside(archive: Source, members: Mapping[str, Member]) -> NotACheckpointError:
    """The error for a tar without a checkpoint."""
    held = f"It holds {listed(sorted(members))}." if members else "It is empty."
    return NotACheckpointError(f"{archive.path} is a tar archive without a checkpoint in it.", why=held)


def several_inside(path: Path, names: list[str]) -> NotACheckpointError:
    """The error for a tar with several checkpoints: which, and how to name one."""
    return NotACheckpointError(
        f"{path} holds {len(names)} checkpoints: {listed(names)}.", why="Each is one of its own.",
        fix=f"Name one of them, behind a `!`: {printable(shlex.quote(str(inside(path, names[0]))))}",
    )  # fmt: skip
