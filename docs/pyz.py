"""dist/ckpt.pyz: `ckpt` and all that it needs but PyTorch in one file, for any Python from 3.11 on, on any system.

python -m docs.pyz [FILE]      # or make pyz; writes FILE.sha256, too. The same sources give the same bytes, with the same zlib.

The packages are those that are installed here, in the versions of constraints.txt, without their compiled modules.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "dist" / "ckpt.pyz"
PACKAGES = ("click", "rich", "markdown-it-py", "mdurl", "pygments", "fsspec")
_LEFT_OUT = re.compile(r"\.\.|.*(__pycache__|\.(so|pyd|pyi|c|exe)$|dist-info/(?!METADATA|licenses/|LICENSE)|fsspec/tests/)")
_MADE = (2000, 1, 1, 0, 0, 0)

# Every Python runs this much, so that an older one has a sentence to say. Modules are not compiled beforehand: only the Python
# that compiled them would start faster (0.1 s for 0.4), and the file would be twice as large.
_MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("ckpt needs Python 3.11 or newer; this is %d.%d." % sys.version_info[:2])

from ckpt_tools.cli import main

if __name__ == "__main__":
    main(prog_name="ckpt")
"""


def files() -> Iterator[tuple[str, bytes]]:
    """What the archive holds: names and bytes, sorted by name."""
    found = {"__main__.py": _MAIN.encode()}
    for path in (ROOT / "ckpt_tools").rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            found[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    found["ckpt_tools/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    for name in PACKAGES:
        found |= _of_package(name)
    yield from sorted(found.items())


def _of_package(name: str) -> dict[str, bytes]:
    """The files of an installed package, licences among them.

    Raises:
        SystemExit: it is not the version of constraints.txt.
    """
    pinned = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    package = distribution(name)
    if pinned is None or package.version != pinned[1]:
        sys.exit(f"{name} {package.version} is installed; constraints.txt says {pinned and pinned[1]}: make install.")
    paths = [path for path in package.files or () if not _LEFT_OUT.match(path.as_posix())]
    return {path.as_posix(): Path(str(path.locate())).read_bytes() for path in paths}


def archive() -> bytes:
    """The whole file: a line for a shell, and a zip that Python runs."""
    out = io.BytesIO(b"#!/usr/bin/env python3\n")
    out.seek(0, io.SEEK_END)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as opened:
        for name, data in files():
            opened.writestr(_info(name), data)
    return out.getvalue()


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _MADE)
    info.external_attr, info.compress_type, info.create_system = 0o644 << 16, zipfile.ZIP_DEFLATED, 3
    return info


def write(place: Path = PLACE) -> None:
    """Write the archive, and its SHA-256 beside it as sha256sum reads it."""
    made = archive()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(made)
    place.with_name(f"{place.name}.sha256").write_text(f"{hashlib.sha256(made).hexdigest()}  {place.name}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PLACE)
