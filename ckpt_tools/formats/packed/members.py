"""The members of a tar as files to choose from: names that mean one file each, and the one checkpoint among them.

    model.tar.gz (SageMaker)    config.json, model.safetensors, code/inference.py
    model.nemo (NeMo)           model_config.yaml, model_weights.ckpt; or a torch_dist folder model_weights/
    run.tar                     run/pytorch_model.bin.index.json, run/pytorch_model-00001-of-00002.bin ...

Source: SageMaker's "Model artifacts" (`model.tar.gz`), nemo/core/connectors/save_restore_connector.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, AmbiguousFileError, NotACheckpointError
from ckpt_tools.formats.folders import Layout, layout_of
from ckpt_tools.formats.packed.tars import OddHeaderError, entries
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
    """A folder in an archive, as the files of one checkpoint."""

    def __init__(self, archive: Source, name: str, members: Mapping[str, Member]) -> None:
        below = f"{name}/" if name else ""
        self.archive = archive
        self.files = {path.removeprefix(below): member for path, member in members.items() if path.startswith(below)}
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
    """What a member of the archive at a path is called."""
    return Path(f"{path}/{name}" if "!" in str(path) else f"{path}!{name}")


def members_of(tar: Source) -> dict[str, Member]:
    """The files in a tar by their names, in order.

    Raises:
        AmbiguousFileError: two members of one name, a link, a name that leads out of a folder, or a header that readers take in
        different ways. DamagedFileError: a damaged header, or the tar is cut off. LimitError: more members than any real one.
    """
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
        raise AmbiguousFileError(
            f"The tar has {error}.", why=TWO_FILES, fix="Unpack it where that does no harm, and give ckpt the file in it."
        ) from None
    if any(name in found for name in _OF_TORCH):
        raise AmbiguousFileError("The tar has a second name for what torch 0.1 wrote.", why=TWO_FILES)
    return found


def candidates(archive: Source, members: Mapping[str, Member], begins: Callable[[bytes], bool]) -> dict[str, Folder | Member]:
    """What in an archive may be a checkpoint: folders that are one, and beside those the files that begin as one."""
    found: dict[str, Folder | Member] = {}
    for name in _folders(members):
        folder = Folder(archive, name, members)
        if not any(name == above or not above or name.startswith(f"{above}/") for above in found) and _is_whole(folder):
            found[name] = folder
    folders = tuple(found)
    for name, member in members.items():
        within = any(not folder or name.startswith(f"{folder}/") for folder in folders)
        if not within and begins(member.read(0, min(HEAD, member.size))):
            found[name] = member
    return found


def _folders(members: Mapping[str, Member]) -> Iterator[str]:
    """The folders in an archive, those above before those below."""
    found = {""}
    for path in members:
        found |= {str(folder) for folder in Path(path).parents if folder.name}
    return iter(sorted(found, key=lambda name: (name.count("/") if name else -1, name)))


def _is_whole(folder: Folder) -> bool:
    """Whether a folder is one checkpoint; an index of something else makes none of it."""
    layout = layout_of(folder.folder, sorted(folder.names()))
    if layout is None or not all(name in folder.files for name in layout.names):
        return False
    return layout.container != "sharded" or _indexes_shards(folder, layout)


def _indexes_shards(folder: Folder, layout: Layout) -> bool:
    from ckpt_tools.formats import sharded

    index = folder.files[layout.names[0]]
    return sharded.sniff(index.read(0, min(HEAD, index.size)), index)


def chosen(archive: Source, members: Mapping[str, Member], wanted: str) -> Folder | Member:
    """The member or folder of this name.

    Raises:
        NotACheckpointError: there is none.
    """
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
