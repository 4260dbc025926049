"""What a file is when it is not a checkpoint that we read, told from its first bytes: one sentence each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ckpt_tools.errors import CkptError, DamagedFileError, NotACheckpointError
from ckpt_tools.formats.compressed import KINDS
from ckpt_tools.formats.zip_directory import has_end
from ckpt_tools.io.output import Source
from ckpt_tools.tree.findings import mending

# What torch wrote before 1.6: the pickled magic number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ASK = "Ask for the PyTorch weights that it was made of."
_KINDS = (  # where the magic bytes are, what they are, what the file is
    *((0, kind.magic, kind.called, "Unpack it first.") for kind in KINDS),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "Unpack it first."),
    (0, b"Rar!", "a RAR archive", "Unpack it first."),
    (0, b"\x89PNG", "a PNG picture", ""),
    (0, b"\xff\xd8\xff", "a JPEG picture", ""),
    (0, b"%PDF", "a PDF document", ""),
    (0, b"\x7fELF", "a program", ""),
    (4, b"TFL3", "a TensorFlow Lite model", _ASK),  # behind a flatbuffer's first offset
    (4, b"ET12", "an ExecuTorch program", _ASK),
)  # fmt: skip
_READS = "ckpt reads what torch.save writes and wrote, safetensors, GGUF, ONNX, Flax's msgpack, pickles, NumPy's .npz and .npy."


def recognise(source: Source, head: bytes) -> CkptError | None:
    path = source.path
    if not head:
        return NotACheckpointError(f"{path} is an empty file.", why="The program that should have written it wrote nothing.")
    if head.startswith(b"\xffCKP"):  # as ckpt_tools marked it until 0.1
        why = f".{path.name}.ckpt-journal, beside it, has the bytes that were there."
        fix = f"pip install 'ckpt-tools<0.2', and put them back: ckpt repair {shlex.quote(str(path))}"
        return DamagedFileError(f"{path} is half edited: an edit in place by an older ckpt was interrupted.", why=why, fix=fix)
    for at, magic, kind, fix in _KINDS:
        if head.startswith(magic, at):
            return NotACheckpointError(f"{path} is {kind}, not a checkpoint.", fix=fix)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        size = re.search(rb"^size (\d+)", head, re.MULTILINE)
        real = f" The real file has {size.group(1).decode()} bytes." if size else ""
        what, why = f"{path} is a git-LFS pointer, not the file itself.", f"git cloned the pointer only.{real}"
        return NotACheckpointError(what, why=why, fix="Run: git lfs pull")
    if not any(head) and not any(any(source.read(at, min(1 << 20, source.size - at))) for at in range(0, source.size, 1 << 20)):
        return NotACheckpointError(
            f"{path} holds {source.size} zero bytes: it was never written.",
            why="A disk that was full, or a copy that was interrupted, leaves such files.",
            fix="Get the file again.",
        )
    if LEGACY_MAGIC.replace(b"\n", b"\r\n") in head[:32] and (error := text_mode(source)):
        return error
    if has_end(source):
        return NotACheckpointError(
            f"{path} has other bytes in front of a zip archive.", why="torch reads archives from the first byte on only.",
            fix=f"Write it without them: {mending('repair', str(path))}",
        )  # fmt: skip
    return _text(path, head)


def text_mode(source: Source) -> DamagedFileError | None:
    """The error for a file that a text-mode transfer went over, None where none did. No other file lacks a bare line feed."""
    head = source.read(0, min(source.size, 1 << 20))
    if b"\r\n" not in head or b"\n" in head.replace(b"\r\n", b""):
        return None
    fix = f"Transfer it again in binary mode, or undo it: {mending('repair', str(source.path))}"
    what, why = f"{source.path} was damaged by a text-mode transfer.", "Every line feed has a carriage return before it."
    return DamagedFileError(what, why=why, fix=fix)


def unknown(source: Source, head: bytes) -> CkptError:
    return NotACheckpointError(f"{source.path} is not a checkpoint.", why=f"It begins with {head[:16]!r}. {_READS}")


def _text(path: Path, head: bytes) -> CkptError | None:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    first = start.splitlines()[0][:80].decode("utf-8", "replace") if start else ""
    if re.match(rb"<(!doctype html|html|head|body)", start, re.IGNORECASE):
        title = re.search(rb"<title[^>]*>(.*?)</title", head, re.IGNORECASE | re.DOTALL)
        named = f" Its title is {title.group(1).strip().decode('utf-8', 'replace')[:80]!r}." if title else ""
        return NotACheckpointError(
            f"{path} is a web page, not a checkpoint.", why=f"The server sent a page in place of the file.{named}",
            fix="Download the file itself.",
        )  # fmt: skip
    if start[:1] in (b"{", b"[", b"<") and b"\0" not in start[:8]:
        kind = "XML" if start[:1] == b"<" else "JSON"
        return NotACheckpointError(f"{path} is {kind} text, not a checkpoint.", why=f"It begins with {first!r}.")
    return None
