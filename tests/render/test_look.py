"""One look for all commands: narrow and plain terminals, help against typing errors, progress."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file

from ckpt_tools import diff, inspect, stats
from ckpt_tools.cli import COMMANDS, main, options
from ckpt_tools.cli.shell.waiting import waiting
from ckpt_tools.render.description import View, print_description
from ckpt_tools.render.difference import print_difference
from ckpt_tools.render.inspected.lines import ranges
from ckpt_tools.render.numbers.stats import StatsView, print_stats
from ckpt_tools.render.rows import wrapped
from ckpt_tools.render.text import counted, path_text
from ckpt_tools.text import natural
from tests.support.samples import FIXTURES, by_name
from tests.support.terminal import run

PAGES = [FIXTURES / name for name in ("training.pth", "fsdp.pth", "dtypes.pth", "whole_module.pth")]


def page(render: Any, width: int, encoding: str = "utf-8") -> str:
    """What a renderer prints on a terminal of this width and encoding."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    render(Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False, emoji=False, markup=False))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("path", PAGES, ids=by_name)
def test_narrow_terminals(path: Path, width: int) -> None:
    """No table is wider than the terminal, no column is cut, and every number of every row is there."""
    description, measured, difference = inspect(path), stats(path), diff(path, FIXTURES / "single.pth", values=True)
    shown = {
        "inspect": page(partial(print_description, description, View(all=True)), width),
        "tree": page(partial(print_description, description, View(tree=True)), width),
        "stats": page(partial(print_stats, measured, StatsView(all=True)), width),
        "diff": page(partial(print_difference, difference, show_all=True), width),
    }
    for name, text in shown.items():
        table = text.split("\n\n")[1:2] if name in ("inspect", "stats") else []
        assert all(len(line.rstrip()) <= width for part in table for line in part.splitlines()), text
        assert "…" not in text
    for row in description.tensors:
        assert str(row["where"][-1]).rpartition(".")[2][:10] in shown["inspect"]


@pytest.mark.parametrize("width", [60, 200])
def test_terminals_that_know_ascii_only(width: int) -> None:
    """Histograms, trees and tables have an ASCII form."""
    path = FIXTURES / "training.pth"
    for render in (
        partial(print_description, inspect(path), View(tree=True)),
        partial(print_stats, stats(path), StatsView()),
        partial(print_difference, diff(path, FIXTURES / "single.pth", values=True)),
    ):
        assert page(render, width, "ascii").isascii()


def test_a_tree_with_depth_has_sums() -> None:
    """`--tree --depth 1` says how many tensors and bytes are below each branch."""
    text = page(partial(print_description, inspect(FIXTURES / "single.pth"), View(tree=True, depth=1)), 80)
    assert re.search(r"features +7 tensors +mixed +cpu +232 B", text)
    assert "running_mean" not in text


def test_state_dicts_are_cut_too(tmp_path: Path) -> None:
    """A file of thousands of state dicts has a page like any other; --all shows each."""
    torch.save([{"a.w": torch.ones(1)} for _ in range(50)], tmp_path / "in.pth")
    pages = []
    for view in (View(), View(all=True)):
        out = io.StringIO()
        print_description(inspect(tmp_path / "in.pth"), view, Console(file=out, width=100))
        pages.append(out.getvalue())
    assert [len(re.findall(r"^state dict +\d+: 1 tensor", page, re.MULTILINE)) for page in pages] == [40, 50]
    assert ["... 10 more (--all)" in page for page in pages] == [True, False]


def test_one_is_no_plural() -> None:
    """`1 tensor`, `2 tensors`; a state dict of one tensor is described so."""
    assert [counted(number, "tensor") for number in (0, 1, 2, 1000)] == ["0 tensors", "1 tensor", "2 tensors", "1,000 tensors"]


