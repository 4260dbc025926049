"""The library's messages in the command line's words: `dtype_only` becomes --dtype-only, `objects='plain'` --objects plain."""

from __future__ import annotations

import ast
import re
import shlex

_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


def as_options(text: str) -> str:
    """A message in which every argument between backticks is the option of the same name.

    >>> as_options("`dtype_only` needs `dtype='bf16'`; leave out `drop=['a b', 'c']`.")
    "--dtype-only needs --dtype bf16; leave out --drop 'a b' --drop c."
    """
    return _ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, written = found.groups()
    option = f"--{name.replace('_', '-')}"
    if written is None:
        return option
    try:
        value = ast.literal_eval(written)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # a word that stands for a value: WHERE
        return f"{option} {written}"
    if value is True:
        return option
    values = value if isinstance(value, list | tuple) and name in _REPEATED else [value]
    return " ".join(f"{option} {_shell(one)}" for one in values)


_REPEATED = ("drop", "keep", "rename", "reinit", "dtype_only", "ignore")


def _shell(value: object) -> str:
    """A value as it is typed in a shell."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        import json

        return shlex.quote(json.dumps(value))
    return shlex.quote(str(value))
