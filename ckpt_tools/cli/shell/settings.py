"""Defaults for options: `[tool.ckpt]` in pyproject.toml, and the variables CKPT_IGNORE, CKPT_OBJECTS, CKPT_LIMITS.

pyproject.toml is looked for in the current folder and those above it, never beside an input. Still it may be a stranger's, in a
folder that was downloaded: so it can make a command stricter or quieter, and never less safe. It raises no limit, leaves out no
problem, and does not keep objects. Variables and options, which only the user gives, may do all of that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.text import did_you_mean, printable

NAME = "pyproject.toml"
VARIABLES = {"ignore": "CKPT_IGNORE", "objects": "CKPT_OBJECTS", "limits": "CKPT_LIMITS"}
_TABLE = b"tool.ckpt"
_MOST_BYTES = 1 << 20
_OBJECTS = ("plain", "drop")


class Settings:
    """What a pyproject.toml sets, checked.

    Attributes:
        path: the file; None where there is none with [tool.ckpt].
        ignore: codes of findings that `check` leaves out. objects: what `convert` does with objects; None where not set.
        limits: lower limits, by name.
    """

    __slots__ = ("ignore", "limits", "objects", "path")

    def __init__(self, path: Path | None = None, table: Mapping[str, Any] | None = None) -> None:
        table = table or {}
        self.path = path
        self.ignore = _codes(table.get("ignore", []))
        self.objects = _objects(table.get("objects"))
        self.limits = _limits(table.get("limits", {}))

    def default_map(self) -> dict[str, dict[str, list[str]]]:
        """The defaults as click takes them, by command and parameter."""
        return {
            "check": {"ignore": self.ignore} if self.ignore else {},
            "convert": {"objects": [self.objects]} if self.objects else {},
        }


def load(start: Path | None = None) -> Settings:
    """The settings for whoever works in a folder, by default the current one.

    Raises:
        UsageError: a setting that does not exist, or has no such value, or is not for a file.
    """
    found = _find(_here() if start is None else start)
    if found is None:
        return Settings()
    path, text = found
    from ckpt_tools.io.parsers import load_toml

    try:
        table = load_toml(text).get("tool", {}).get("ckpt")
        if table is None:  # the words stand in a comment or a text
            return Settings()
        if not isinstance(table, dict):
            raise UsageError("[tool.ckpt] is not a table.")
        for key in table:
            if key not in VARIABLES:
                fix = did_you_mean(str(key), VARIABLES) or f"There are {', '.join(VARIABLES)}."
                raise UsageError(f"[tool.ckpt] has no setting {str(key)!r}.", fix=fix)
        return Settings(path, table)
    except (ValueError, AttributeError, CkptError) as error:
        if not isinstance(error, CkptError):
            raise UsageError(f"{path} is not TOML.", why=f"{error}.") from None
        error.what = f"{path}: {error.what}"
        raise


def _here() -> Path | None:
    """The current folder; None where it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _find(start: Path | None) -> tuple[Path, str] | None:
    """The nearest pyproject.toml upward that has settings for us, and its text."""
    for folder in () if start is None else (start, *start.parents):
        path = folder / NAME
        try:
            if not path.is_file():  # a pipe would never end
                continue
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES)
        except OSError:
            continue
        if _TABLE in data:
            return path, data.decode("utf-8", "replace")
    return None


def _codes(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(code, str) for code in value):
        raise UsageError("'ignore' is not a list of codes.", fix='For example: ignore = ["wrapper-prefix"]')
    if not value:
        return []
    from ckpt_tools.operations.explain import severities
    from ckpt_tools.tree.findings import CODES

    known = severities()
    for code in value:
        if code not in CODES:
            raise UsageError(f"'ignore': no finding has the code {code!r}.", fix=did_you_mean(code, sorted(CODES)))
        if known.get(code) == "problem" or code == "unexamined":
            why = "Whoever runs the command decides about problems, not a file in the folder."
            raise UsageError(
                f"'ignore': {code!r} is not for a file.", why=why, fix=f"Give --ignore {code}, or set CKPT_IGNORE."
            )
    return value


def _objects(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in _OBJECTS):
        return value
    if value == "keep":
        why = "What is kept is as unsafe as it was."
        raise UsageError("'objects': 'keep' is not for a file.", why=why, fix="Give --objects keep, or set CKPT_OBJECTS.")
    raise UsageError(f"'objects' is {value!r}.", fix="There are plain and drop.")


def _limits(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        raise UsageError("'limits' is not a table.", fix="For example: limits = { records = 1000 }")
    found = dict(limits.parse(f"{name}={number}") for name, number in value.items())
    for name, number in found.items():
        if number > limits.LIMITS[name].default:
            why = f"It is {limits.LIMITS[name].default}; a file in the folder may lower it."
            raise UsageError(f"'limits': {name} = {number} raises the limit.", why=why, fix="Give --limit, or set CKPT_LIMITS.")
    return found


# --- in the commands


def from_settings(name: str) -> dict[str, Any]:
    """What makes an option take its default from a variable or from pyproject.toml, and say so at the end."""
    return {"envvar": VARIABLES[name], "callback": _tell_at_the_end}


def give_way(name: str) -> bool:
    """Whether the value of an option is only a default, which another option that was given may overrule."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.COMMANDLINE


def _tell_at_the_end(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    source = ctx.get_parameter_source(option.name or "")
    origin = _origin(option, source)
    if value and origin is not None and not ctx.resilient_parsing:
        shown = value if isinstance(value, str) else " ".join(value)
        ctx.call_on_close(_telling(ctx, printable(f"{option.opts[0]} {shown} is set by {origin}")))
    return value


def _telling(ctx: click.Context, text: str) -> Callable[[], None]:
    def tell() -> None:
        if not ctx.params.get("quiet"):
            click.echo(text, err=True)

    return tell


def _origin(option: click.Parameter, source: object) -> str | None:
    if source is click.core.ParameterSource.ENVIRONMENT:
        return str(option.envvar)
    if source is click.core.ParameterSource.DEFAULT_MAP:
        found = _find(_here())
        return os.fspath(found[0]) if found is not None else NAME
    return None
