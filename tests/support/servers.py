"""A web server for files, which counts what it sends and can be told to behave badly."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves a folder, counts the bytes of bodies, and can be told to behave badly."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.sent, self.ranges, self.failures, self.tag = folder, 0, True, 0, "one"
        self.ticket = "first"
        self.requests: list[str] = []

    def url(self, name: str) -> str:
        """The address of a file."""
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    """GET with a range. What is below `moved/` is elsewhere: at an address with a ticket, which runs out."""

    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """One range of a file, or all of it."""
        server = self.server
        name, _, ticket = self.path.lstrip("/").partition("?")
        path = server.folder / name
        server.requests.append(self.headers.get("Range", ""))
        if server.failures:
            server.failures -= 1
            self.send_error(503)
            return
        if name.startswith("moved/"):
            self.send_response(302)
            self.send_header("Location", f"/{name.removeprefix('moved/')}?{server.ticket}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if ticket not in ("", server.ticket):
            self.send_error(403)
            return
        if not path.is_file():
            self.send_error(404)
            return
        size, start, end = path.stat().st_size, 0, path.stat().st_size
        if server.ranges and "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, size)
        partial = server.ranges and "Range" in self.headers
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        if server.tag:
            self.send_header("ETag", server.tag)
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            try:
                while start < end and (data := file.read(min(1 << 20, end - start))):
                    start += len(data)
                    server.sent += len(data)  # before whoever gets them may look
                    self.wfile.write(data)
            except ConnectionError:
                pass
