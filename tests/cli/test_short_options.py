"""The short options that people type: -q, -n and -o mean one thing in every command."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tests.support.commands import ckpt, main
from tests.support.samples import FIXTURES
from tests.support.terminal import COMMANDS, run

DDP, SINGLE = FIXTURES / "ddp.pth", FIXTURES / "single.pth"


@pytest.mark.parametrize("name", COMMANDS)
def test_short_and_long_go_together(name: str) -> None:
    """Wherever a command has --quiet, --dry-run or --output, it has -q, -n or -o for it, and for nothing else."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for param in command.params:
        for long, short in (("--quiet", "-q"), ("--dry-run", "-n"), ("--output", "-o")):
            assert (long in param.opts) == (short in param.opts), param.opts


def test_the_verbose_version() -> None:
    """`ckpt --version -v` says what it runs on; no command has more to say than --all and --json show."""
    assert run("--version", "-v").output == run("--version", "--verbose").output
    ckpt("-v", code=2)


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_out_is_an_option_too(command: str, tmp_path: Path) -> None:
    """`-o OUT` writes what OUT in its place writes; both together are refused, and -n writes nothing."""
    ckpt(command, DDP, tmp_path / "a.pth")
    ckpt(command, "-n", DDP, "-o", tmp_path / "b.pth")
    assert not (tmp_path / "b.pth").exists()
    done = run(command, "-q", "-o", tmp_path / "b.pth", DDP)
    assert (done.exit_code, done.output) == (0, "")
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()
    twice = ckpt(command, DDP, tmp_path / "c.pth", "-o", tmp_path / "d.pth", code=2)
    assert "OUT is given twice" in twice.output


def test_out_of_several_inputs_is_an_option_too(tmp_path: Path) -> None:
    """`average IN IN -o OUT` and `extract-lora BASE TUNED -o OUT`; without an OUT the latter is refused."""
    ckpt("average", SINGLE, SINGLE, "-o", tmp_path / "mean.pth")
    ckpt("average", SINGLE, SINGLE, tmp_path / "again.pth")
    assert (tmp_path / "mean.pth").read_bytes() == (tmp_path / "again.pth").read_bytes()
    base, tuned = FIXTURES / "lora" / "base.safetensors", FIXTURES / "lora" / "plain"
    ckpt("convert", base, "-o", tmp_path / "tuned.safetensors", "--lora", tuned)
    asked = ["extract-lora", base, tmp_path / "tuned.safetensors", "--rank", 4]
    ckpt(*asked, code=2)
    assert run(*asked, "-o", tmp_path / "adapter").exit_code in (0, 1)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
