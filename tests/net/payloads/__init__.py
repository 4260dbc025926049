"""Files by their bytes and what `scan` says of each: payloads.txt has those that mean harm, honest.txt objects of libraries.

A row has, with tabs between: the verdict, a name, what is told first, and the bytes in hex, where `(00){512}` is 512 times 00.
`dangerous/needs-code` is an honest object that is called dangerous: it may become less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import ckpt_tools

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
        data = re.sub(r"\((\w+)\)\{(\d+)\}", lambda match: match[1] * int(match[2]), written)
        found.append(Row(verdict, name, told, bytes.fromhex(data)))
    return found


def judged(path: Path, name: str = "") -> Row:
    """What `scan` says of a file, as a row."""
    found = ckpt_tools.scan(path)[0].to_json()
    told = [f"{call['does']} {call['call']}" for call in found["calls"][:1]]
    return Row(found["verdict"], name, "".join(told), path.read_bytes())
