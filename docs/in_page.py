"""What docs/try.html asks of Python in the browser: pages of commands, and a conversion as parts for a Blob."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, MissingPackageError, ObjectsError
from ckpt_tools.io.content import Joined, Late, Piece, Range, chunks
from ckpt_tools.io.source import Source
from ckpt_tools.operations.convert.conversion import CONTAINERS, plan
from ckpt_tools.operations.convert.edits import Edits
from ckpt_tools.operations.convert.inputs import open_input
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.render.converted import print_converted
from ckpt_tools.render.text import show
from ckpt_tools.render.wording import as_options
from ckpt_tools.text import dotted
from ckpt_tools.tree.findings import stem_and_extension
from ckpt_tools.tree.output_names import Format

FOLDER = Path("/in")
Part = bytes | list[int]  # new bytes, or offset and length of a slice of the old file

_name = ""


def run(command: str, name: str) -> str:
    """What `ckpt COMMAND NAME` prints."""
    global _name
    _name = name
    os.chdir(FOLDER)
    sys.argv = ["ckpt", command, "--", name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main()
    return out.getvalue()


def opens(name: str) -> bool:
    """Whether there is something to convert."""
    try:
        with open_input(name, ConvertOptions()):
            return True
    except CkptError:
        return False


def convert(to: str) -> dict[str, Any]:
    """The file without wrapper prefixes (`strip`), or its weights as `safetensors`.

    Returns:
        `name` of the new file, its `parts`, the `command` that makes the same, and its `text`. Refused: `text` alone.
    """
    try:
        try:
            return _convert(_name, to, None)
        except ObjectsError:  # what is no plain data becomes it, without its classes
            return _convert(_name, to, "plain")
    except MissingPackageError:
        return {
            "text": "This file needs PyTorch to be converted, which the page has not. `ckpt convert` on your machine does it."
        }
    except CkptError as error:
        return {"text": as_options(str(error))}


def _convert(name: str, to: str, objects: Literal["plain"] | None) -> dict[str, Any]:
    started = time.perf_counter()
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_input(name, ConvertOptions()))
        found = checkpoint.state_dicts
        select = dotted(found[0].where) if to == "safetensors" and len(found) == 1 and found[0].where else None
        options = ConvertOptions(unwrap=True, select=select, objects=objects)
        kind: Format = "safetensors" if to == "safetensors" or checkpoint.container == "safetensors" else "pth"
        target = stem_and_extension(name)[0] + (
            ".plain.pth" if kind == "pth" else ".safetensors" if to == kind else ".plain.safetensors"
        )
        report = Converted(name, target, CONTAINERS[kind])
        pieces, _, _ = plan(checkpoint, Edits(options, kind), report, stack)
        whole = checkpoint.source if checkpoint.packed is None else None
        parts = [part for piece in pieces for part in _parts(piece, whole)]
        report.seconds = time.perf_counter() - started
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            show(partial(print_converted, report))
        command = ["ckpt", "convert", name, target, "--unwrap", *(["--select", select] if select else [])]
        command += ["--objects", objects] if objects else []
        return {"name": target, "parts": parts, "command": shlex.join(command), "text": out.getvalue()}


def _parts(piece: Piece, whole: Source | None) -> Iterator[Part]:
    """The bytes of a piece; slices where they are the old file's own, `whole`."""
    content, checksum = piece.content, piece.checksum
    if isinstance(content, Joined):
        for inner in content.parts:
            yield from _parts(Piece(inner, checksum), whole)
        return
    copied = isinstance(content, Range) and content.source is whole
    if isinstance(content, Range) and copied:
        yield [content.offset, content.length]
        if checksum is None:
            return
    for chunk in (content.make(),) if isinstance(content, Late) else chunks(content):
        if checksum is not None:
            checksum.update(chunk)
        if not copied:
            yield bytes(chunk)
