"""`ckpt report`: the page's text, and what a real browser makes of it (skipped where there is no Chromium)."""

import base64
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import inspect
from ckpt_tools.errors import UsageError
from tests.support.browser import CHROMIUM, Browser
from tests.support.commands import main
from tests.support.samples import FIXTURES, PTH, SAFETENSORS, by_name
from tests.support.terminal import run

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
HOSTILE = [
    "</script><script>window.hacked=1</script>.w", "<img src=x onerror=window.hacked=1>.w", "<!--<script>.w",
    "\u202eevil\u2028.w", "__proto__.constructor.w", "' onclick='window.hacked=1.w", "&lt;b&gt;{{ 7 * 7 }}.w",
]  # fmt: skip


def embedded(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def page(path: Path, other: Path | None = None, *, values: bool = False) -> str:
    """The page of a file, or of what differs between two."""
    with tempfile.TemporaryDirectory() as folder:
        ckpt_tools.report(path, other, output=Path(folder, "page.html"), values=values)
        return Path(folder, "page.html").read_text("utf-8")


@pytest.mark.parametrize("path", [*PTH, *SAFETENSORS], ids=by_name)
def test_every_fixture_has_a_page(path: Path) -> None:
    """Whatever a file holds, its page lists every tensor, and every number with --values."""
    data = embedded(page(path, values=True))
    assert len(data["tensors"]["name"]) == len(inspect(path).tensors)
    assert {len(values) for values in data["tensors"].values()} == {len(data["tensors"]["name"])}


def test_nothing_is_loaded_and_nothing_else_runs() -> None:
    """The policy allows the page's own script and style by digest; there is no address in it to load from."""
    text = page(FIXTURES / "single.pth")
    script, style = (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[-1] for tag in ("script", "style"))
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy.startswith("default-src &#x27;none&#x27;;")
    for part in (script, style):
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy
    assert set(re.findall(r"https?://[^\"']*", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script)


def test_findings_are_in_the_words_of_the_command_line(tmp_path: Path) -> None:
    """The library calls an argument by its name, the page by its option, as the terminal does."""
    path = tmp_path / "views.pth"
    torch.save({"a.weight": torch.ones(1 << 20)[:4]}, path)
    found = next(row for row in inspect(path).findings if row.code == "oversized-storage")
    assert "(`slim` also drops" in found.expected
    assert "(--slim also drops" in next(row["expected"] for row in embedded(page(path))["findings"])
    assert "(--slim also drops" in run("inspect", path).stdout


def hostile_file(folder: Path) -> Path:
    """Names that want to be markup, and values too."""
    path = folder / "<b>evil<b>.pth"
    torch.save(
        {"model": {name: torch.ones(2) for name in HOSTILE}, "</script><script>alert(1)": "<script>alert(2)</script>"}, path
    )
    return path


def test_hostile_names_stay_in_their_block(tmp_path: Path) -> None:
    """No name ends the data block or becomes a tag; control characters are escaped."""
    path = hostile_file(tmp_path)
    text = page(path, FIXTURES / "single.pth")
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert "<b>evil" not in text
    assert "\u202e" not in text
    assert len(embedded(text)["tensors"]["name"]) == len(HOSTILE)


def test_the_call_is_the_command(tmp_path: Path) -> None:
    """`ckpt_tools.report` writes the very page of the command, tells its size, and refuses what the command refuses."""
    single, ddp = FIXTURES / "single.pth", FIXTURES / "ddp.pth"
    seen: list[tuple[int, int]] = []
    report = ckpt_tools.report(
        single, ddp, output=tmp_path / "call.html", values=True, progress=lambda *step: seen.append(step)
    )
    command = ["report", str(single), str(ddp), "--values", "--output", str(tmp_path / "command.html")]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert (tmp_path / "call.html").read_bytes() == (tmp_path / "command.html").read_bytes()
    assert report.bytes == (tmp_path / "call.html").stat().st_size
    assert seen
    with pytest.raises(UsageError, match="`select` needs OTHER"):
        ckpt_tools.report(single, output=tmp_path / "other.html", select="model")


def test_values_that_are_not_finite_are_on_the_first_screen(tmp_path: Path) -> None:
    """With --values the overview says which tensors are not finite; the table has a legend."""
    state = {"fine": torch.ones(2), "odd": torch.tensor([1.0, float("nan")]), "large": torch.tensor(float("inf"))}
    torch.save(state, tmp_path / "odd.pth")
    torch.save({"fine": torch.ones(2), "sparse": torch.eye(2).to_sparse()}, tmp_path / "fine.pth")
    for name, said in {"odd": "not finite: odd, large", "fine": "all that were measured are finite"}.items():
        ckpt_tools.report(tmp_path / f"{name}.pth", output=tmp_path / f"{name}.html", values=True)
        data = embedded((tmp_path / f"{name}.html").read_text("utf-8"))
        assert ["values", said] in data["overview"]
        assert "NaN, inf counts" in data["legend"]
    ckpt_tools.report(tmp_path / "odd.pth", output=tmp_path / "plain.html")
    assert not embedded((tmp_path / "plain.html").read_text("utf-8"))["legend"]


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -o the page is here, an existing one stays, --select needs OTHER, and a bad file is refused."""
    runner, out = CliRunner(), tmp_path / "report.html"
    single, ddp = str(FIXTURES / "single.pth"), str(FIXTURES / "ddp.pth")
    monkeypatch.chdir(tmp_path)
    assert [runner.invoke(main, ["report", single]).exit_code for _ in range(2)] == [0, 3]
    assert (tmp_path / "single.html").exists()
    result = runner.invoke(main, ["report", single, ddp, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert embedded(out.read_text("utf-8"))["difference"]["summary"] == "The only difference is the prefix `module.`."
    assert runner.invoke(main, ["report", single, "-o", str(out)]).exit_code == 3
    assert runner.invoke(main, ["report", single, "-o", str(out), "--overwrite", "--quiet"]).output == ""
    assert runner.invoke(main, ["report", single, "-o", str(out), "--overwrite", "--select", "model"]).exit_code == 2
    assert runner.invoke(main, ["report", str(tmp_path / "none.pth"), "-o", str(out), "--overwrite"]).exit_code == 3


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    tensors = {f"blocks.{index // 4}.{index % 4}.weight": torch.zeros(1 + index % 7) for index in range(20_000)}
    tensors["blocks.77.2.weight"] = torch.ones(1000)
    save_file(tensors, folder / "large.safetensors")
    (folder / "page.html").write_text(page(folder / "large.safetensors"), "utf-8")
    return folder / "page.html"


ROWS = "document.querySelectorAll('.row').length"
FIRST = "document.querySelector('.row button').textContent"


@needs_browser
def test_twenty_thousand_tensors(browser: Browser, large: Path) -> None:
    """Only the rows in view exist; search and sort work over all of them; scrolling brings the others."""
    browser.errors.clear()
    browser.open(large)
    assert browser.run("document.documentElement.dataset.ready") == "true"
    assert browser.run("count.textContent") == "20,000 of 20,000"
    assert browser.run(ROWS) < 80
    browser.run(
        "search_ = document.getElementById('search'); search_.value = 'blocks.77.*'; search_.dispatchEvent(new Event('input'))"
    )
    assert browser.run("count.textContent") == "4 of 20,000"
    browser.run("search_.value = ''; search_.dispatchEvent(new Event('input'))")
    browser.run("[...document.querySelectorAll('#head button')].find((b) => b.textContent === 'bytes').click()")
    assert browser.run(FIRST) == "blocks.77.2.weight"
    assert browser.run("document.querySelector('[aria-sort=descending] button').textContent") == "bytes"
    browser.run("document.querySelector('#head button').click(); document.querySelector('#head button').click()")
    assert browser.run(FIRST) == "blocks.4999.3.weight"
    browser.run("document.querySelector('#head button').click()")
    assert browser.run(FIRST) == "blocks.0.0.weight"
    browser.run(
        "t = document.getElementById('table'); t.scrollTop = t.scrollHeight; new Promise((done) => setTimeout(done, 100))"
    )
    assert browser.run("[...document.querySelectorAll('.row button')].at(-1).textContent") == "blocks.4999.3.weight"
    assert browser.run(ROWS) < 80
    assert browser.errors == []


@needs_browser
def test_hostile_names_are_inert(browser: Browser, tmp_path: Path) -> None:
    """Names are shown as text in every part of the page; nothing of them runs, and the console is silent."""
    path = hostile_file(tmp_path)
    (tmp_path / "page.html").write_text(page(path, FIXTURES / "single.pth", values=True), "utf-8")
    browser.errors.clear()
    browser.open(tmp_path / "page.html")
    assert browser.run("document.documentElement.dataset.ready") == "true"
    for _ in range(3):  # into the treemap, and a detail
        browser.run("document.querySelector('.tile')?.click()")
    browser.run("document.querySelector('.row button').click()")
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("document.images.length + document.scripts.length") == 2  # the data and the page's own
    shown = browser.run("[...document.querySelectorAll('.row button')].map((button) => button.textContent)")
    assert "model.<img src=x onerror=window.hacked=1>.w" in browser.run("data.tensors.name")
    assert all("\u202e" not in name for name in shown)
    assert browser.errors == []


@needs_browser
def test_the_policy_holds(browser: Browser, large: Path) -> None:
    """A script that is put into the page does not run, and nothing can be fetched."""
    browser.open(large)
    browser.run("s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)")
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("fetch('https://example.org').then(() => 'loaded', () => 'refused')") == "refused"
    assert browser.errors  # the console says so
    browser.errors.clear()


@needs_browser
def test_treemap_findings_and_keyboard(browser: Browser, tmp_path: Path) -> None:
    """Tiles fill the field by their bytes; Enter goes in, Escape comes back; the command can be copied; details appear."""
    path = FIXTURES / "training.pth"
    (tmp_path / "page.html").write_text(page(path, values=True), "utf-8")
    browser.errors.clear()
    browser.open(tmp_path / "page.html")
    tiles = "[...document.querySelectorAll('.tile')].map((tile) => [tile.title, tile.offsetWidth * tile.offsetHeight])"
    areas = browser.run(tiles)
    assert [title.split(",")[0] for title, _ in areas] == ["optimizer", "model"]
    whole = browser.run("document.getElementById('treemap').clientWidth * document.getElementById('treemap').clientHeight")
    assert math.isclose(sum(area for _, area in areas), whole, rel_tol=0.02)
    share = inspect(path).state_dicts[0]["bytes"] / inspect(path).totals["bytes"]
    assert math.isclose(areas[1][1] / whole, share, rel_tol=0.05)
    browser.run("document.querySelector('.tile').focus()")
    browser.press("Enter", 13)
    assert browser.run("document.querySelector('#crumbs [aria-current]').textContent") == "state"
    browser.press("Escape", 27)
    browser.press("Escape", 27)
    assert browser.run("document.querySelector('#crumbs [aria-current]').textContent") == "all"
    assert "ckpt convert" in browser.run("document.querySelector('.finding code').textContent")
    browser.run("document.querySelector('.finding button').click(); new Promise((done) => setTimeout(done, 200))")
    assert browser.run("document.querySelector('.finding button').textContent") == "Copied"
    browser.run("document.querySelector('.row button').click()")
    assert browser.run("document.querySelectorAll('#detail svg rect').length") == 16
    assert browser.errors == []


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1100, True)])
def test_phone_and_dark(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    """Nothing but the table scrolls sideways, and text stands out from its ground in both themes."""
    path = FIXTURES / "training.pth"
    (tmp_path / "page.html").write_text(page(path, FIXTURES / "single.pth", values=True), "utf-8")
    browser.open(tmp_path / "page.html", width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    light = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light != dark
