"""Options are said once: what the command line, a caller and the docstring know of an option is what its record says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import ckpt_tools
from ckpt_tools.cli.adapters.extract_lora import extract_lora as extract_command
from ckpt_tools.cli.average import average as average_command
from ckpt_tools.cli.convert import convert as convert_command
from ckpt_tools.cli.match import match as match_command
from ckpt_tools.errors import UsageError
from ckpt_tools.operations.convert.options import ConvertOptions, InPlaceOptions, NameOptions
from ckpt_tools.operations.options import AverageOptions, ExtractOptions, MatchOptions
from ckpt_tools.tree.options import Options, flag, texts
from tests.support.samples import FIXTURES

DDP = FIXTURES / "ddp.pth"
PAGE = (FIXTURES.parent / "docs" / "convert.md").read_text()


CALLS: dict[str, tuple[type[Options], Callable[..., object], click.Command]] = {
    "convert": (ConvertOptions, ckpt_tools.convert, convert_command),
    "average": (AverageOptions, ckpt_tools.average, average_command),
    "match": (MatchOptions, ckpt_tools.match, match_command),
    "extract_lora": (ExtractOptions, ckpt_tools.extract_lora, extract_command),
}


@pytest.mark.parametrize(("command", "name"), [(command, name) for command in CALLS for name in CALLS[command][0].options])
def test_an_option_is_the_same_everywhere(command: str, name: str) -> None:
    """The call has its default, the docstring its sentence; the command line has it with its help, the page names it."""
    record, call, made = CALLS[command]
    option = record.options[name]
    assert inspect.signature(call).parameters[name].default is option.default
    assert f"\n        {name}: {option.help}" in str(call.__doc__)
    shown = {one.name: one for one in made.params if isinstance(one, click.Option)}
    if option.kind == "code":
        assert name not in shown
        return
    assert f"--{name.rstrip('_').replace('_', '-')}" in shown[name].opts
    assert str(shown[name].help).startswith(option.help) or (command, name) == (
        "match",
        "match",
    )  # has fewer stages
    assert command != "convert" or f"`--{name.rstrip('_').replace('_', '-')}" in PAGE


def test_a_new_option_is_one_line() -> None:
    """A record reads what it is given, knows what was given, takes nothing that it does not know, and stays as it is."""

    class Mine(Options):
        shout: bool = flag("Say it loudly.")
        words: Any = texts("What is said.")

    options = Mine(words="hello")
    assert (options.words, options.shout, options.given()) == (["hello"], False, ["words"])
    assert repr(options.replace(shout=True)) == "Mine(shout=True, words=['hello'])"
    with pytest.raises(UsageError, match="`shout` is 'no', a str"):
        Mine(shout="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'loud'"):
        Mine(loud=True)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="frozen"):
        options.shout = True  # type: ignore[misc]


def test_records_are_put_together_from_others() -> None:
    """What edits in place is part of what converts, in the order of --help."""
    assert set(InPlaceOptions.options) < set(ConvertOptions.options)
    assert list(ConvertOptions.options)[: len(NameOptions.options)] == list(NameOptions.options)
    assert list(inspect.signature(ckpt_tools.edit_in_place).parameters) == ["path", *InPlaceOptions.options]


def test_options_are_checked_before_anything_is_looked_at(tmp_path: Path) -> None:
    """Options that contradict each other are refused where the output is there already, and where the input is not."""
    (tmp_path / "out.pth").write_bytes(b"mine")
    with pytest.raises(UsageError, match="contradict each other"):
        ckpt_tools.convert(tmp_path / "none.pth", tmp_path / "out.pth", strip_module=True, add_module=True)
    assert (tmp_path / "out.pth").read_bytes() == b"mine"


def test_paths_may_be_named(tmp_path: Path) -> None:
    """source= and target= are keywords too."""
    ckpt_tools.convert(target=tmp_path / "out.pth", source=DDP, strip_module=True)
    assert not any(name.startswith("module.") for name in torch.load(tmp_path / "out.pth"))
