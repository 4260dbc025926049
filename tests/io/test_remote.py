"""Remote paths: by ranges over HTTP, through fsspec elsewhere; nothing half is left; servers that lie are told."""

import contextlib
import io
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckpt_tools
from ckpt_tools import CkptError, convert, inspect
from ckpt_tools.errors import OutputError, OutputExistsError, RemoteError
from ckpt_tools.torch import load_state_dict
from tests.support.commands import ckpt
from tests.support.graphs import assert_same
from tests.support.samples import FIXTURES
from tests.support.servers import Handler, Server


def small(path: Path) -> dict[str, torch.Tensor]:
    state = {"a.w": torch.randn(100, 100), "b.w": torch.arange(7)}
    torch.save(state, path)
    return state


def test_a_server_without_ranges(server: Server, tmp_path: Path) -> None:
    """A small file is taken whole, once; a large one is refused with what to do."""
    small(tmp_path / "in.pth")
    server.ranges = False
    assert len(inspect(server.url("in.pth")).tensors) == 2
    assert len(server.requests) == 1
    (tmp_path / "big.pth").touch()
    os.truncate(tmp_path / "big.pth", 1 << 30)
    with pytest.raises(RemoteError, match="ignores range requests") as caught:
        inspect(server.url("big.pth"))
    assert "Download it" in caught.value.fix


def test_an_address_behind_a_redirect_runs_out(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used as long as it is good, and then asked for again; what is refused at once stays refused."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    torch.save({"a.w": torch.randn(2_000_000)}, tmp_path / "in.pth")
    answers = Handler.do_GET

    def answer(self: Handler) -> None:
        server.ticket = "second" if len(server.requests) > 4 else "first"
        answers(self)

    monkeypatch.setattr(Handler, "do_GET", answer)
    convert(server.url("moved/in.pth"), tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "in.pth"), torch.load(tmp_path / "out.pth"))
    with pytest.raises(RemoteError) as caught:
        inspect(server.url("in.pth?third"))
    assert "403" in caught.value.why


# --- fsspec


