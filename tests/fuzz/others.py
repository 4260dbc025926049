"""Inputs that are not checkpoints: plans, indexes of shards, answers of servers. Each is mutated, and used as a user would."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest import mock

import torch
from safetensors.torch import save

import ckpt_tools
from tests.fuzz import beside, folders, headers, raw
from tests.fuzz.raw import number, text

_PLAN = """format = "ckpt-plan-1"
drop = ["c.weight"]
unexpected = []
missing = []

[[tensor]]
old = "a.weight"
new = "x.weight"
step = "copy"
reason = "structure"
confidence = 0.9
shape = [2, 3]
to = [2, 3]

[[tensor]]
old = "b.weight"
new = ["y.weight", "z.weight"]
step = "split"
reason = "rule"
shape = [4, 2]
to = [[2, 2], [2, 2]]
"""
_TOML = (
    "[[tensor]]\n", "[a.b]\n", '"', "'''", "= ", "{", "}", "[", "]", "a." * 200 + "b = 1\n", "1979-05-27T07:32:00Z", "inf",
    "\\u202e", "\\ud800", "[" * 300, "step = 'concat'\n", "9" * 5000, "nan", "true", "{a = {b = 1}}", "\n", "#", "\x00", "0x1f",
)  # fmt: skip
_STATE = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, 2), "c.weight": torch.ones(1)}
_SHARDS = {"1.safetensors": {"a.weight": torch.ones(2, 3)}, "2.safetensors": {"b.weight": torch.zeros(4, 2)}}
_INDEX = {
    "metadata": {"total_size": 56, "ckpt_tools.order": "1"},
    "weight_map": {name: file for file, state in _SHARDS.items() for name in state},
}
_FIELDS = (
    b"Content-Length: 1\r\n", b"Content-Length: " + b"9" * 5000 + b"\r\n", b"Content-Length: -5\r\n", b"ETag: \xe9\r\n",
    b"Content-Length: \xc2\xb2\r\n", b"Content-Range: bytes 0-1/5\r\n", b"Content-Range: bytes */*\r\n",
    b"Location: http://[::1\r\n", b"Location: ftp://a/b\r\n", b"Location: http://a:99999999/\r\n", b"Location: \xff\xfe\r\n",
    b"Location: http://x.invalid/%2e%2e/\r\n", b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n",
    b"X: " + b"y" * 70000 + b"\r\n", b": \r\n", b"\0\r\n",
)  # fmt: skip
_STATUS = (
    b"200 OK", b"206 ", b"301 x", b"302 \x1b[1m", b"404 " + b"n" * 900, b"416 ", b"100 Continue", b"99999 x", b"", b"500 x",
)  # fmt: skip


def plan(rng: Random, folder: Path) -> Callable[[], object]:
    """A conversion by a plan."""
    changed = _PLAN
    for _ in range(rng.choice((1, 1, 2, 4))):
        pick, at = rng.random(), rng.randrange(len(changed) + 1)
        if pick < 0.5:
            changed = changed[:at] + rng.choice(_TOML) + changed[at + rng.choice((0, 0, 1, 5)) :]
        elif pick < 0.7:
            lines = changed.splitlines(keepends=True)
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            changed = "".join(lines)
        else:
            spots = list(re.finditer(r'\d+|"[^"]*"', changed))
            spot = rng.choice(spots)
            put = json.dumps(text(rng)) if spot[0].startswith('"') else str(number(rng, int(spot[0][:40])))
            changed = changed[: spot.start()] + put + changed[spot.end() :]
    path = folder / "plan.toml"
    path.write_bytes(changed.encode("utf-8", "surrogatepass"))
    torch.save(_STATE, folder / "in.pth")
    return lambda: ckpt_tools.convert(folder / "in.pth", folder / "out.pth", plan=path, overwrite=True)


def index(rng: Random, folder: Path) -> Callable[[], object]:
    """Shards by their index, of safetensors or of torch."""
    torchs = rng.random() < 0.4
    index = json.dumps(_INDEX).replace(".safetensors", ".bin" if torchs else ".safetensors").encode()
    data = raw.mutate(rng, index, index) if rng.random() < 0.2 else headers.mutate_json(rng, index)
    path = folder / ("pytorch_model.bin.index.json" if torchs else "model.safetensors.index.json")
    path.write_bytes(data)
    for name, state in _SHARDS.items():
        if torchs:
            torch.save(state, folder / name.replace(".safetensors", ".bin"))
        else:
            (folder / name).write_bytes(save(state))
    return lambda: ckpt_tools.inspect(path if rng.random() < 0.7 else folder)


def answer(rng: Random, folder: Path) -> Callable[[], object]:
    """What a server says of a file."""
    buffer = io.BytesIO()
    torch.save(_STATE, buffer)
    content, seed, once = buffer.getvalue(), rng.random(), rng.random() < 0.5

    def look() -> object:
        answers = _answers(Random(seed), content, once=once)
        connect = mock.patch.object(socket, "create_connection", side_effect=lambda *_, **__: _Socket(answers))
        places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))]  # of whatever a server leads to
        with connect, mock.patch("time.sleep"), mock.patch.object(socket, "getaddrinfo", return_value=places):
            return ckpt_tools.inspect("http://127.0.0.1:9/model.pth")

    return look


def _answers(rng: Random, content: bytes, *, once: bool) -> Callable[[bytes], bytes]:
    """A server: from a request to bytes, which are as they should be but for a mutation, of the first answer or of all."""
    count = 0

    def give(request: bytes) -> bytes:
        nonlocal count
        count += 1
        found = re.search(rb"Range: bytes=(\d+)-(\d+)", request)
        start, end = (int(found[1]), min(int(found[2]) + 1, len(content))) if found else (0, len(content))
        place = b"Content-Range: bytes %d-%d/%d" % (start, end - 1, len(content))
        size = b"Content-Length: %d" % (end - start)
        head = b"".join(line + b"\r\n" for line in (b"HTTP/1.1 206 Partial Content", place, size, b'ETag: "1"'))
        good = head, content[start:end]
        return b"\r\n".join(good if once and count > 1 else _changed(rng, *good))

    return give


def _changed(rng: Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    pick = rng.random()
    if pick < 0.4:
        lines = head.splitlines(keepends=True)
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(_FIELDS))
        head = b"".join(lines)
    elif pick < 0.6:
        head = re.sub(rb" \d\d\d [^\r]*", b" " + rng.choice(_STATUS), head, count=1)
        head += rng.choice(_FIELDS) if rng.random() < 0.6 else b""
    elif pick < 0.8:
        spot = rng.choice(list(re.finditer(rb"\d+", head)))
        head = head[: spot.start()] + str(number(rng, int(spot[0]))).encode() + head[spot.end() :]
    elif pick < 0.9:
        head = raw.mutate(rng, head, body)
    else:
        body = raw.mutate(rng, body, head)
    return head, body


class _Socket:
    """A connection that was never made: what is sent is answered at once."""

    def __init__(self, answers: Callable[[bytes], bytes]) -> None:
        self.answers, self.sent = answers, b""

    def sendall(self, data: bytes) -> None:
        """Take a part of the request."""
        self.sent += bytes(data)

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        """The answer."""
        return io.BufferedReader(io.BytesIO(self.answers(self.sent)))

    def setsockopt(self, *_: object) -> None:
        """Nothing to set."""

    settimeout = close = shutdown = setsockopt


KINDS: tuple[Callable[[Random, Path], Callable[[], object]], ...] = (
    plan, index, answer, folders.folder, beside.adapter, beside.quantised, beside.signature,
    beside.packed,
)  # fmt: skip
