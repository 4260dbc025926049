"""What a file is when it is not a checkpoint that we read, told from its first bytes: one sentence each."""

from __future__ import annotations

import re

from ckpt_tools.errors import CkptError, DamagedFileError, NotACheckpointError
from ckpt_tools.formats.compressed import KINDS
from ckpt_tools.formats.zip_directory import has_end
from ckpt_tools.io.source import Source
from ckpt_tools.tree.findings import mending

# What torch wrote before 1.6: the pickled magic number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ASK, _UNPACK = "Ask for the PyTorch weights that it was made of.", "Unpack it first."
_KINDS = (  # how it begins, what it is, why, what helps
    *((re.escape(kind.magic), kind.called, "", _UNPACK) for kind in KINDS if isinstance(kind.magic, bytes)),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "", _UNPACK),
    (rb"Rar!", "a RAR archive", "", _UNPACK),
    (rb"\x89PNG", "a PNG picture", "", ""),
    (rb"\xff\xd8\xff", "a JPEG picture", "", ""),
    (rb"%PDF", "a PDF document", "", ""),
    (rb"\x7fELF", "a program", "", ""),
    (rb"\xffCKP", "half edited in place by ckpt 0.1", "The bytes that were there are in the .ckpt-journal beside it.",
     "pip install 'ckpt-tools<0.2', and: ckpt repair FILE"),
    (rb".{4}TFL3", "a TensorFlow Lite model", "", _ASK),  # behind a flatbuffer's first offset
    (rb".{4}ET12", "an ExecuTorch program", "", _ASK),
    (rb"version https://git-lfs\.github\.com/spec/", "a git-LFS pointer", "git cloned the pointer only.", "Run: git lfs pull"),
    (rb"(?:\xef\xbb\xbf)?\s*<(?i:!doctype html|html|head|body)", "a web page", "The server sent a page in place of the file.",
     "Download the file itself."),
)  # fmt: skip
_TEXT = re.compile(rb"(?:\xef\xbb\xbf)?\s*([\[{<](?![^\0]{0,6}\0).*)")
_READS = "ckpt reads what torch.save writes and wrote, safetensors, GGUF, ONNX, Flax's msgpack, pickles, NumPy's .npz and .npy."


def recognise(source: Source, head: bytes) -> CkptError | None:
    path = source.path
    if not head:
        return NotACheckpointError(f"{path} is an empty file.", why="The program that should have written it wrote nothing.")
    for start, kind, why, fix in _KINDS:
        if re.match(start, head, re.DOTALL):
            title = re.search(rb"(?is)<title[^>]*>\s*(.*?)\s*</title", head) if kind == "a web page" else None
            why += f" Its title is {title[1][:80].decode('utf-8', 'replace')!r}." if title is not None else ""
            return NotACheckpointError(f"{path} is {kind}, not a checkpoint.", why=why, fix=fix)
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
    if found := _TEXT.match(head):
        kind, first = "XML" if found[1].startswith(b"<") else "JSON", found[1][:80].decode("utf-8", "replace")
        return NotACheckpointError(f"{path} is {kind} text, not a checkpoint.", why=f"It begins with {first!r}.")
    return None


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
