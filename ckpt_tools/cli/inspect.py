"""`ckpt inspect`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from ckpt_tools.cli.options import PIPED, expand, filter_option, print_failure, print_others, show_progress
from ckpt_tools.errors import CkptError
from ckpt_tools.io.source import Handed, is_address, is_there
from ckpt_tools.operations.inspect import Description
from ckpt_tools.render.text import Page, console, counted, print_title, show, size_text
from ckpt_tools.text import dotted, printable


@click.command(short_help="Show what is in a checkpoint.")
@click.argument("paths", nargs=-1, required=True, type=PIPED, metavar="PATH...")
@click.option("--all", is_flag=True, help="Show every tensor, value and object in full.")
@click.option("--tree/--flat", "tree", default=None, help="Show tensors as a tree, or one per line.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up tensors below the first N parts of their names.")
@filter_option(help="Show only tensors whose name or path matches.")
@click.option(
    "--sort", type=click.Choice(["name", "size", "file"]), default="file", show_default=True, help="Order of the tensors."
)
@click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Number of processes [up to 4, from 200 files on].")
@click.option("--no-pager", is_flag=True, help="Print a long page directly, not through $PAGER.")
@click.option("--json", is_flag=True, help="Print one JSON document per line; see docs/json.md.")
def inspect(
    paths: tuple[Path, ...], all: bool, tree: bool | None, depth: int | None, filter: str | None, sort: str,
    jobs: int | None, no_pager: bool, json: bool,
) -> None:  # fmt: skip
    """Show what is in a checkpoint: names, shapes, dtypes, devices. For a folder, one line per checkpoint.

    \b
    ckpt inspect model.pth
    ckpt inspect --filter '*.weight' --sort size model.pth
    cat model.pth | ckpt inspect -
    ckpt inspect --json runs/ | jq 'select(.totals) | .totals.parameters'

    Exit code: 0 success, 2 usage, 3 a file cannot be read (the others are shown).
    """
    if len(paths) == 2 and _is_tensor(*paths):
        raise click.UsageError(f"{paths[1]} is a tensor: ckpt show {shlex.join(map(str, paths))}")
    expanded = expand(paths)
    if not json:
        sys.stdout.writelines(f"{printable(text)}\n" for text in map(_of_training, paths) if text)
    asked_for_tensors = all or tree is not None or depth or filter is not None or sort != "file"
    separate = not set(expanded.checkpoints).issuperset(paths)  # a folder that is one checkpoint, or a file, stands for itself
    if json or asked_for_tensors or not separate or len(expanded.checkpoints) == len(paths):
        view = (all, bool(tree), tree is False, depth, filter, sort)
        code = _pages(expanded.checkpoints, jobs, view, json=json, paged=not no_pager)
    else:
        code = _overview(paths, expanded.checkpoints, jobs, paged=not no_pager)
    print_others(expanded.others, json=json)
    sys.exit(code)


def _is_tensor(path: Path, name: Path) -> bool:
    """Whether a checkpoint has a tensor with the name that was given as a second file."""
    if isinstance(path, Handed) or isinstance(name, Handed) or is_address(name) or is_there(name) or not is_there(path):
        return False
    result = _described(path)
    return isinstance(result, Description) and any(str(name) in (dotted(row["where"]), row["name"]) for row in result.tensors)


def _of_training(path: Path) -> str:
    """What the folder of a training run, or of one step of it, is."""
    from ckpt_tools.parts.training import described

    text = "" if isinstance(path, Handed) or is_address(path) else described(path)
    return f"{path} is {text}: ckpt convert {shlex.quote(str(path))} model.safetensors" if text else ""


_MANY = 200  # files from which on several processes are faster than one


def _pages(files: list[Path], jobs: int | None, view: tuple[Any, ...], *, json: bool, paged: bool) -> int:
    """A page or a JSON line for each file, a single page through the pager; the exit code."""
    code = 0
    described = _each(_json_line if json else _described, files, jobs)
    for number, (path, result) in enumerate(zip(files, described, strict=True)):
        if isinstance(result, CkptError):
            code = _fail(path, result, json=json)
        elif json:
            click.echo(result)
        else:
            from ckpt_tools.render.description import View, print_description

            if number:
                click.echo()
            show_paged(partial(print_description, result, View(*view)), allowed=paged and len(files) == 1)
    return code


def _overview(paths: tuple[Path, ...], files: list[Path], jobs: int | None, *, paged: bool) -> int:
    """One table of all that folders hold, and why some cannot be read; the exit code."""
    rows = list(_each(_row, files, jobs))
    show_paged(partial(print_overview, files, rows, paths[0] if len(paths) == 1 else None), allowed=paged)
    code = 0
    for path, row in zip(files, rows, strict=True):
        if isinstance(row, CkptError):
            code = _fail(path, row, json=False)
    return code


def _fail(path: Path, error: CkptError, *, json: bool) -> int:
    """Say why one file cannot be read, and what it would run; the exit code."""
    from ckpt_tools.operations.safety import of_unreadable

    print_failure(path, error, json=json, safety=of_unreadable(path, error))
    return error.exit_code


def _each(work: Callable[[Path], Any], files: list[Path], jobs: int | None) -> Iterable[Any]:
    """What is to be said about each file, in order; of many files by several processes."""
    jobs = min(jobs or (min(4, os.cpu_count() or 1) if len(files) >= _MANY else 1), len(files))
    if jobs < 2:
        return map(partial(_waited, work), files)
    from ckpt_tools.io.processes import in_processes

    return in_processes(work, files, jobs, batch=min(16, len(files) // jobs or 1))


def _waited(work: Callable[[Path], Any], path: Path) -> Any:
    with show_progress():
        return work(path)


def _row(path: Path) -> OverviewRow | CkptError:
    from ckpt_tools.operations.check.latest import step_in_texts
    from ckpt_tools.parts.training import is_state, step_of

    result = _described(path)
    if isinstance(result, CkptError):
        return result
    said = zip(("epoch", "step"), step_in_texts({**result.metadata, **result.values}), strict=True)
    step = ", ".join(f"{word} {number:.12g}" for word, number in said if number >= 0)
    if not step and not is_state(path.name) and not is_address(path) and (around := step_of(path.parent)) is not None:
        step = f"step {around}"
    return OverviewRow(result.container, result.totals["tensors"], result.file_bytes, _verdict(result), step)


def _described(path: Path) -> Description | CkptError:
    from ckpt_tools.operations.inspect import inspect as describe_checkpoint

    try:
        return describe_checkpoint(path)
    except CkptError as error:
        return error


def _json_line(path: Path) -> str | CkptError:
    from ckpt_tools.render.json import line

    result = _described(path)
    return result if isinstance(result, CkptError) else line(result.to_json())


def show_paged(render: Callable[[Page], None], *, allowed: bool) -> None:
    """Render to standard output; through a pager where that is a terminal with fewer lines, and a pager is not unwanted."""
    unwanted = os.environ.get("NO_PAGER") or os.environ.get("PAGER", "less") in ("", "cat")
    if unwanted or not (allowed and sys.stdout.isatty()):
        show(render)
        return
    out = console()
    with out.capture() as captured:
        render(Page(out))
    text = captured.get()
    try:
        if text.count("\n") < out.height:
            raise ValueError
        os.environ.setdefault("LESS", "FRX")  # colours stay, and so does the page
        click.echo_via_pager(text, color=True)
    except ValueError:  # also a quotation mark without its partner in $PAGER
        sys.stdout.write(text)


_DANGEROUS = ("dangerous", "unexamined")
_IN_THE_WAY = "device-tags"  # an info where the device is there; elsewhere the file does not load as it is


@dataclass(slots=True, eq=False, repr=False)
class OverviewRow:
    """One checkpoint of the table; its texts are as they are shown but for what a terminal must not see."""

    container: str
    tensors: int
    bytes: int
    verdict: str
    step: str


def _verdict(description: Description) -> str:
    """The codes of what stands in somebody's way, what is dangerous first; `loads` where nothing does."""
    told = (finding for finding in description.findings if finding.severity != "info" or finding.code == _IN_THE_WAY)
    codes = dict.fromkeys(finding.code for finding in told)
    return ", ".join(sorted(codes, key=lambda code: code not in _DANGEROUS)) or "loads"


