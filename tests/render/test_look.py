"""One look for all commands: narrow and plain terminals, help against typing errors, quiet; reports in a notebook."""

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt_tools
import ckpt_tools.torch as load_code
from ckpt_tools import inspect
from tests.support.commands import main
from tests.support.samples import FIXTURES, by_name
from tests.support.terminal import COMMANDS, page, run, shell

PAGES = [FIXTURES / name for name in ("training.pth", "fsdp.pth", "dtypes.pth", "whole_module.pth")]


@pytest.mark.parametrize("path", PAGES, ids=by_name)
def test_narrow_terminals(path: Path) -> None:
    """On 80 columns no table is wider than the terminal, no column is cut, and every number of every row is there."""
    for command in (["inspect", "--all"], ["inspect", "--tree"], ["stats", "--all"]):
        text = page(*command, path, width=80)
        table = text.split("\n\n")[1:2] if command[1] != "--tree" else []
        assert all(len(line) <= 80 for part in table for line in part.splitlines()), text
        assert "…" not in text
    shown = page("inspect", "--all", path, width=80)
    assert all(str(row["where"][-1]).rpartition(".")[2][:10] in shown for row in inspect(path).tensors)


def test_state_dicts_are_cut_too(tmp_path: Path) -> None:
    """A file of thousands of state dicts has a page like any other; --all shows each; one is no plural."""
    torch.save([{"a.w": torch.ones(1)} for _ in range(50)], tmp_path / "in.pth")
    pages = [page("inspect", *options, tmp_path / "in.pth", width=100) for options in ([], ["--all"])]
    assert [len(re.findall(r"^state dict +\d+: 1 tensor", text, re.MULTILINE)) for text in pages] == [40, 50]
    assert ["... 10 more (--all)" in text for text in pages] == [True, False]


def test_plain_environments() -> None:
    """PYTHONIOENCODING=ascii and LANG=C print, histograms and trees too, and a pipe gets neither colours nor progress."""
    for command in ("stats", "inspect"):
        options = ["--tree"] if command == "inspect" else []
        done = shell(command, *options, FIXTURES / "single.pth", PYTHONIOENCODING="ascii", LANG="C")
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert "\x1b" not in done.stdout + done.stderr


UNSHOWN = ("report", "prove", "explain", "sign", "verify", "completion", "help")  # no name of a tensor from a file alone


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in UNSHOWN])
def test_names_that_the_terminal_cannot_show(name: str, tmp_path: Path) -> None:
    """Where the encoding lacks a letter, in a file's name or a tensor's, it is escaped, and nothing fails."""
    path, out = tmp_path / "caf\u00e9.pth", tmp_path / "\u00fc.pth"
    torch.save({"\u5c64.weight": torch.ones(2), "na\u00efve": "\u65e5"}, path)
    tuned = tmp_path / "\u00fc.tuned.pth"
    torch.save({"\u5c64.weight": torch.zeros(2), "a.weight": torch.ones(2, 3)}, tuned)
    if name == "extract-lora":
        torch.save({"\u5c64.weight": torch.ones(2), "a.weight": torch.zeros(2, 3)}, path)
    more: dict[str, list[object]] = {
        "convert": [out], "repair": [out], "average": [path, out], "extract-lora": [tuned, tmp_path / "\u00fc", "--rank", 1],
        "diff": [path], "match": ["--like", path], "show": ["\u5c64.weight"],
    }  # fmt: skip
    words = [name, str(path), *map(str, more.get(name, []))]
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "80"} if name == "inspect" else {}
    done = CliRunner(charset="ascii").invoke(main, words, env=terminal)
    assert done.exit_code == 0, done.output
    assert done.stdout.isascii()
    assert ("\\xe9" in done.stdout) or ("\\xfc" in done.stdout)


