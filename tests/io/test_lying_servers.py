"""Servers that lie, stall or lead elsewhere: an error of ours, soon; and honest addresses that are not ASCII."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest

import ckpt_tools
from ckpt_tools.errors import RemoteError
from tests.support.samples import FIXTURES

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
    """An answer that leads elsewhere."""
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
    """A public server does not send us to this machine or its network."""
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
