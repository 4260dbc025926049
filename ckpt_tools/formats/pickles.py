"""Every pickle in a file, wherever it stands: one behind another, in archives, behind the header of a .npy, compressed.

By content alone: a file that is two formats at once is examined as both, and what cannot be examined is told.
"""

from __future__ import annotations

import contextlib
import math
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError, exhausted
from ckpt_tools.formats import programs, texts
from ckpt_tools.formats import zip_directory as zips
from ckpt_tools.formats.base import is_tar, is_zip
from ckpt_tools.formats.compressed import BROKEN, DEFLATE, EVERY_KIND, KINDS, Kind, inflated
from ckpt_tools.formats.numpy_files import parse_header
from ckpt_tools.formats.torch_tar import Headers
from ckpt_tools.formats.torch_zip import single_folder
from ckpt_tools.formats.zip_archives import split
from ckpt_tools.formats.zip_directory import Record
from ckpt_tools.io.content import chunks
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Spooled, Window
from ckpt_tools.pickling.calls import Pickle, list_pickles
from ckpt_tools.pickling.stream import Part
from ckpt_tools.tree.nodes import Global

_HEAD = 4096
_NPY_HEAD = 10_012  # as much as our reader of arrays takes
_COST_OF_PICKLE = 5  # in members
_NODES_OF_MEMBER = 20  # each is looked at in several ways
_MOST_EVALUATED = 100  # texts of a program that are told
_STARTS = re.compile(rb"\x80[\x00-\x05]")
_MODULE = re.compile(r"[\w.+-]+")
_BLOCK = 4 << 20  # bytes of a deflated record that is held in memory
_OF_TORCH = "/data.pkl"  # what torch.load reads as a pickle, whatever it looks like
_BY_CHANCE = 8  # bytes that something else may have in common with a pickle: the length of a safetensors header
_BY_ACCIDENT = 1024  # bytes that are inflated of what is no zlib or lzma, whose two bytes other files begin with too
_LOCKED = ((b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (b"Rar!", "a RAR archive"), (b"\x04\x22\x4d\x18", "an lz4 archive"))
# Before it the length in 19 characters, perhaps a space. Source: `joblib.numpy_pickle_compat.read_zfile`.
_JOBLIB, _ZFILE = Kind("zlib of joblib 0.8", b"ZF", make=zlib.decompressobj), re.compile(rb"ZF.{19} ?", re.DOTALL)
_KINDS = (*EVERY_KIND, _JOBLIB)


class _FullError(Exception):
    pass


class _InMemory(Source):
    def __init__(self, data: bytes, source: Source) -> None:
        self.path, self.size, self.data = source.path, len(data), data
        self._fd, self._identity = -1, object()

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


class Pickles:
    """What is found in files that are examined one after another. Nothing in them is run or imported."""

    def __init__(self) -> None:
        self.pickles: list[Pickle] = []
        self.unexamined: list[tuple[str, str]] = []
        self.program = False
        self.left = self.parts = self.most = 0  # of the file that is looked at: bytes that it may inflate to; its parts

    def look_through(self, source: Source, where: str = "") -> None:
        """Find the pickles of a file, which is called so among others."""
        self.left, self.parts = limits.STREAMED * limits.MEMORY.most(source.size), 0
        self.most = limits.NODES.most(source.size) // _NODES_OF_MEMBER
        try:
            with limits.of_file(source.size):
                self.examine(source, where, 0)
        except _FullError:
            self.skip(where, f"It has more members and pickles than are looked at (--limit nodes). {limits.NODES.said}")
        except (MemoryError, RecursionError) as error:
            raise exhausted(error, str(source.path)) from None

    def examine(self, source: Source, where: str, depth: int, member: str = "", *, of_text: bool = False) -> None:
        self.count()
        if depth > limits.NESTED.value:
            self.skip(where, f"It lies too deep (--limit nested). {limits.NESTED.said}")
            return
        head, before, behind = source.read(0, min(_HEAD, source.size)), len(self.pickles), source
        for magic, locked in _LOCKED:
            if head.startswith(magic):
                self.skip(where, f"{locked}, which has to be unpacked first")
        for kind in [kind for kind in _KINDS if head.startswith(kind.magic)][:1]:
            with self.guarded(where):
                self.compressed(source, where, depth, kind)
        if is_tar(head):
            with self.guarded(where):
                behind = self.tar(source, where, depth)
        with self.guarded(where):
            if is_zip(head) or zips.has_end(behind):
                self.archive(source, where, depth)
        if head.startswith(zips.NUMPY):
            self.arrays(source, where, depth)
        else:
            self.stream(source, where, depth, member=member)
        text = None if of_text else texts.text_in(source, head)
        if text is not None and len(self.pickles) == before:  # a pickle, or an archive of some, is no text
            with self.guarded(where):
                self.texts(text, where, depth)

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Looking into a part: where that fails, it is told, and the rest goes on."""
        try:
            yield
        except CkptError as error:
            self.skip(where, error.what + (f" {error.why}" if error.why else ""))
        except (*BROKEN, tarfile.TarError, OverflowError) as error:
            self.skip(where, f"it cannot be read: {error}")

    def count(self, cost: int = 1) -> None:
        self.parts += cost
        if self.parts > self.most:
            raise _FullError

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise limits.MEMORY.error("The file inflates to more than any real one.")

    def skip(self, where: str, why: str) -> None:
        self.unexamined.append((where, why))

    # --- pickles

    def arrays(self, source: Source, where: str, depth: int) -> None:
        at = 0
        while at < source.size:
            self.count()
            head = source.read(at, min(_NPY_HEAD, source.size - at))
            if not head.startswith(zips.NUMPY):
                self.stream(source, where, depth, at)
                return
            start, end = _npy(head)
            at = self.stream(source, where, depth, at + start) if end is None else at + end

    def stream(self, source: Source, where: str, depth: int, start: int = 0, *, member: str = "") -> int:
        """Pickles one behind another, if there are any; returns where the last one ends."""
        last, certain, told, has_arrays = source.size, where.endswith(_OF_TORCH), set[str](), False
        part = Part(source, min(start, last), last)
        for pickle in list_pickles(part, member):
            certain = certain or _is_pickle(pickle, source.read(pickle.start, min(2, source.size - pickle.start)))
            if not certain:  # text may begin so, and a pickle may follow: `].` is one, of an empty list
                self.count()
                continue
            last = pickle.end
            has_arrays |= pickle.has_arrays
            told |= {call.text for call in pickle.calls}
            self.pickles.append(pickle)
            self.take(pickle, source, where, depth)
            if pickle.error is not None:
                self.skip(where, f"{pickle.error.what} {pickle.error.why}".strip())
            if pickle.unread:
                self.skip(where, f"behind its pickles: {pickle.unread}")
        # any loader but joblib takes the bytes of its arrays for opcodes
        for pickle in list_pickles(part, member, arrays=False) if has_arrays else ():
            by_chance = [call for call in pickle.calls if call.rating == "unknown" and call.function.endswith(".dtype")]
            pickle.calls = [call for call in pickle.calls if call.text not in told and call not in by_chance]
            self.pickles += [pickle] if pickle.calls else []
            self.take(pickle, source, where, depth)
            if pickle.error is not None and (pickle.two_ways or isinstance(pickle.error, LimitError)):
                self.skip(where, pickle.error.what)
        return last

    def take(self, pickle: Pickle, source: Source, where: str, depth: int) -> None:
        pickle.where = where
        self.count(_COST_OF_PICKLE)
        for data in pickle.nested:
            if zips.SIGNATURE_END in data or _is_meant(data):
                self.examine(_InMemory(data, source), _inside(where, "bytes that it loads"), depth + 1)

    def texts(self, source: Source, where: str, depth: int) -> None:
        for at, data in texts.bytes_in(source):
            name = _inside(where, f"text at byte {at}")
            if texts.CODE.match(data):
                self.skip(name, "it is code of Python's, written by marshal")
            elif _is_meant(data):
                self.examine(_InMemory(data, source), name, depth + 1, of_text=True)

    # --- archives

    def archive(self, source: Source, where: str, depth: int) -> None:
        """The records of a zip but those that hold the numbers of tensors; of a damaged one whatever has a local header."""
        places, _ = split(source)
        for start, size in places:
            self.archive(Window(source, start, size), _inside(where, f"archive at byte {start}"), depth)
        if places:
            return
        try:
            records = zips.read_directory(source).records
        except DamagedFileError as error:
            self.skip(where, error.what)
            self.damaged_archive(source, where, depth)
            return
        self.program |= any(record.name.endswith(_OF_PROGRAMS) for record in records)
        with self.guarded(where):  # what torch.export.load runs of the records of a program
            calls = programs.calls(records, lambda record: self.opened(source, record).read(0, record.size))
            for path, call in islice(calls, _MOST_EVALUATED):
                self.pickles.append(Pickle(0, where=_inside(where, path), calls=[call]))
        numbers = _numbers_in(records)
        for record in records:
            name = _inside(where, record.name)
            with self.guarded(name):
                head = zips.record_head(source, record, _HEAD) if record.is_array else b""
                if record.name in numbers and not head.startswith(zips.NUMPY):
                    continue
                if not record.deflated or _npy(head)[1] is None:  # else it is numbers alone
                    self.examine(self.opened(source, record), name, depth + 1)

    def opened(self, source: Source, record: Record) -> Source:
        if not record.deflated:
            return Window(source, record.data, record.size)
        self.spend(record.size)
        blocks = chunks(zips.record_content(source, record))
        return _InMemory(b"".join(blocks), source) if record.size <= _BLOCK else Spooled(source, blocks)

    def damaged_archive(self, source: Source, where: str, depth: int) -> None:
        """What stands behind the local headers, since readers may differ in what the directory says."""
        places = [at for _, at in zips.signatures(source, zips.SIGNATURE_LOCAL) if at + zips.LOCAL.size <= source.size]
        for place, following in pairwise([*places, source.size]):
            header = zips.LocalHeader.at(source, place)
            if header.data < source.size:
                name = _inside(where, header.name[:_HEAD].decode("utf-8", "replace"))
                member = Window(source, header.data, max(following, header.data) - header.data)
                with self.guarded(name):
                    if header.method == 8:
                        self.compressed(member, name, depth, DEFLATE)
                    else:
                        self.examine(member, name, depth + 1)

    def tar(self, source: Source, where: str, depth: int) -> Source:
        """The members of a tar, as Python's own reader finds them; none is extracted. What is behind them is returned."""
        end = 0
        with tarfile.open(fileobj=Headers(source), mode="r:") as archive:
            for info in archive:
                end = info.offset_data + info.size
                if info.issparse() or ((info.islnk() or info.issym()) and info.name in _OF_TORCH_TAR):
                    self.skip(_inside(where, info.name), "a link, or a file with holes, which has to be unpacked first")
                elif info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:  # Python unpacks what it does not know as a file
                    member = Window(source, info.offset_data, min(info.size, source.size - info.offset_data))
                    self.examine(member, _inside(where, info.name), depth + 1, info.name.rstrip("/"))
        return Window(source, end, source.size - end) if end <= source.size else source

    def compressed(self, source: Source, where: str, depth: int, kind: Kind) -> None:
        """What a compressed file holds; of a damaged one what comes before the damage, as loaders read it."""
        before, header = len(self.pickles), None
        if kind is _JOBLIB and (header := _ZFILE.match(source.read(0, min(_HEAD, source.size)))):
            source = Window(source, header.end(), source.size - header.end())
        opened, end, damage = inflated(source, kind, self.spend)
        if opened.size:
            self.examine(opened, _inside(where, f"({kind.name})"), depth + 1)
        if damage is None and end < source.size:
            self.examine(Window(source, end, source.size - end), _inside(where, f"after the {kind.name}"), depth + 1)
        # what merely begins as zlib or lzma is another file; lzma that wants more memory than there may be is meant
        is_sure = kind in KINDS or opened.size >= _BY_ACCIDENT or len(self.pickles) > before or "Memory" in str(damage)
        if damage is not None and is_sure:
            self.skip(where, f"it cannot be inflated to its end: {damage}")


_OF_TORCH_TAR = ("sys_info", "storages", "tensors", "pickle")
_OF_PROGRAMS = (
    "/constants.pkl", "/archive_format", "/archive_version", "/model.json", "/serialized_exported_program.json",
    "/.data/extern_modules",
)  # fmt: skip
# Only torch.export writes these; it reads names without regard to case.
_OF_EXPORT = re.compile(r"(?:^|/)(?:archive_format|models/[^/]*\.json|[^/]*_config\.json|serialized_exported_program\.json)$")


def _numbers_in(records: Sequence[Record]) -> set[str]:
    """The names of records that hold the numbers of a storage: `data/7` beside `data.pkl`."""
    names, root = {record.name for record in records}, single_folder(records)
    if any(_OF_EXPORT.search(name.lower()) for name in names):
        return set()
    top = "" if root is None else f"{root}/"
    starts = [f"{top}{folder}/" for folder in ("data", "constants") if f"{top}{folder}.pkl" in names]
    return {name for name in names for start in starts if name.startswith(start) and name[len(start) :].isdecimal()}


def _is_pickle(pickle: Pickle, head: bytes) -> bool:
    if pickle.two_ways or isinstance(pickle.error, LimitError):  # a call may stand behind what was read
        return True
    if _STARTS.match(head):
        return pickle.error is None or bool(pickle.names) or pickle.end > pickle.start + _BY_CHANCE
    imported = next((name for name in pickle.names if "Storage" not in name.name), None)
    if imported is not None and not _MODULE.fullmatch(imported.module):  # Python would go no further than such an import
        return any(call.does == "changes" for call in pickle.calls)  # maybe a storage, before it
    return bool(pickle.calls) or (bool(pickle.names) and (pickle.makes or pickle.error is None))


def _can_be_imported(name: Global) -> bool:
    return name.name[:1] != "<" and not any(map(str.isspace, name.name)) and _MODULE.fullmatch(name.module) is not None


def _is_meant(data: bytes) -> bool:
    """Whether bytes that a pickle or a text holds are a pickle, or may hold some: two bytes begin so by chance."""
    if is_zip(data) or is_tar(data[:_HEAD]) or data.startswith((zips.NUMPY, *(magic for magic, _ in _LOCKED))):
        return True
    for kind in _KINDS:
        with contextlib.suppress(*BROKEN):
            if data.startswith(kind.magic) and (kind.make or zlib.decompressobj)().decompress(data, _HEAD):
                return True
    # GLOBAL or INST and a line, or STACK_GLOBAL, by which a pickle names something by words
    end = max(data.rfind(b"\n"), 0)
    if not (_STARTS.match(data) or b"\x93" in data or data.find(b"c", 0, end) >= 0 or data.find(b"i", 0, end) >= 0):
        return False
    return any(
        _is_pickle(pickle, data[pickle.start : pickle.start + 2])
        and (
            any(map(_can_be_imported, pickle.names)) or pickle.two_ways or isinstance(pickle.error, LimitError)
            or (pickle.error is None and not pickle.names)
        )
        for pickle in list_pickles(Part.of_bytes(data))
    )  # fmt: skip


def _npy(head: bytes) -> tuple[int, int | None]:
    """Where what is behind the header of a .npy starts, and ends; no end where it may hold Python objects, or is no .npy."""
    width = 2 if head[6:7] == b"\1" else 4
    start = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    with contextlib.suppress(CkptError):
        header = parse_header(head)
        if header.code != "O":
            itemsize = int(header.code[1:] or 0) * (4 if header.code[0] == "U" else 1)  # the sizes of texts are in characters
            return start, header.length + math.prod(header.shape) * itemsize
    return start, None


def _inside(where: str, name: str) -> str:
    return f"{where}: {name}" if where else name
