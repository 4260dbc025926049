"""`ckpt convert IN... --to-dir DIR`: one bad file stops no other, a table at the end, the exit code is the worst."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli.options import LOCATION, print_failure
from ckpt_tools.errors import CkptError

if TYPE_CHECKING:
    from ckpt_tools.operations.convert.report import Converted


def inputs(given: Iterable[str | Path | None]) -> list[Path]:
    """The inputs, as paths or addresses."""
    return [LOCATION.convert(value, None, None) for value in given if value is not None]


def convert_many(
    sources: Sequence[Path], folder: Path, asked: Mapping[str, Any], *, jobs: int, quiet: bool, as_json: bool
) -> int:
    """Convert each into the folder, and report; the exit code."""
    from ckpt_tools.operations.convert.several import convert_several, targets

    made = targets(sources, folder, asked)
    results: list[Converted | CkptError] = []
    for source, result in zip(sources, convert_several(sources, made, asked, jobs=jobs), strict=True):
        results.append(result)
        if isinstance(result, CkptError):
            print_failure(source, result, as_json=as_json)
        elif as_json:
            from ckpt_tools.render.json import print_document

            print_document(result.to_json())
    if not as_json and not quiet:
        from ckpt_tools.render.converted import print_several
        from ckpt_tools.render.text import show

        show(partial(print_several, sources, made, results))
    return max((result.exit_code for result in results if isinstance(result, CkptError)), default=0)


def refuse_beside_many(in_place: bool, prove: Sequence[str], out: str | None) -> None:
    """What is about one input does not go with many.

    Raises:
        UsageError: it was given.
    """
    if in_place:
        raise click.UsageError("--to-dir writes new files; --in-place edits IN itself.")
    if out is not None:
        raise click.UsageError("--to-dir names the folder of all outputs; -o OUT is for one IN.")
    if prove:
        raise click.UsageError("--prove compares one IN with its OUT: run ckpt prove for each.")
