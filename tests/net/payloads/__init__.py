"""Files by their bytes: payloads.txt has those that mean harm, honest.txt objects of libraries, refused.txt broken checkpoints.

A row of the first two has, with tabs between: the verdict of `scan`, a name, what is told first, and the bytes in hex, where
`(00){512}` is 512 times 00. `dangerous/needs-code` is an honest object that is called dangerous: it may become less.
A row of the third has: the error, a name, the file's name, what the bytes are (the file; `safetensors`: a file that safetensors
refuses too; `pickle`: that of a torch-zip with six floats), words of the message with ` | ` between, and the bytes.
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
    reference: bool  # safetensors refuses it too


def refused() -> list[Refused]:
    """The rows of refused.txt."""
    found = []
    for line in Path(__file__).with_name("refused.txt").read_text("utf-8").splitlines():
        if not line.startswith("# "):
            error, name, file, kind, words, written = line.split("\t")
            data = torch_zip(unhex(written), {"0": struct.pack("<6f", *range(6))}) if kind == "pickle" else unhex(written)
            found.append(Refused(getattr(errors, error), name, file, words.split(" | "), data, kind == "safetensors"))
    return found


def judged(path: Path, name: str = "") -> Row:
    """What `scan` says of a file, as a row."""
    found = ckpt_tools.scan(path)[0].to_json()
    told = [f"{call['does']} {call['call']}" for call in found["calls"][:1]]
    return Row(found["verdict"], name, "".join(told), path.read_bytes())
