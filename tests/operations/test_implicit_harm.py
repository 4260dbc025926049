"""What runs though no opcode calls it: what classes do with a state, with what they are given, when they are thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operations.test_implicit_calls import name, text, verdict


def new(path: str) -> bytes:
    """An instance of a class, made without its `__init__`."""
    return name(path) + b")\x81"


def state(**values: bytes) -> bytes:
    """A dict for BUILD, and BUILD."""
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"ub"


# Classes that open, write or remove files, or call what they find in themselves.
CLASSES = {
    "a folder that is removed with its instance": new("numpy.lib._datasource:DataSource")
    + state(_istmpdest=b"\x88", _destpath=text("/home")),
    "the same under another name": new("numpy:DataSource") + state(_istmpdest=b"\x88", _destpath=text("/home")),
    "the same by its module's": new("numpy.lib.npyio:DataSource") + state(_istmpdest=b"\x88", _destpath=text("/home")),
    "a file that is written": new("fsspec.caching:MMapCache") + state(size=b"K\x09", location=text("/home/x")),
    "a file that is opened": new("fsspec.implementations.local:LocalFileOpener") + state(mode=text("rb"), path=text("x")),
    "a file that is flushed": new("fsspec.spec:AbstractBufferedFile") + state(mode=text("wb")),
}  # fmt: skip


@pytest.mark.parametrize("case", CLASSES)
def test_instances_that_do_harm(case: str, tmp_path: Path) -> None:
    """Classes whose `__setstate__` or `__del__` does harm are known."""
    assert verdict(tmp_path, CLASSES[case]).verdict == "dangerous"
