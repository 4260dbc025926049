"""The command line in a process of its own, and as it looks on a terminal."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
from click.testing import CliRunner, Result

from tests.support.commands import main

ROOT = Path(__file__).parents[2]
COMMANDS = main.list_commands(click.Context(main))


def shell(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ckpt ARGUMENTS` in a process of its own, its output in pipes."""
    command = [sys.executable, "-m", "ckpt_tools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def installed(folder: Path) -> dict[str, str]:
    """An environment whose `ckpt` is this one, by a script in the folder."""
    folder.mkdir(exist_ok=True)
    tool = folder / "ckpt"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m ckpt_tools "$@"\n')
    tool.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def page(*arguments: object, width: int = 200) -> str:
    """What `ckpt ARGUMENTS` prints on a terminal of this width, without its colours and the blanks at the ends of lines."""
    terminal = {"FORCE_COLOR": "1", "COLUMNS": str(width)}
    text = CliRunner().invoke(main, list(map(str, arguments)), env=terminal).stdout
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def wait_for(there: Callable[[], bool], seconds: float = 60) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def run(*arguments: object, data: bytes = b"") -> Result:
    """Run `ckpt ARGUMENTS` in this process, whatever its exit code, with something on standard input."""
    return CliRunner().invoke(main, list(map(str, arguments)), input=data)
