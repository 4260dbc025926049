"""The command line in this process: `ckpt("inspect", path)`."""

import importlib
import pkgutil

from click.testing import CliRunner, Result

import ckpt_tools
from ckpt_tools.cli import main

__all__ = ["ckpt", "main"]


def ckpt(*args: object, code: int | None = 0) -> Result:
    """`ckpt ARGS`; fails where the exit code is not `code`, None for any."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result


def import_all() -> None:
    """Every module of ckpt_tools, also those that commands import late."""
    for module in pkgutil.walk_packages(ckpt_tools.__path__, "ckpt_tools."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
