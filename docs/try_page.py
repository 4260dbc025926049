"""What docs/try.html needs beside it in the site: Pyodide from its npm package, `ckpt.pyz` and `in_page.py`."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "pyodide@314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
PAGE = ("try.html", "try/page.css", "try/page.mjs", "try/worker.mjs")  # in docs/
_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json", "package.json")


def pyodide() -> bytes | None:
    """The npm package, as pinned; None where npm is missing or gets nothing.

    Raises:
        ValueError: it is another one than was pinned.
    """
    kept = ROOT / "build" / f"{PACKAGE}.tgz"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        command = ["npm", "pack", "--silent", PACKAGE, "--pack-destination", str(kept.parent)]
        done = subprocess.run(command, capture_output=True, text=True) if shutil.which("npm") else None
        if done is None or done.returncode:
            return None
        (kept.parent / done.stdout.split()[-1]).replace(kept)
    data = kept.read_bytes()
    if (found := f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}") != INTEGRITY:
        kept.unlink()
        raise ValueError(f"{PACKAGE} has the integrity {found}, and {INTEGRITY} is pinned")
    return data


def put(package: bytes, pyz: bytes, site: Path) -> None:
    """Everything that the page loads, into `site/try/`."""
    beside = site / "try"
    (beside / "pyodide").mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in _FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None, name
            (beside / "pyodide" / name).write_bytes(member.read())
    (beside / "ckpt.pyz").write_bytes(pyz)
    shutil.copyfile(ROOT / "docs" / "in_page.py", beside / "in_page.py")