@given(st.text("ab._, {}", max_size=80), st.integers(8, 40))
def test_wrapping_loses_nothing(text: str, width: int) -> None:
    """A wrapped name is the name with line breaks; whatever is one word stays on one line."""
    assert re.sub(r"\s", "", wrapped(text, width)) == re.sub(r"\s", "", text)
    assert set(re.findall(r"[^., ]+", text)) == set(re.findall(r"[^., \n]+", wrapped(text, width)))


def ckpt(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "ckpt_tools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_plain_environments() -> None:
    """PYTHONIOENCODING=ascii and LANG=C print, and a pipe gets neither colours nor progress."""
    done = ckpt("stats", FIXTURES / "single.pth", PYTHONIOENCODING="ascii", LANG="C")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout + done.stderr


UNSHOWN = (
    "report",
    "prove",
    "explain",
    "sign",
    "verify",
    "completion",
    "help",
)  # these print no name of a tensor from a file alone


@pytest.mark.parametrize("terminal", [{}, {"FORCE_COLOR": "1", "COLUMNS": "80"}], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in UNSHOWN])
def test_names_that_the_terminal_cannot_show(name: str, terminal: dict[str, str], tmp_path: Path) -> None:
    """Where the encoding lacks a letter, in a file's name or a tensor's, it is escaped, and nothing fails."""
    path, out = tmp_path / "caf\u00e9.pth", tmp_path / "\u00fc.pth"
    torch.save({"\u5c64.weight": torch.ones(2), "na\u00efve": "\u65e5"}, path)
    tuned = tmp_path / "\u00fc.tuned.pth"
    torch.save({"\u5c64.weight": torch.zeros(2), "a.weight": torch.ones(2, 3)}, tuned)
    if name == "extract-lora":
        torch.save({"\u5c64.weight": torch.ones(2), "a.weight": torch.zeros(2, 3)}, path)
    more: dict[str, list[object]] = {
        "convert": [out],
        "repair": [out],
        "average": [path, out],
        "extract-lora": [tuned, tmp_path / "\u00fc", "--rank", 1],
        "diff": [path],
        "match": ["--like", path],
        "show": ["\u5c64.weight"],
    }
    done = ckpt(name, path, *more.get(name, []), PYTHONIOENCODING="ascii", LANG="C", **terminal)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert ("\\xe9" in done.stdout) or ("\\xfc" in done.stdout)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["inspekt", "x.pth"], "inspect"),
        (["convert", "a", "b", "--strip-modul"], "--strip-module"),
        (["inspect", FIXTURES / "sngle.pth"], "single.pth"),
        (["convert", FIXTURES / "ddp.pth", "OUT", "--drop", "module.fc3.weight"], "module.fc2.weight"),
        (
            ["convert", FIXTURES / "ddp.pth", "OUT", "--strip-module", "--drop", "fc1.*"],
            "'module.fc1.*'? --drop uses the names in IN.",
        ),
        (
            ["convert", FIXTURES / "training.pth", "OUT", "--keep", "fc?.weight"],
            "'module.fc?.weight'? --keep uses the names in IN.",
        ),
        (["inspect", FIXTURES / "training.pth", "--filter", "fc1.*"], "model.module.fc1.*"),
        (["stats", FIXTURES / "ddp.pth", "--filter", "fc1.*"], "module.fc1.*"),
        (["inspect", FIXTURES / "single.pt"], "single.pth"),
        (["convert", FIXTURES / "training.pth", "OUT", "--select", "modle"], "model"),
        (["convert", FIXTURES / "ddp.pth", "OUT", "--like", FIXTURES / "training.pth", "--like-select", "modle"], "model"),
        (["convert", FIXTURES / "ddp.pth", "OUT", "--plan", FIXTURES / "sngle.pth"], "single.pth"),
        (["match", FIXTURES / "ddp.pth", "--like", "fixtures.make:netwrk"], "network"),
        (["diff", FIXTURES / "training.pth", FIXTURES / "single.pth", "--select", "modle=."], "model"),
        (["stats", FIXTURES / "single.pth", "--filter", "fc1.wieght"], "fc1.weight"),
        (["inspect", FIXTURES / "single.pth", "--filter", "fc1.wieght"], "fc1.weight"),
        (["convert", FIXTURES / "ddp.pth", "OUT", "--plan", "llama-meta-to-hff"], "llama-meta-to-hf"),
        (["convert", FIXTURES / "ddp.pth", "OUT", "--plan", "llama-hf-to-mta"], "llama-hf-to-meta"),
    ],
    ids=str,
)
def test_did_you_mean(arguments: list[Any], near: str, tmp_path: Path) -> None:
    """A typing error in a command, option, file, name or path gets what is near."""
    given = [str(tmp_path / "out.pth") if argument == "OUT" else str(argument) for argument in arguments]
    output = CliRunner().invoke(main, given).output
    assert re.search(f"[Dd]id you mean.*{re.escape(near)}", output), output
    assert "Errno" not in output
    if "--like-select" in given:
        assert "--like-select modle matches nothing." in output