def test_down_and_up(memory: Any, tmp_path: Path) -> None:
    """What any driver of fsspec opens is read, converted down, and written up whole."""
    state = small(tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", "memory://models/up.pth", strip_prefix="a.")
    assert report.target == "memory://models/up.pth"
    assert list(memory.store) == ["/models/up.pth"]
    found = inspect("memory://models/up.pth")
    assert found.path == "memory://models/up.pth"
    back = torch.load(io.BytesIO(memory.cat("/models/up.pth")), weights_only=True)
    assert torch.equal(back["w"], state["a.w"])
    convert("memory://models/up.pth", "memory://models/again.safetensors", dtype="bf16")
    convert("memory://models/again.safetensors", tmp_path / "down.pth")
    assert torch.load(tmp_path / "down.pth", weights_only=True)["w"].dtype == torch.bfloat16


def content(memory: Any, folder: str) -> dict[str, bytes]:
    return {name.removeprefix(folder + "/"): memory.cat(name) for name in memory.find(folder)}


@pytest.mark.parametrize("format", ["safetensors", "pth"])
def test_a_remote_folder_of_shards(memory: Any, tmp_path: Path, format: Any) -> None:
    """Shards go to an address as they go to a disk: the same names and bytes."""
    state = {f"t{i}.w": torch.randn(30, 30) for i in range(5)}
    torch.save(state | {"tied": state["t0.w"]}, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", "memory://runs/new", shard_size=4000, format=format)
    convert(tmp_path / "in.pth", tmp_path / "near", shard_size=4000, format=format)
    assert content(memory, "/runs/new") == {path.name: path.read_bytes() for path in (tmp_path / "near").iterdir()}
    assert report.files == (5 if format == "pth" else 6)  # a tied name is a tensor of its own in safetensors
    with pytest.raises(OutputExistsError, match="not empty"):
        convert(tmp_path / "in.pth", "memory://runs/new", shard_size=4000, format=format, overwrite=True)
    memory.pipe("/runs/a-file", b"")
    convert("memory://runs/new", tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    assert torch.equal(back["tied"], back["t0.w"])
    with pytest.raises(OutputError, match="is a file"):
        convert(tmp_path / "in.pth", "memory://runs/a-file", shard_size=8000, overwrite=True)
    with pytest.raises(OutputError, match="HTTP has no upload"):
        convert(tmp_path / "in.pth", "https://example.org/folder", shard_size=8000)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_at_an_address(memory: Any, tmp_path: Path) -> None:
    """torch's writer writes it there, and torch's own reader of such places loads it; ours too."""
    state: dict[str, Any] = {"model": {"a.w": torch.randn(20, 5), "b": torch.arange(3)}, "epoch": 4}
    torch.save(state, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", "memory://runs/dcp", format="dcp")
    assert sorted(content(memory, "/runs/dcp")) == [".metadata", "__0_0.distcp"]
    target: dict[str, Any] = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}, "epoch": 0}
    dcp.load(target, storage_reader=FsspecReader("memory://runs/dcp"), no_dist=True)
    assert torch.equal(target["model"]["a.w"], state["model"]["a.w"])
    assert target["epoch"] == 4
    convert("memory://runs/dcp", tmp_path / "back.pth")
    assert torch.equal(torch.load(tmp_path / "back.pth", weights_only=True)["model"]["b"], torch.arange(3))
    with pytest.raises(OutputExistsError):
        convert(tmp_path / "in.pth", "memory://runs/dcp", format="dcp")


def test_an_index_comes_last(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({f"t{i}.w": torch.randn(30, 30) for i in range(3)}, tmp_path / "in.pth")
    asked: list[str] = []
    call = type(memory).mv

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(arguments[-1])
        return call(self, *arguments, **options)

    monkeypatch.setattr(type(memory), "mv", counted)
    convert(tmp_path / "in.pth", "memory://runs/new", shard_size=4000)
    shards = [f"/runs/new/model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert asked == [*shards, "/runs/new/model.safetensors.index.json"]


@pytest.mark.parametrize("options", [{"shard_size": 4000}, {"format": "dcp"}], ids=["shards", "dcp"])
def test_a_failed_folder_leaves_nothing(
    memory: Any, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that fails at any file, or as an index takes its place, leaves no new folder."""
    torch.save({f"t{i}.w": torch.randn(30, 30) for i in range(3)}, tmp_path / "in.pth")
    opened, left, files = type(memory).open, [0], 4 if "shard_size" in options else 2

    def broken(self: Any, path: str, mode: str = "rb", **rest: Any) -> Any:
        left[0] -= mode == "wb"
        if mode == "wb" and left[0] == 0:
            refused()
        return opened(self, path, mode, **rest)

    monkeypatch.setattr(type(memory), "open", broken)
    for number in range(1, files + 2):
        left[0] = number
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "mv", refused if number > files else type(memory).mv)
            with pytest.raises(RemoteError, match="cannot be reached"):
                convert(tmp_path / "in.pth", "memory://runs/new", **options)
        assert not memory.store
        assert not memory.exists("/runs/new")
    left[0] = 0
    convert(tmp_path / "in.pth", "memory://runs/new", **options)
    assert len(content(memory, "/runs/new")) == files


def refused(*_: Any, **__: Any) -> None:
    raise PermissionError("no")


def test_a_file_address(tmp_path: Path) -> None:
    """file:// goes through fsspec's file system of the disk, folders too."""
    state = small(tmp_path / "in.pth")
    convert(tmp_path / "in.pth", f"file://{tmp_path}/deep/new", shard_size=1000)
    assert len(os.listdir(tmp_path / "deep" / "new")) == 3
    assert torch.equal(load_state_dict(tmp_path / "deep" / "new")["a.w"], state["a.w"])


def test_a_failed_upload_leaves_nothing(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the object nor the temporary one: when the input is bad, when the driver fails, when there is one already."""
    small(tmp_path / "in.pth")
    (tmp_path / "bad.pth").write_bytes((tmp_path / "in.pth").read_bytes()[:-30])
    with pytest.raises(CkptError):
        convert(tmp_path / "bad.pth", "memory://x/out.pth")
    assert not memory.store
    convert(tmp_path / "in.pth", "memory://x/out.pth")
    with pytest.raises(OutputExistsError):
        convert(tmp_path / "in.pth", "memory://x/out.pth")
    before = memory.cat("/x/out.pth")
    opened = type(memory).open

    def broken(*arguments: Any, **options: Any) -> Any:
        file = opened(*arguments, **options)
        monkeypatch.setattr(file, "write", refused)
        return file

    monkeypatch.setattr(type(memory), "open", broken)
    with pytest.raises(RemoteError) as caught:
        convert(tmp_path / "in.pth", "memory://x/out.pth", overwrite=True)
    assert "PermissionError" in caught.value.why
    assert list(memory.store) == ["/x/out.pth"]
    assert memory.cat("/x/out.pth") == before


def test_local_paths_with_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colon in a name means nothing; a local folder that is called like a scheme is local."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    for name in ("epoch:3.pth", "s3://bucket/model.pth", "a:b"):
        small(tmp_path / name)
        assert len(inspect(name).tensors) == 2
    convert("epoch:3.pth", "s3://bucket/out.pth")
    with pytest.raises(RemoteError, match="not a scheme that fsspec knows"):
        inspect("nonsense://x/model.pth")
    assert (tmp_path / "s3:" / "bucket" / "out.pth").is_file()


def test_the_command_line(memory: Any, tmp_path: Path) -> None:
    """Addresses go through the command line as they are; local commands import no fsspec."""
    save_file({"a.w": torch.ones(2)}, tmp_path / "in.safetensors")
    result = ckpt("convert", tmp_path / "in.safetensors", "memory://d/out.pth")
    assert "wrote memory://d/out.pth" in result.stdout
    result = ckpt("inspect", "memory://d/out.pth", "memory://d/none.pth", code=3)
    assert result.stdout.startswith("memory://d/out.pth")
    assert "There is no such file." in result.stderr


Answer = Callable[[str], bytes]


class Canned(socketserver.ThreadingTCPServer):
    """Answers every request with the bytes that a function makes of its first line, and waits until the client has gone."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(socketserver.StreamRequestHandler):
    server: Canned

    def handle(self) -> None:
        line = self.rfile.readline().decode("latin-1")
        while self.rfile.readline().strip():
            pass
        with contextlib.suppress(OSError):
            self.wfile.write(self.server.answer(line))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer | bytes], Canned]]:
    """Starts servers, which end with the test; tries again are not waited for."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    running: list[Canned] = []

    def start(answer: Answer | bytes) -> Canned:
        server = Canned(answer if callable(answer) else lambda _: answer)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def partial(head: bytes, body: bytes = b"x") -> bytes:
    return b"HTTP/1.1 206 Partial Content\r\n" + head + b"\r\nConnection: close\r\n\r\n" + body


LIES = {
    "range of 5,000 digits": partial(b"Content-Range: bytes 0-1/" + b"9" * 5000),
    "length of 5,000 digits": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "digits of another script": partial("Content-Range: bytes 0-1/\u00b2".encode("latin-1")),
    "unparsable host": b"HTTP/1.1 302 Found\r\nLocation: http://[::1/x\r\nContent-Length: 0\r\n\r\n",
    "port that is none": b"HTTP/1.1 302 Found\r\nLocation: http://h:port/x\r\nContent-Length: 0\r\n\r\n",
    "raw bytes in Location": b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xfe\x80\xad/\xe9\r\nContent-Length: 0\r\n\r\n",
    "no HTTP at all": b"\xff\xfe\x00" * 9,
    "status without a number": b"HTTP/1.1 abc\r\n\r\n",
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_of_ours(serve: Callable[..., Canned], name: str) -> None:
    """Lengths that no file has, hosts that are none and raw bytes end in a RemoteError, never in a traceback."""
    with pytest.raises(RemoteError):
        ckpt_tools.inspect(serve(LIES[name]).url("model.pth"))


def leading(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.mark.parametrize("place", ["ftp://127.0.0.1/x", "file:///etc/passwd", "data:text/plain,x", "/model.pth"])
def test_redirects_to_other_schemes_are_refused(serve: Callable[..., Canned], place: str) -> None:
    """Only HTTP leads on, and encryption is not given up; what leads round and round is said to do so."""
    with pytest.raises(RemoteError, match="infinite loop" if place == "/model.pth" else r"another scheme|not allowed"):
        ckpt_tools.inspect(serve(leading(place)).url("model.pth"))


@pytest.mark.parametrize(
    "place", ["http://inside.example/x", "http://127.0.0.1/x", "http://[::1]:8000/x", "http://127%2e0%2e0%2e1/x"]
)
def test_redirects_into_a_private_network_are_refused(
    serve: Callable[..., Canned], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    server = serve(leading(place))
    known = {"public.example": "93.184.216.34", "inside.example": "10.0.0.7"}
    resolve, connect, port = socket.getaddrinfo, socket.create_connection, server.server_address[1]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve(known.get(host, host), *rest, **more))
    monkeypatch.setattr(socket, "create_connection", lambda _, *rest, **more: connect(("127.0.0.1", port), *rest, **more))
    with pytest.raises(RemoteError, match="private network"):
        ckpt_tools.inspect("http://public.example/model.pth")


def test_honest_addresses(serve: Callable[..., Canned]) -> None:
    """A name with an é, a space or raw UTF-8 in an address is asked for as a browser does."""
    asked: set[str] = set()
    data = (FIXTURES / "single.safetensors").read_bytes()

    def answer(line: str) -> bytes:
        asked.add(line.split(" ")[1])
        head = f"Content-Range: bytes 0-{len(data) - 1}/{len(data)}\r\nContent-Length: {len(data)}".encode()
        return partial(head, data)

    assert ckpt_tools.inspect(serve(answer).url("modèle é.safetensors")).tensors
    assert asked == {"/mod%C3%A8le%20%C3%A9.safetensors"}
