"""A headless Chromium, driven over its DevTools pipe with nothing but the standard library."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads commands from descriptor 3 and answers on 4.
_START = """
import os, sys
for _ in range(5): os.dup(0)  # so that the copies below are neither 3 nor 4
for number, place in [(os.dup(int(number)), place) for number, place in zip(sys.argv[1:3], (3, 4))]: os.dup2(number, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page. `errors` collects what its console complains about, exceptions included."""

    def __init__(self, folder: Path) -> None:
        to_child, self.write_end = os.pipe()
        self.read_end, from_child = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_child), str(from_child), str(CHROMIUM), *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self.pending, self.number, self.session = b"", 0, None
        self.errors: list[str] = []
        self.events: list[str] = []

    def __enter__(self) -> Self:
        (page,) = (row for row in self.call("Target.getTargets")["targetInfos"] if row["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.write_end)
        os.close(self.read_end)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.pending:
            data = os.read(self.read_end, 1 << 16)
            assert data, "the browser has gone"
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        if method:
            self.events.append(method)
        return message

    def open(self, page: Path, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Show a page at a size and in a theme, and wait until its script has run."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self.events:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path) -> None:
        """A picture of what is in view."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
