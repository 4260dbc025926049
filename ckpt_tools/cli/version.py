"""`ckpt --version --verbose`: what it runs on, and the variables that set options."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import click

from ckpt_tools.text import printable

_PACKAGES = ("torch", "safetensors", "click", "rich", "isal", "cryptography", "h5py", "gguf")


def print_surroundings() -> None:
    """Python, the system, packages (none is imported), then the variables that options have their values from."""
    click.echo(f"Python {platform.python_version()}, {sys.executable}")
    click.echo(platform.platform())
    click.echo(", ".join(_versions()))
    for line in dict.fromkeys(_variables()):
        click.echo(printable(line))


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"no {name}"


def _variables() -> Iterator[str]:
    ctx = click.get_current_context()
    assert isinstance(ctx.command, click.Group)
    for name in ctx.command.list_commands(ctx):
        command = ctx.command.get_command(ctx, name)
        for option in command.params if command is not None else ():
            named = option.envvar or ()
            for variable in [named] if isinstance(named, str) else named:
                if os.environ.get(variable):
                    yield f"{variable}={os.environ[variable]}"
