"""The plans that come with the package: `llama-meta-to-hf` is a page in `families/`, and `llama-hf-to-meta` its other way."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_HERE = "ckpt_tools.fit"


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the plans that are shipped, without those of the other way."""
    folder = files(_HERE) / "families"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def other_way(name: str) -> str:
    """The name of a plan the other way round: `a-x-to-y` is `a-y-to-x`.

    >>> other_way("llama-meta-to-hf")
    'llama-hf-to-meta'
    """
    left, _, new = name.rpartition("-to-")
    family, _, old = left.rpartition("-")
    return f"{family}-{new}-to-{old}"


def all_shipped() -> tuple[str, ...]:
    """The names of the plans that are shipped, in both ways."""
    return *shipped_names(), *map(other_way, shipped_names())


def find_shipped(name: str) -> tuple[str, bool] | None:
    """The shipped plan of a name, and whether it is to be read the other way round; None where none has this name."""
    if name in shipped_names():
        return name, False
    if "-to-" in name and (other := other_way(name)) in shipped_names():
        return other, True
    return None


def shipped_text(name: str) -> str:
    """The text of a shipped plan."""
    return (files(_HERE) / "families" / f"{name}.toml").read_text("utf-8")
