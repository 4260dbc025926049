"""What "refused" means: the same error from `inspect` and `convert`, its message told, and nothing written."""

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools import CkptError

# The first line of a child that Ctrl-C is to stop: tests in the background of a shell ignore it, and a child inherits that.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def write(folder: Path, data: bytes, name: str = "bad.pth") -> Path:
    """A file with these bytes."""
    path = folder / name
    path.write_bytes(data)
    return path


def listing(folder: Path) -> dict[str, int]:
    """Every file below a folder, with its size."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


def expect_refused(path: Path, error: type[CkptError], *said: str) -> None:
    """Both operations raise exactly this error, with these words in its message; the folder stays as it was."""
    with pytest.raises(CkptError) as caught:
        ckpt_tools.inspect(path)
    check(caught.value, error, said)
    assert ckpt_tools.check(path).exit_code
    expect_convert_refused(path, error, *said, target="out.pth")


def expect_convert_refused(path: Path, error: type[CkptError], *said: str, **options: Any) -> None:
    """Conversion alone raises this error, to both containers unless `target` says which."""
    before = listing(path.parent)
    targets = [options.pop("target")] if "target" in options else ["out.pth", "out.safetensors"]
    for target in targets:
        with pytest.raises(CkptError) as caught:
            ckpt_tools.convert(path, path.parent / target, **options)
        check(caught.value, error, said)
    assert listing(path.parent) == before


def check(found: CkptError, error: type[CkptError], said: tuple[str, ...]) -> None:
    """The class, the words, and that the message is one for people."""
    assert type(found) is error, f"{type(found).__name__}: {found}"
    for words in said:
        assert words in str(found), f"{words!r} is not in {found}"
    assert found.what.endswith((".", "'", '"')) or "\n" not in found.what
    assert len(str(found)) < 2000


def expect_warned(path: Path, code: str) -> ckpt_tools.Description:
    """The description, which has this finding once; and a conversion goes on and drops what was odd."""
    found = ckpt_tools.inspect(path)
    assert [row.code for row in found.findings].count(code) == 1, [row.code for row in found.findings]
    out = path.parent / "out.pth"
    ckpt_tools.convert(path, out, overwrite=True)
    assert code not in [row.code for row in ckpt_tools.inspect(out).findings]
    return found


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; `header` is text, bytes, or something to dump as JSON."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def info(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **extra: Any) -> dict[str, Any]:
    """The header's row for one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}
