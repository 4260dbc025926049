"""The command line in this process: `ckpt("inspect", path)`."""

from click.testing import CliRunner, Result

from ckpt_tools.cli import main

__all__ = ["ckpt", "main"]


def ckpt(*args: object, code: int | None = 0) -> Result:
    """`ckpt ARGS`; fails where the exit code is not `code`, None for any."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result
