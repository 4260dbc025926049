"""Files by their bytes: payloads.txt has those that mean harm, honest.txt objects of libraries, refused.txt broken checkpoints,
read.txt odd ones that are read.

A row of the first two has, with tabs between: the verdict of `scan`, a name, what is told first, and the bytes in hex, where
`(00){512}` is 512 times 00. `dangerous/needs-code` is an honest object that is called dangerous: it may become less.
A row of the third has: the error, a name, the file's name, what the bytes are (the file; `safetensors` or
`torch`: a file that these refuse too; `pickle` or `torch-pickle`: that of a torch-zip with six floats), words of the message
with ` | ` between, and the bytes. A row of the fourth: a name, the file's name, `file` or `pickle`, tensors, bytes.
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import ckpt_tools
from ckpt_tools import errors
from ckpt_tools.errors import CkptError
from tests.hostile.zips import torch_zip

_REPEATED = re.compile(rb"(?s)(.{1,12}?)\1{5,}")


@dataclass(frozen=True)
class Row:
    """A file, and what is said of it."""

    verdict: str
    name: str
    told: str
    data: bytes

    @property
    def line(self) -> str:
        """As it stands in the table."""
        parts, at = [], 0
        for match in _REPEATED.finditer(self.data):
            if match.end() - match.start() >= 16:
                parts.append(self.data[at : match.start()].hex())
                parts.append(f"({match[1].hex()}){{{(match.end() - match.start()) // len(match[1])}}}")
                at = match.end()
        return "\t".join([self.verdict, self.name, self.told, "".join(parts) + self.data[at:].hex()])


def rows(table: str) -> list[Row]:
    """The rows of a table."""
    found = []
    for line in Path(__file__).with_name(f"{table}.txt").read_text("utf-8").splitlines():
        verdict, name, told, written = line.split("\t")
        found.append(Row(verdict, name, told, unhex(written)))
    return found


def unhex(written: str) -> bytes:
    """The bytes of a row."""
    return bytes.fromhex(re.sub(r"\((\w+)\)\{(\d+)\}", lambda match: match[1] * int(match[2]), written))


@dataclass(frozen=True)
class Refused:
    """A file that is refused: the class of the error, and words of its message."""

    error: type[CkptError]
    name: str
    file: str
    words: list[str]
    data: bytes
    reference: str  # "torch" or "safetensors" where these refuse it too


def refused() -> list[Refused]:
    """The rows of refused.txt."""
    found = []
    for line in Path(__file__).with_name("refused.txt").read_text("utf-8").splitlines():
        if not line.startswith("# "):
            error, name, file, kind, words, written = line.split("\t")
            reference = kind.partition("-")[0].replace("file", "").replace("pickle", "")
            found.append(Refused(getattr(errors, error), name, file, words.split(" | "), whole(kind, written), reference))
    return found


def read() -> list[tuple[str, str, list[str], bytes]]:
    """The rows of read.txt: a name, the file's name, the paths of its tensors, the bytes."""
    lines = Path(__file__).with_name("read.txt").read_text("utf-8").splitlines()
    split = (line.split("\t") for line in lines)
    return [(name, file, where.split(" | "), whole(kind, written)) for name, file, kind, where, written in split]


def whole(kind: str, written: str) -> bytes:
    """The file, where a pickle alone is written too."""
    return torch_zip(unhex(written), {"0": struct.pack("<6f", *range(6))}) if "pickle" in kind else unhex(written)


def judged(path: Path, name: str = "") -> Row:
    """What `scan` says of a file, as a row."""
    found = ckpt_tools.scan(path)[0].to_json()
    told = [f"{call['does']} {call['call']}" for call in found["calls"][:1]]
    return Row(found["verdict"], name, "".join(told), path.read_bytes())