@pytest.mark.parametrize(("name", "other"), [("nothere.pth", "outer.zip"), ("model.pth", "notes.pth"), ("a.pth", "b.pth")])
def test_a_file_of_another_name_is_not_meant(name: str, other: str, tmp_path: Path) -> None:
    """An extension that two names share, and a few letters, do not make them near."""
    (tmp_path / other).touch()
    told = run("inspect", tmp_path / name).output
    assert "There is no such file." in told
    assert "Did you mean" not in told


def test_what_saves_a_file_is_named_with_it(tmp_path: Path) -> None:
    """`ckpt repair FILE` of a file that needs an OUT gives the whole command; run, it saves what is whole."""
    path = tmp_path / "my cut.pth"
    path.write_bytes((FIXTURES / "single.pth").read_bytes()[:-2000])
    told = ckpt("repair", path, code=2)
    command = re.search(r"name an OUT: ckpt (.*)", told.output)
    assert command is not None
    assert CliRunner().invoke(main, shlex.split(command[1])).exit_code in (0, 1)
    assert (tmp_path / "my cut.fixed.pth").exists()


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
    "sign": [(3, ["none.pth", "--key", "none.pth"])],
    "verify": [(3, ["none.pth", "--key", "none.pth"])],
    "prove": [(3, ["none.pth", "single.pth", "--model", "fixtures.make:network", "--input", "1x4"])],
    "extract-lora": [
        (3, ["none.pth", "single.pth", "OUT", "--rank", "1"]),
    ],
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


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example(name: str) -> None:
    """Each --help shows a command to copy."""
    output = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output
    assert f"\n  ckpt {name} " in output


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("quiet", "seconds", "shown"), [(False, 2.0, True), (True, 2.0, False), (False, 0.5, False)])
def test_progress(monkeypatch: pytest.MonkeyPatch, quiet: bool, seconds: float, shown: bool) -> None:
    """A bar with speed and binary units once the work has taken a second, on a terminal, unless --quiet."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    now = iter([0.0, seconds, seconds, seconds, seconds, *[seconds] * 50])
    monkeypatch.setattr("ckpt_tools.cli.options.time.monotonic", partial(next, now))
    with options.show_progress(quiet=quiet) as progress:
        progress(0, 8 << 20)
        progress(4 << 20, 8 << 20)
        time.sleep(0)
    assert ("4.0 MiB of 8.0 MiB" in terminal.getvalue()) == shown
    assert ("MiB/s" in terminal.getvalue()) == shown


@pytest.mark.parametrize(("quiet", "seconds", "shown"), [(False, 0.0, True), (True, 0.0, False), (False, 60.0, False)])
def test_a_word_until_something_is_counted(monkeypatch: pytest.MonkeyPatch, quiet: bool, seconds: float, shown: bool) -> None:
    """A word stands on a terminal while torch is imported or a model runs, and is gone when there is something to show."""
    terminal, written = _Terminal(), threading.Event()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("ckpt_tools.cli.shell.waiting.AFTER", seconds)
    monkeypatch.setattr(terminal, "flush", written.set)
    with options.show_progress(quiet=quiet) as progress:
        assert written.wait(10 if shown else 0.01) == shown
        assert terminal.getvalue() == ("working ..." if shown else "")
        progress(1, 2)
        assert terminal.getvalue() == ("working ...\r\x1b[K" if shown else "")
    assert terminal.getvalue() == ("working ...\r\x1b[K" if shown else "")


def test_no_word_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error that is no terminal stays empty."""
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr("ckpt_tools.cli.shell.waiting.AFTER", 0.0)
    with waiting() as word:
        time.sleep(0.01)
    assert (word, pipe.getvalue()) == (None, "")


