"""Every how-to page is carried out: its input is made, its code fails as it says, its commands mend it, its output is shown."""

import contextlib
import io
import re
import shlex
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.commands import main

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("*.md"))
SETUP = re.compile(r"<!-- setup\n(.*?)\n-->", re.DOTALL)
BLOCK = re.compile(r"```(python|console)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def run_python(code: str, names: dict[str, object]) -> str:
    """What a block prints, and the error that ends it."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "page", "exec"), names)
    except Exception as error:
        return f"{out.getvalue()}{type(error).__name__}: {error}"
    return out.getvalue()


def run_command(line: str) -> str:
    """What a command prints, errors included, as on a terminal 1000 columns wide."""
    return CliRunner().invoke(main, shlex.split(line.removeprefix("ckpt "))).output


def normal(text: str) -> str:
    """A text without what differs from run to run: times, where __main__ was read from, the order of a set."""
    text = re.sub(r"^(time +).*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\{('[^}]*)\}", lambda found: ", ".join(sorted(found[1].split(", "))), text)
    text = text.replace("'pytest.__main__'", "'__main__'")
    return re.sub(r" (from '[^']*'|\(built-in\))>", ">", text).strip()


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page give what is shown, one after another in one folder."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whole modules and old formats make torch warn
        for setup in SETUP.findall(text):
            run_python(setup, {"__name__": "setup"})
        for kind, body, shown in BLOCK.findall(SETUP.sub("", text)):
            if kind == "python":
                assert normal(run_python(body, names)) == normal(shown)
            else:
                command, _, output = body.removeprefix("$ ").partition("\n")
                assert normal(run_command(command)) == normal(output)


def test_there_are_pages() -> None:
    """One page per painful message: twenty at least, each with the message as its heading."""
    assert len(PAGES) >= 20
    assert all(page.read_text().startswith("# ") for page in PAGES)
