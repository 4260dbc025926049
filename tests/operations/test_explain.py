"""A message is explained by its own words, whatever names are in it; other words are guessed at, and said to be."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt_tools
from ckpt_tools.errors import UsageError
from docs import explained
from tests.support.commands import ckpt, main
from tests.support.samples import CODES, FIXTURES

WARNINGS = ("newly-initialized", "mmcv", "is-it-safe")  # after which a traceback is about something else
SEEN: dict[str, list[str]] = {}
for block in Path(__file__).with_name("messages_seen.txt").read_text("utf-8").split("\n== ")[1:]:
    row_name, *messages = block.splitlines()
    SEEN[row_name] = [json.loads(f'"{message}"') for message in messages]
OTHERS = SEEN.pop("")
LOADING = (
    'Traceback (most recent call last):\n  File "/home/u/run.py", line 12, in <module>\n    ckpt = torch.load("last.pth")\n'
    '           ^^^^^^^^^^^^^^^^^^^^^^\n  File "/usr/lib/python3/torch/serialization.py", line 1530, in load\n'
    "    return _load(\n"
    '  File "/usr/lib/python3/torch/serialization.py", line 2122, in _load\n    result = unpickler.load()\n'
)
NAMES = [row["name"] for section in explained.sections() for row in section["row"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_explained_by_its_words(name: str) -> None:
    """Each row of the table is the answer to its messages: alone, at the end of a traceback, in colour, from a rank."""
    for message in SEEN[name]:
        traceback = message if message.startswith("Traceback") or name in WARNINGS else LOADING + message
        ranks = "".join(f"[rank0]: {line}\n" for line in traceback.split("\n"))
        for words in (message, traceback, ranks, f"\x1b[31m{traceback}\x1b[0m"):
            assert ckpt_tools.explain(words)[0].name == name, words


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_explained_by_its_name_and_its_heading(name: str) -> None:
    """Its name and the message that the page shows find it, and its command has options that there are."""
    found = ckpt_tools.explain(name)[0]
    assert (found.name, found.page) == (name, f"docs/messages.md#{name}")
    assert ckpt_tools.explain(found.title)[0].name == name
    for line in found.command.split("\n"):
        program, command, *arguments = shlex.split(line)
        if program == "ckpt":
            parser = main.get_command(click.Context(main), command)
            assert parser is not None
            parser.make_parser(click.Context(parser, **main.context_settings)).parse_args(arguments)


@pytest.mark.parametrize("words", OTHERS)
def test_other_words_are_guessed_at(words: str) -> None:
    """What no row has the words of is answered by at most two guesses that are said to be guesses, and exit code 1."""
    assert ckpt_tools.explain(words) == []
    printed = ckpt("explain", words, code=1).output.splitlines()
    assert "The most similar are" in printed[0] or printed == ["This message is unknown."]
    assert len(printed) <= 3


def test_a_code_and_a_slip_in_it() -> None:
    """Each code that check may say is explained, with and without brackets; a slip is a guess at the near one."""
    kept = (path.read_text("utf-8") for path in (FIXTURES.parent / "tests" / "golden" / "kept").glob("*.txt"))
    shown = {code for text in kept for code in re.findall(r"^(?:info|warning|problem) \[([a-z0-9-]+)\]", text, re.MULTILINE)}
    assert len(shown) > 30
    assert shown - {"together"} <= CODES  # inspect's alone: a command for the others
    for code in CODES:
        (found,) = ckpt_tools.explain(f"[{code}]")
        assert found.title.startswith(f"{code} (")
        assert found == ckpt_tools.explain(code)[0]
    assert "wrapper-prefix" in ckpt("explain", "wraper-prefix", code=1).output


def test_the_page_is_up_to_date() -> None:
    assert explained.PAGE.read_text("utf-8") == explained.page()


def test_the_command() -> None:
    """The answer comes first, in plain lines with the command; without words there is a list."""
    given = ckpt("explain", "size", "mismatch", "for", "head.weight").output
    answer, _, source = given.partition("\n\n")
    assert answer.startswith("'head.weight' has another shape")
    assert "--adapt" in answer
    assert answer.splitlines()[-1].startswith("  ckpt convert ")
    assert len(answer.splitlines()) <= 4
    assert "docs/messages.md#size-mismatch" in source
    assert "`" not in given
    assert ckpt("explain").output.startswith("lightning: ")
    for nothing in ("", " \n"):
        ckpt("explain", nothing, code=2)
        with pytest.raises(UsageError):
            ckpt_tools.explain(nothing)


def test_what_a_message_holds_twice() -> None:
    """Wrapped names and another head in one message: the names first, the shape beside them."""
    message = SEEN["module-prefix"][0] + "\n\tsize mismatch for fc.weight: copying a param with shape"
    assert [found.name for found in ckpt_tools.explain(message)][::2] == ["module-prefix", "size-mismatch"]
    assert "\nAlso: size-mismatch" not in ckpt("explain", SEEN["module-prefix"][0]).output


def test_a_long_log_is_read_to_its_end() -> None:
    log = "step 1 loss 0.5\n" * 40_000 + SEEN["size-mismatch"][1]
    from click.testing import CliRunner

    done = CliRunner().invoke(main, ["explain"], input=log)
    assert done.exit_code == 0
    assert "size-mismatch" in done.output


class Net(nn.Module):
    """Two layers."""

    def __init__(self, classes: int = 3, channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.fc = nn.Linear(4, classes)


REAL: list[tuple[str, Callable[[], object]]] = [
    ("module-prefix", lambda: nn.DataParallel(Net()).state_dict()),
    ("orig-mod-prefix", lambda: {f"_orig_mod.{name}": value for name, value in Net().state_dict().items()}),
    (
        "inner-module-prefix",
        lambda: {name.replace("conv.", "conv.module."): value for name, value in Net().state_dict().items()},
    ),
    ("prefix", lambda: nn.ModuleDict({"encoder": Net()}).state_dict()),
    ("one-level-down", lambda: {"epoch": 3, "network_weights": Net().state_dict(), "optimizer_state": {}}),
    ("loss-weights", lambda: Net().state_dict() | {"criterion.weight": torch.ones(3)}),
    ("channels-or-positions", lambda: Net(channels=3).state_dict()),
    ("size-mismatch", lambda: Net(classes=10).state_dict()),
    ("weights-only-numpy", lambda: {"model": Net().state_dict(), "best": numpy.float64(0.5)}),
]


@pytest.mark.parametrize(("name", "content"), REAL, ids=[name for name, _ in REAL])
def test_the_command_mends_the_file(
    name: str, content: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own error about a file names the row, and its command makes of the file one that the model loads."""
    monkeypatch.chdir(tmp_path)
    torch.save(content(), "IN.pth")
    torch.save(Net().state_dict(), "MODEL.pth")
    with pytest.raises(Exception, match=r"[a-z]") as raised:
        Net().load_state_dict(torch.load("IN.pth"))
    found = ckpt_tools.explain(f"{raised.type.__name__}: {raised.value}")[0]
    assert found.name == name
    made = [f"{word}.pth" if word in ("IN", "OUT", "MODEL") else word for word in shlex.split(found.command)]
    ckpt(*made[1:])
    loaded = torch.load("OUT.pth")
    Net().load_state_dict(loaded.get("model", loaded))


def test_the_command_for_a_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the message names is in the command, which says what the folder holds."""
    monkeypatch.chdir(tmp_path)
    torch.save(Net().state_dict(), "model.pth")
    ckpt("convert", "model.pth", "checkpoint-500", "--shard-size", "1MB")
    with pytest.raises(IsADirectoryError) as raised:
        torch.load("checkpoint-500")
    found = ckpt_tools.explain(f"IsADirectoryError: {raised.value}")[0]
    assert found.command == "ckpt inspect checkpoint-500"
    assert "fc.weight" in ckpt(*found.command.split()[1:], "--all").output
    ckpt("convert", "checkpoint-500", "OUT.safetensors")
    Net().load_state_dict(load_file("OUT.safetensors"))