def test_scan_counts_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bar of `ckpt scan` goes by the bytes of the files that are done, up to all of them."""
    told: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def telling(**_: object) -> Iterator[Any]:
        yield lambda done, size: told.append((done, size))

    monkeypatch.setattr("ckpt_tools.cli.scan.show_progress", telling)
    for size in (10, 20):
        (tmp_path / f"{size}.bin").write_bytes(b"\0" * size)
    ckpt("scan", tmp_path)
    assert told == [(10, 30), (30, 30)]


def test_layers_are_counted_in_their_order(tmp_path: Path) -> None:
    """safetensors sorts names as text; blocks are folded with their numbers in order and in ranges."""
    save_file({f"layers.{number}.weight": torch.zeros(2, 2) for number in (*range(13), 20)}, tmp_path / "model.safetensors")
    shown = run("inspect", tmp_path / "model.safetensors").stdout
    assert "layers.{0-12,20}.weight" in shown


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 1, 10, 11, 2], "0-2,10-11"),
        ([5], "5"),
        ([3, 1], "1,3"),
        (range(0, 40, 2), "0,2,4,6,8,10,12,14,..."),
        ([7, 8], "7-8"),
    ],
)
def test_ranges(numbers: Iterable[int], text: str) -> None:
    """Runs become ranges, the rest is listed, and what is cut is said to be."""
    assert ranges(numbers) == text


@given(st.lists(st.integers(0, 9999), max_size=7))
def test_ranges_hold_every_number(numbers: list[int]) -> None:
    """What is written in ranges is the set that was given."""
    runs = [tuple(map(int, part.split("-"))) for part in ranges(numbers).split(",") if part]
    assert {number for run in runs for number in range(run[0], run[-1] + 1)} == set(numbers)


@pytest.mark.parametrize("command", ["inspect", "stats"])
def test_names_are_sorted_by_their_numbers(tmp_path: Path, command: str) -> None:
    """`--sort name` puts layer 2 before layer 10, however long a number may be."""
    names = ["l.10.w", "l.2.w", "l.300.w", "l.02.b", "a.w"]
    torch.save({name: torch.zeros(2, index + 1) for index, name in enumerate(names)}, tmp_path / "model.pth")
    flat = ["--flat"] if command == "inspect" else []
    shown = run(command, "--sort", "name", *flat, tmp_path / "model.pth").stdout
    places = [shown.index(f"\n{name}") for name in ("a.w", "l.02.b", "l.2.w", "l.10.w", "l.300.w")]
    assert places == sorted(places)
    assert sorted(["9" * 9000, "1" * 9001, "0002", "1"], key=natural) == ["1", "0002", "9" * 9000, "1" * 9001]


def test_totals_count_one_set(tmp_path: Path) -> None:
    """Tensors, elements and bytes of the total are those of the weights and of the optimizer; parameters are the weights'."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    totals = inspect(tmp_path / "run.pth").totals
    assert (totals["tensors"], totals["elements"], totals["parameters"]) == (8, 20 * 3 + 2, 20)
    assert totals["bytes"] == totals["elements"] * 4
    shown = run("inspect", tmp_path / "run.pth").stdout
    assert "tensors       8, 62 elements, 248 B" in shown


def test_the_empty_name_is_not_the_root() -> None:
    """A tensor whose name is the empty text is told from the whole file."""
    assert [path_text(()), path_text(("",)), path_text(("a", 0))] == ["(root)", '""', "a.0"]