def print_overview(paths: Sequence[Path], rows: Sequence[OverviewRow | CkptError], top: Path | None, out: Page) -> None:
    """A line for each checkpoint below a folder; `top` is that folder, None where there are several."""
    known = [row for row in rows if isinstance(row, OverviewRow)]
    unread = f"; {len(rows) - len(known)} cannot be read" if len(rows) > len(known) else ""
    size = size_text(sum(row.bytes for row in known))
    where = f"{top}: " if top is not None else ""
    print_title(f"{where}{counted(len(known), 'checkpoint')}, {size}{unread}", out)
    out.print()
    names = [printable(str(path if top is None else path.relative_to(top))) for path in paths]
    out.table({"file": names, **_columns(rows)}, right=("tensors", "size"))
    out.print("\nckpt inspect FILE shows one of them, --all shows all")


def _columns(rows: Sequence[OverviewRow | CkptError]) -> dict[str, list[str]]:
    unread = OverviewRow("", 0, 0, "unreadable", "")
    shown = [row if isinstance(row, OverviewRow) else unread for row in rows]
    return {
        "container": [row.container for row in shown],
        "tensors": ["" if row is unread else f"{row.tensors:,}" for row in shown],
        "size": ["" if row is unread else size_text(row.bytes) for row in shown],
        "verdict": [row.verdict for row in shown],
        "step": [row.step for row in shown],
    }
