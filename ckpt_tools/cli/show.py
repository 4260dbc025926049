"""`ckpt show`."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ckpt_tools.cli.completion import complete_names
from ckpt_tools.cli.options import LOCATION, OUT_PATH, json_option, once, select_option, show_progress
from ckpt_tools.operations.show import Shown
from ckpt_tools.render.text import PIPE_WIDTH
from ckpt_tools.text import printable, shape_text


@click.command(short_help="Show values of one tensor.")
@click.argument("path", metavar="PATH", type=LOCATION)
@click.argument("name", metavar="NAME[INDEX]", shell_complete=complete_names)
@select_option(help="Where to look for NAME.")
@click.option("--all", is_flag=True, help="Show every value, up to a million.")
@once("--output", "-o", type=OUT_PATH, metavar="FILE", help="Write the values to a .npy file instead.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@json_option
def show(path: Path, name: str, select: str | None, all: bool, output: Path | None, overwrite: bool, json: bool) -> None:
    """Show the exact values of one tensor or a slice of it.

    \b
    ckpt show model.pth fc.weight
    ckpt show model.pth 'fc.weight[0:3, :5]'
    ckpt show training.pth 'optimizer.state.0.exp_avg[..., -1]'
    ckpt show model.safetensors fc.weight -o fc.npy

    Only these values are read, also from folders and addresses. In a .npy file bfloat16 and fp8 become float32, without loss:
    NumPy has no such types.

    Exit code: 0 success, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.show import show as show_values

    with show_progress() as progress:
        report = show_values(path, name, select=select, whole=all, output=output, overwrite=overwrite, progress=progress)
    if json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    else:
        print_shown(report)


def print_shown(report: Shown) -> None:
    """What the tensor is, what of it is shown, and the values in brackets as NumPy and torch print them."""
    lines = [f"{report.name} of {report.path}", f"dtype  {report.dtype}", f"shape  {shape_text(report.shape)}"]
    if report.index:
        lines.append(f"index  [{report.index}], {shape_text(report.selected)}")
    if report.output is not None:
        wider = "" if report.written == report.dtype else f" as {report.written}, exactly: NumPy has no {report.dtype}"
        lines.append(f"wrote  {report.output}{wider}")
    sys.stdout.write("".join(printable(line) + "\n" for line in lines))
    if report.output is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
        sys.stdout.write(f"\n{_values_text(report, width)}\n")


def _values_text(report: Shown, width: int) -> str:
    """The values, a bracket for each dimension that is not a single place; what is left out of it stands as three dots."""
    counts = [len(places) for places in report.axes]
    packed = len(report.texts) // math.prod(counts) if math.prod(counts) else 1  # two float4 are one element
    asked = iter(report.selected)
    dims = [(count, next(asked)) for count, is_range in zip(counts, report.ranges, strict=True) if is_range]
    if packed > 1 and dims and report.ranges[-1]:
        dims[-1] = dims[-1][0] * packed, dims[-1][1] * packed
    elif packed > 1:
        dims.append((packed, packed))
    cell = max(map(len, report.texts), default=0)

    def block(depth: int, texts: Sequence[str]) -> str:
        if depth == len(dims):
            return texts[0].rjust(cell) if texts else "[]"
        count, whole = dims[depth]
        step = len(texts) // count if count else 0
        parts = [block(depth + 1, texts[at * step : (at + 1) * step]) for at in range(count)]
        if count < whole:
            parts.insert(count // 2, "...")
        if depth == len(dims) - 1:  # a row, in as many lines as the width asks for
            a_line = max(1, (width - depth - 1) // (cell + 2))
            parts = [", ".join(parts[at : at + a_line]) for at in range(0, len(parts), a_line)]
        between = ",\n" if depth >= len(dims) - 2 else ",\n\n"
        return f"[{(between + ' ' * (depth + 1)).join(parts)}]"

    return block(0, report.texts)
