"""`ckpt --version --verbose`: what it runs on, and each setting with where it comes from."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import click

from ckpt_tools import limits
from ckpt_tools.cli.shell.settings import VARIABLES, Settings, load
from ckpt_tools.errors import CkptError
from ckpt_tools.text import printable

_PACKAGES = ("torch", "safetensors", "click", "rich", "isal", "cryptography", "h5py")


def print_surroundings() -> None:
    """Python, the system, packages (none is imported), then the settings.

    Raises:
        UsageError: what pyproject.toml sets cannot be read.
    """
    click.echo(f"Python {platform.python_version()}, {sys.executable}")
    click.echo(platform.platform())
    click.echo(", ".join(_versions()))
    try:
        settings = load()
    except CkptError as error:
        raise click.UsageError(printable(str(error))) from None
    rows = [("setting", "value", "from"), *_rows(settings)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    click.echo()
    for name, value, origin in rows:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"no {name}"


def _rows(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Name, value, origin of every setting; of the limits, of those that are not the default."""
    path = printable(os.fspath(settings.path)) if settings.path is not None else ""
    for name in ("ignore", "objects"):
        given, own = os.environ.get(VARIABLES[name], "").split(), getattr(settings, name)
        shown = " ".join(given) if given else own if isinstance(own, str) else " ".join(own or ())
        yield name, printable(shown) or "none", VARIABLES[name] if given else path if own else "default"
    changed = {name: (value, path) for name, value in settings.limits.items()}
    for text in os.environ.get(VARIABLES["limits"], "").split():
        name, number = limits.parse(text)
        changed[name] = (number, VARIABLES["limits"])
    for name, (number, origin) in changed.items():
        yield f"limits.{name}", str(number), origin
    if not changed:
        yield "limits", "docs/limits.md", "default"