QUIET: dict[str, list[tuple[int, list[str]]]] = {
    "convert": [(0, ["ddp.pth", "OUT"]), (3, ["none.pth", "OUT"])],
    "match": [
        (0, ["ddp.pth", "--like", "single.pth"]),
        (1, ["ddp.pth", "--like", "tied.pth"]),
        (3, ["none.pth", "--like", "single.pth"]),
    ],
    "check": [(0, ["single.pth"]), (1, ["ddp.pth"]), (3, ["none.pth", "single.pth"])],
    "repair": [(0, ["single.pth", "OUT"]), (3, ["none.pth", "OUT"])],
    "diff": [(0, ["single.pth", "single.pth"]), (1, ["ddp.pth", "single.pth"]), (3, ["none.pth", "single.pth"])],
    "average": [(0, ["single.pth", "single.pth", "OUT"]), (3, ["none.pth", "single.pth", "OUT"])],
    "scan": [(0, ["single.pth"])],
    "sign": [(3, ["none.pth", "--key", "none.pth"])],
    "verify": [(3, ["none.pth", "--key", "none.pth"])],
    "prove": [(3, ["none.pth", "single.pth", "--model", "fixtures.make:network", "--input", "1x4"])],
    "extract-lora": [(3, ["none.pth", "single.pth", "OUT", "--rank", "1"])],
    "report": [(0, ["single.pth", "-o", "OUT"]), (3, ["none.pth", "-o", "OUT"])],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_quiet_means_one_thing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but errors, on standard error, with the exit code that there is without it; commands that only show lack it."""
    monkeypatch.chdir(FIXTURES)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert ("--quiet" in [option for parameter in command.params for option in parameter.opts]) == (name in QUIET)
    for code, arguments in QUIET.get(name, []):
        for number, quiet in enumerate(([], ["--quiet"])):
            given = [str(tmp_path / f"{number}{code}") if argument == "OUT" else argument for argument in arguments]
            result = run(name, *given, *quiet)
            assert result.exit_code == code, result.output
        assert result.stdout == ""
        assert ("none.pth" in result.stderr) == (code == 3)


def test_a_code_is_not_broken_on_a_terminal(tmp_path: Path) -> None:
    """On 80 columns each verdict's code stands whole in a line beside long names, several of them below each other."""
    for name in ("cuda", "whole_module", "namespace"):
        shutil.copy(FIXTURES / f"{name}.pth", tmp_path / f"a_name_that_takes_half_of_a_narrow_line_{name}.pth")
    made = {"module.w": torch.ones(2), "epoch": 100_000, "global_step": 10_000_000}
    torch.save(made, tmp_path / "epoch.pth")
    lines = page("inspect", tmp_path, width=80).splitlines()
    assert sum("weights-only-refused" in line for line in lines) == 2
    assert any(line.rstrip().endswith("wrapper-prefix,") for line in lines)


def test_a_folded_name_is_no_wider_than_a_terminal_in_a_pipe(tmp_path: Path) -> None:
    """Of a module with very many leaves the first stand there, and how many more; `--all` has each whole name."""
    torch.save({f"block.weight_of_part_{i}": torch.ones(i % 3 + 1) for i in range(30)}, tmp_path / "in.pth")
    few = run("inspect", tmp_path / "in.pth").stdout
    table = few[few.index("\ntensor") :]
    assert "block.{weight_of_part_0, weight_of_part_1, weight_of_part_2, ... 27 more}" in table
    assert max(map(len, table.splitlines())) < 128
    assert "block.weight_of_part_29 " in run("inspect", "--all", tmp_path / "in.pth").stdout


@pytest.mark.parametrize("view", ["--all", "--flat", "--filter optimizer*", "--tree --all"])
def test_what_is_closed_can_be_opened(view: str) -> None:
    """`--all`, `--flat`, `--tree` and a filter show the optimizer's tensors, and no line in their place."""
    shown = page("inspect", FIXTURES / "training.pth", *view.split(), width=200)
    assert "exp_avg_sq" in shown
    assert "--all opens it" not in shown


def test_odd_names_in_text(tmp_path: Path) -> None:
    """Tuples in tuples read alike as keys: one line for both. A control character is escaped, whatever folds names."""
    torch.save({((1,),): torch.ones(1), ((2,),): torch.ones(1)}, tmp_path / "in.pth")
    assert "<tuple key>  2 x [1]  float32  cpu       8 B" in run("inspect", tmp_path / "in.pth").stdout
    for name, lead in (("in", ""), ("like", "x.")):
        torch.save({f"{lead}a\x01b.{number}.w": torch.ones(1) for number in (0, 1)}, tmp_path / f"{name}.pth")
    said = run("match", tmp_path / "in.pth", "--like", tmp_path / "like.pth").stdout
    assert "a\\x01b.{0,1}.w  x.a\\x01b.{0,1}.w  prefix" in said


EVIL = "<script>alert(1)</script>.weight"


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def report(call: str, path: Path) -> Any:
    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: ckpt_tools.inspect(path), "check": lambda: ckpt_tools.check(path, digest=True),
        "diff": lambda: ckpt_tools.diff(path, FIXTURES / "single.pth"), "match": lambda: ckpt_tools.match(path, like=path),
        "stats": lambda: ckpt_tools.stats(path), "scan": lambda: ckpt_tools.scan(path)[0],
        "convert": lambda: ckpt_tools.convert(path, path.with_name("out.pth"), add_module=True),
    }  # fmt: skip
    return calls[call]()


@pytest.mark.parametrize("call", ["inspect", "check", "diff", "match", "stats", "scan", "convert"])
def test_a_report_in_a_notebook(call: str, tmp_path: Path) -> None:
    torch.save({EVIL: torch.ones(2), "b.weight": torch.ones(3)}, tmp_path / "<b>.pth")
    page = Tags(report(call, tmp_path / "<b>.pth")._repr_html_())
    assert page.tags <= {"table", "caption", "tr", "th", "td", "details", "summary"}
    assert "<b>.pth" in page.text
    assert EVIL in page.text or call == "scan"


def test_many_rows_are_cut(tmp_path: Path) -> None:
    """A notebook is not flooded: two hundred rows, and how many more there are."""
    torch.save({f"layers.{number}.weight": torch.ones(1) for number in range(300)}, tmp_path / "a.pth")
    page = ckpt_tools.inspect(tmp_path / "a.pth")._repr_html_()
    assert page.count("<tr>") < 250
    assert "... 100 more" in page


def test_what_was_loaded(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pth")
    found = load_code.load_into(nn.DataParallel(nn.Linear(2, 2)), tmp_path / "a.pth")
    assert "module.weight" in Tags(found._repr_html_()).text
    assert len(repr(found)) < 200
