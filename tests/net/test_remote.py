"""Files behind an address: what comes is the file that is there, in few bytes; bytes that change meanwhile are refused."""

import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError, MissingFileError, RemoteError
from tests.support.servers import Handler, Server

LARGE = 100_000


def state(number: float = 1.0) -> dict[str, torch.Tensor]:
    """Tensors of 400 KB each."""
    return {f"module.{name}.w": torch.full((LARGE,), number + place) for place, name in enumerate("abcd")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files in every container that is read in ranges."""
    torch.save(state(), tmp_path / "zip.pth")
    save_file(state(), tmp_path / "one.safetensors")
    ckpt_tools.convert(tmp_path / "zip.pth", tmp_path / "shards", shard_size="500KB")
    return tmp_path


@pytest.mark.parametrize("name", ["zip.pth", "one.safetensors", "shards/model.safetensors.index.json"])
def test_what_is_there(name: str, folder: Path, server: Server) -> None:
    """Listed in few bytes, converted as the local file is, each byte fetched once."""
    size = sum(path.stat().st_size for path in (folder / name).parent.glob("*") if name.startswith("shards")) or (
        (folder / name).stat().st_size
    )
    assert [row["name"] for row in ckpt_tools.inspect(server.url(name)).tensors] == list(state())
    assert server.sent < size / 4
    server.sent = 0
    ckpt_tools.convert(server.url(name), folder / "out.safetensors", strip_module=True)
    assert size - 5000 <= server.sent <= 1.2 * size
    local = folder / name if name != "shards/model.safetensors.index.json" else folder / "shards"
    ckpt_tools.convert(local, folder / "local.safetensors", strip_module=True)
    assert (folder / "out.safetensors").read_bytes() == (folder / "local.safetensors").read_bytes()
    loaded = ckpt_tools.torch.load_state_dict(server.url(name))
    assert all(torch.equal(loaded[key.removeprefix("module.")], value) for key, value in state().items())


def other(server: Server, path: Path, write: Any, **more: torch.Tensor) -> None:
    """Another file under the same name, and the server tells it."""
    write(state(7.0) | more, path)
    server.tag = "two"


def no_ranges(server: Server, path: Path, write: Any) -> None:
    """The server gives whole files now, and another one."""
    server.ranges = False
    other(server, path, write)


CHANGES: dict[str, Callable[[Server, Path, Any], object]] = {
    "bytes": other, "whole": no_ranges, "gone": lambda server, path, _: path.unlink(),
    "size": lambda server, path, write: other(server, path, write, more=torch.zeros(9)),
    "untold": lambda server, path, write: write(state(7.0), path),  # and no tags from the beginning
    "cut": lambda server, path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),  # the tag stays
}  # fmt: skip


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["zip.pth", "one.safetensors"])
def test_bytes_that_change_between_ranges(
    name: str, change: str, after: int, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a number of ranges another file is there: an error, and no output of two files' bytes."""
    path, write = folder / name, torch.save if name == "zip.pth" else save_file
    server.tag = "" if change == "untold" else "one"
    answers = Handler.do_GET

    def answer(self: Handler) -> None:
        if len(server.requests) == after:
            CHANGES[change](server, path, write)
        answers(self)

    monkeypatch.setattr(Handler, "do_GET", answer)  # the server's, not ours
    try:
        ckpt_tools.convert(server.url(name), folder / "out.safetensors")
    except CkptError:
        assert not (folder / "out.safetensors").exists()
        return
    found = load_file(folder / "out.safetensors")  # all was read before: then it is one file, the old or the new
    firsts = [found[key][0].item() for key in state()]
    assert len(server.requests) <= after or firsts in ([1, 2, 3, 4], [7, 8, 9, 10])
    assert len({first - place for place, first in enumerate(firsts)}) == 1


# The header of a range, and how many bytes of its body are missing.
LIES = {
    "shifted": ("bytes {next}-{end}/{size}", 0), "other-size": ("bytes {start}-{end}/{less}", 0), "no-size": ("nonsense", 0),
    "star": ("bytes */{size}", 0), "short-body": ("bytes {start}-{end}/{size}", 7),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_ranges_that_are_others(name: str, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second range on the server tells or sends another: refused."""
    path, (header, lost), size = folder / "zip.pth", LIES[name], (folder / "zip.pth").stat().st_size
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers = Handler.do_GET

    def answer(self: Handler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or len(server.requests) < 2:
            answers(self)
            return
        server.requests.append(self.headers["Range"])
        start, end = int(asked[1]), min(int(asked[2]), size - 1)
        body = path.read_bytes()[start : end + 1 - lost]
        self.send_response(206)
        told = header.format(start=start, end=end, size=size, next=start + 1, less=size - 1)
        for key, value in {"Content-Range": told, "Content-Length": str(len(body)), "ETag": server.tag}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    monkeypatch.setattr(Handler, "do_GET", answer)
    with pytest.raises(RemoteError):
        ckpt_tools.convert(server.url("zip.pth"), folder / "out.pth")
    assert not (folder / "out.pth").exists()


def test_a_server_without_tags(folder: Path, server: Server) -> None:
    """What does not change is converted as ever; it is read twice."""
    server.tag = ""
    ckpt_tools.convert(server.url("one.safetensors"), folder / "out.safetensors")
    assert load_file(folder / "out.safetensors").keys() == state().keys()
    assert server.sent > 2 * (folder / "one.safetensors").stat().st_size


def test_failures_that_pass_and_that_do_not(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server is asked again after every answer that may mend, a missing file is told; a moved one is followed."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    for code in (500, 502, 503, 429):
        monkeypatch.setattr(Handler, "send_error", lambda self, _, code=code: BaseHTTPRequestHandler.send_error(self, code))
        server.failures = 2
        assert len(ckpt_tools.inspect(server.url("zip.pth")).tensors) == 4
    monkeypatch.undo()
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.failures = 100
    with pytest.raises(RemoteError):
        ckpt_tools.inspect(server.url("zip.pth"))
    server.failures = 0
    with pytest.raises(MissingFileError):
        ckpt_tools.inspect(server.url("nothing.pth"))
    assert len(ckpt_tools.inspect(server.url("moved/zip.pth")).tensors) == 4


def test_an_index_over_http_may_not_lead_away(folder: Path, server: Server) -> None:
    """Names in a remote index are names of files beside it."""
    index = folder / "shards" / "model.safetensors.index.json"
    text = index.read_text()
    for name in ("../one.safetensors", "%2e%2e/one.safetensors", "http://127.0.0.1:1/x.safetensors", "/etc/passwd"):
        index.write_text(re.sub(r"model-00001-of-\d+\.safetensors", name, text))
        with pytest.raises(CkptError):
            ckpt_tools.inspect(server.url("shards/model.safetensors.index.json"))
