"""Convert a checkpoint: the call. What it does is in `conversion`, which is imported while the copying has begun."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ckpt_tools.cloning import Clone
from ckpt_tools.errors import UsageError
from ckpt_tools.files import output_target, replacing

if TYPE_CHECKING:
    from ckpt_tools.conversion import Converted
    from ckpt_tools.writer import Progress

ObjectsPolicy: TypeAlias = Literal["keep", "plain", "drop"]
Format: TypeAlias = Literal["pth", "pth-legacy", "safetensors"]
_SUFFIXES: dict[str, Format] = {".safetensors": "safetensors"}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    strip_module: bool = False,
    add_module: bool = False,
    unwrap: bool = False,
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
    rename: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    select: str | None = None,
    map_location: str | None = None,
    dtype: str | None = None,
    dtype_only: str | Sequence[str] = (),
    objects: ObjectsPolicy | None = None,
    format: Format | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    reserve: int | None = None,
    compact: bool = False,
    fsync: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Read `source`, edit it, write `target`: the whole new file, or nothing.

    The steps come in this order: select, objects, keep and drop (by the names in `source`), names (strip_module, unwrap,
    strip_prefix, rename, add_prefix, add_module), devices, dtype.

    Args:
        source: the checkpoint to read. target: the file to write.
        strip_module: remove leading `module.`, repeated ones too, in every state dict. add_module: put one before every name.
        unwrap: remove every known wrapper, in any order and depth.
        strip_prefix, add_prefix: any literal prefix.
        rename: `REGEX=REPLACEMENT`, applied in order with `re.sub`.
        keep, drop: globs on tensor names or dotted paths.
        select: the dotted path of a state dict or subtree that becomes the whole output.
        map_location: one device for all storages, or `from=to` pairs separated by commas.
        dtype: cast float tensors: bf16, fp16, fp32 or fp64. dtype_only: globs that say which.
        objects: what happens to objects that are not plain data; without it a file that has some is refused.
        format: "pth", "pth-legacy" (what PyTorch before 1.6 reads) or "safetensors"; else by the target's extension.
        overwrite: replace an existing target. dry_run: only report. verify: check CRC-32s while copying.
        reserve: bytes of room in a safetensors header for longer names, 4096 unless told, so that an edit in place fits.
        compact: leave no gaps, not even where keeping them would spare moving the tensors.
        fsync: make a new file durable before returning (a replaced one always is).
        progress: called with (bytes written, bytes in total).

    Returns:
        The report.

    Raises:
        CkptError: see `ckpt_tools.errors`; nothing has been written then.
    """
    started = time.perf_counter()
    kind = output_format(target, format)
    with ExitStack() as stack:
        output = clone = None
        if dry_run:
            output_target(target, overwrite=True)
        else:
            output = stack.enter_context(replacing(target, overwrite=overwrite, durable=fsync))
        if output is not None and kind == "pth" and not (keep or drop or select or dtype or verify or compact):
            clone = stack.enter_context(Clone(source, output))  # the tensors will stay where they lie in the input
        from ckpt_tools.conversion import Edits, Names, run

        names = Names(strip_module, add_module, unwrap, strip_prefix, add_prefix, _several(rename))
        only = _several(dtype_only)
        edits = Edits(
            names, _several(keep), _several(drop), select, map_location, dtype, only, objects, kind, verify, reserve, compact
        )
        report = run(source, target, edits, output, clone, progress)
    report.seconds = time.perf_counter() - started
    return report


def _several(values: str | Sequence[str]) -> Sequence[str]:
    """A single text where several may be given: one of them."""
    return (values,) if isinstance(values, str) else values


def output_format(target: str | os.PathLike[str], format: Format | None) -> Format:
    """The container of an output: as said, else by extension; anything but `.safetensors` is a torch-zip."""
    if format not in (None, "pth", "pth-legacy", "safetensors"):
        raise UsageError(f"--format {format!r} is none of pth, pth-legacy, safetensors.")
    return format or _SUFFIXES.get(Path(target).suffix, "pth")
