"""docs/try.html: a file is looked into and converted in the browser (Chromium, else node; skipped where there is neither)."""

import functools
import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools.errors import CkptError
from docs import in_page, pyz, try_page
from tests.support.browser import CHROMIUM, Browser
from tests.support.samples import FIXTURES, PTH, SAFETENSORS

ROOT = Path(__file__).parents[2]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


class Handler(http.server.SimpleHTTPRequestHandler):
    """A plain static server, without a log."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page and what it loads, as `make docs` puts them."""
    package = try_page.pyodide()
    if package is None:
        pytest.skip("npm, or its package of Pyodide, is not to be had here")
    folder = tmp_path_factory.mktemp("site")
    for name in try_page.PAGE:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "docs" / name, folder / name)
    try_page.put(package, pyz.archive(), folder)
    return folder


class Tab(Browser):
    """The page in a browser, served from this machine."""

    def show(self, address: str, downloads: Path) -> None:
        """Open the page; files are saved to `downloads`."""
        session, self.session = self.session, None
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        self.session = session
        self.events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.events:
            self._receive()

    def choose(self, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def wait_for(self, expression: str, seconds: float = 120) -> str:
        """The value of an expression, once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < until, self.run("document.body.innerText")
            time.sleep(0.1)
        return str(value)


STATUS = 'document.getElementById("status").textContent'
MADE = f'document.getElementById("made").textContent || (/\\.\\.\\./.test({STATUS}) ? "" : {STATUS})'
DONE = f'!document.getElementById("actions").hidden || (/\\.\\.\\./.test({STATUS}) ? "" : {STATUS})'


@pytest.fixture
def tab(site: Path, tmp_path: Path) -> Iterator[tuple[Tab, str]]:
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with Tab(tmp_path / "profile") as opened:
            yield opened, f"http://127.0.0.1:{server.server_port}/try.html"
        server.shutdown()


@needs_browser
def test_a_file_is_shown_and_converted_in_the_browser(tab: tuple[Tab, str], tmp_path: Path) -> None:
    """inspect, scan and check show what they print; both downloads are the bytes that `ckpt convert` writes; no complaint."""
    page, address = tab
    page.show(address, tmp_path)
    page.choose(FIXTURES / "ddp.pth")
    page.wait_for(DONE)
    text = page.run('document.getElementById("results").innerText')
    assert "wrapped in 'module.'" in text
    assert "ddp.pth: plain" in text
    assert "match their CRC-32" in text
    for button, name in (("strip", "ddp.plain.pth"), ("safetensors", "ddp.safetensors")):
        page.run(f'document.getElementById("{button}").click()')
        assert name in page.wait_for(MADE)
        ckpt_tools.convert(FIXTURES / "ddp.pth", tmp_path / f"native_{name}", unwrap=True)
        expected, until = (tmp_path / f"native_{name}").read_bytes(), time.monotonic() + 20
        while not (tmp_path / name).exists() or (tmp_path / name).stat().st_size != len(expected):
            assert time.monotonic() < until
            page.run("1")
            time.sleep(0.1)
        assert (tmp_path / name).read_bytes() == expected
    assert page.errors == []


@needs_browser
def test_rubbish_gets_the_sentence_of_inspect(tab: tuple[Tab, str], tmp_path: Path) -> None:
    """A file that is no checkpoint is named as `ckpt inspect` names it, and is not converted; the next file works."""
    page, address = tab
    page.show(address, tmp_path)
    rubbish = tmp_path / "<b>notes.txt"
    rubbish.write_text("hello")
    page.choose(rubbish)
    assert page.wait_for(DONE) == "This file cannot be opened as a checkpoint; the reason is below."
    with pytest.raises(CkptError) as refused:
        ckpt_tools.inspect(rubbish)
    sentence = str(refused.value).splitlines()[0].removeprefix(f"{tmp_path}/")
    assert sentence in page.run('document.getElementById("results").innerText')
    assert page.run('document.getElementById("results").querySelector("b") === null')
    page.choose(FIXTURES / "single.pth")
    page.wait_for('document.getElementById("results").innerText.includes("match their CRC-32")')
    assert page.errors == []


@needs_browser
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("delete window.WebAssembly", "This browser has no WebAssembly, which this page needs."),
        (
            "window.Worker = class { postMessage() {} terminate() {} }; const later = setTimeout;"
            "window.setTimeout = (call, time) => later(call, time / 100)",
            "no answer for 15 seconds",
        ),
    ],
)
def test_what_a_browser_lacks_is_said(tab: tuple[Tab, str], tmp_path: Path, script: str, said: str) -> None:
    """Without WebAssembly there is one line; a worker that does not answer is named after 15 seconds."""
    page, address = tab
    page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.show(address, tmp_path)
    if "Worker" in script:
        page.choose(FIXTURES / "single.pth")
    page.wait_for(f"{STATUS}.includes({json.dumps(said)})", 20)


@pytest.mark.parametrize("path", [*PTH, *SAFETENSORS], ids=lambda path: path.name)
@pytest.mark.parametrize("to", ["strip", "safetensors"])
def test_parts_are_what_convert_writes(path: Path, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New bytes and slices of the old file, one behind the other, are the file that the page's command writes."""
    monkeypatch.setattr(in_page, "FOLDER", path.parent)
    monkeypatch.chdir(path.parent)
    in_page.run("inspect", path.name)
    made = in_page.convert(to)
    if "parts" not in made:
        assert made["text"]
        return
    old = path.read_bytes()
    new = b"".join(part if isinstance(part, bytes) else old[part[0] : sum(part)] for part in made["parts"])
    target = tmp_path / made["name"]
    command = made["command"].split()
    select = command[command.index("--select") + 1] if "--select" in command else None
    ckpt_tools.convert(path, target, unwrap=True, select=select, objects="plain" if "--objects" in command else None)
    assert new == target.read_bytes()
