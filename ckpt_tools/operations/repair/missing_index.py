"""The index of shards that have lost it, written beside them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ckpt_tools.errors import UsageError
from ckpt_tools.formats import folders
from ckpt_tools.formats.open import collector_paused, count_tensors, decode_file, naming
from ckpt_tools.formats.parts import loose_shards
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import replacing
from ckpt_tools.io.sources import Files
from ckpt_tools.io.writer import write
from ckpt_tools.operations.repair.report import Repaired


def write_index(path: str | os.PathLike[str], *, dry_run: bool = False) -> Repaired:
    """Write the index that a folder of shards lacks; the shards stay as they are.

    Args:
        path: a local folder. dry_run: only report.

    Returns:
        The report, whose target is the index.

    Raises:
        UsageError: the folder holds no shards that lack an index. PartError: shards are missing. OutputError: no write.
    """
    started = time.perf_counter()
    with contextlib.closing(Files(Path(path), Path(path))) as files, collector_paused(), naming(files):
        layout = folders.layout(files.folder, files.names())
        if layout.container != "shards":
            raise UsageError(
                f"{path} holds no shards that lack an index.", fix="To repair anything else, name a file and an OUT."
            )
        shards = loose_shards.read(layout.names, files, decode_file)
        text = loose_shards.missing_index(shards)
        target = files.folder / loose_shards.index_name(layout.names[0])
        report = Repaired(str(path), str(target), "sharded", dry_run, "The index of the shards is missing.")
        report.tensors = report.saved = sum(count_tensors(decoded.root) for decoded in shards.values())
        report.tensor_bytes = report.saved_bytes = sum(decoded.storage_bytes for decoded in shards.values())
        report.bytes = len(text)
        if not dry_run:
            with replacing(target) as output:
                write([Piece(Literal(text))], output)
                files.check_unchanged()
    report.notes.append(("index-written", f"It names {len(shards)} shards, which are unchanged."))
    report.seconds = time.perf_counter() - started
    return report
