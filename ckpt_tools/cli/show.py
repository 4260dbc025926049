"""`ckpt show`."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
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
        sys.stdout.write("\n" + "".join(f"{line}\n" for line in _Page(report, width).lines()))


class _Page:
    """The values in lines."""

    def __init__(self, report: Shown, width: int) -> None:
        self.texts = report.texts
        self.width = width
        sizes, packed = [len(places) for places in report.axes], 1
        if count := math.prod(sizes):
            packed = len(report.texts) // count  # two float4 are one element
        # How many places of each dimension were asked for; None where one was named, which leaves no dimension
        named = iter(report.selected)
        whole = [next(named) if is_range else None for is_range in report.ranges]
        kept = [dim for dim, size in enumerate(whole) if size is not None]
        self.sizes = [sizes[dim] for dim in kept]
        self.cuts = [sizes[dim] // 2 if sizes[dim] < (whole[dim] or 0) else None for dim in kept]
        if packed > 1 and kept and kept[-1] == len(sizes) - 1:
            self.sizes[-1] *= packed
            self.cuts[-1] = None if self.cuts[-1] is None else self.cuts[-1] * packed
        elif packed > 1:
            self.sizes, self.cuts = [*self.sizes, packed], [*self.cuts, None]
        self.cell = max(map(len, self.texts), default=0)

    def lines(self) -> list[str]:
        """The page."""
        return list(self._block(0, 0, self.texts))

    def _block(self, dim: int, depth: int, texts: Sequence[str]) -> Iterator[str]:
        if dim == len(self.sizes):
            yield texts[0] if texts else "[]"
        elif dim == len(self.sizes) - 1:
            yield from self._row(depth, texts)
        elif not self.sizes[dim]:
            yield "[]"
        else:
            yield from self._rows(dim, depth, texts)

    def _rows(self, dim: int, depth: int, texts: Sequence[str]) -> Iterator[str]:
        count, step = self.sizes[dim], len(texts) // self.sizes[dim]
        for number in range(count):
            block = list(self._block(dim + 1, depth + 1, texts[number * step : (number + 1) * step]))
            opening = "[" if number == 0 else " "
            closing = "]" if number == count - 1 else ","
            yield from (f"{opening if at == 0 else ' '}{line}" for at, line in enumerate(block[:-1]))
            yield f"{opening if len(block) == 1 else ' '}{block[-1]}{closing}"
            if self.cuts[dim] == number + 1:
                yield " ...,"
            if number < count - 1 and dim < len(self.sizes) - 2:
                yield ""

    def _row(self, depth: int, texts: Sequence[str]) -> Iterator[str]:
        """One row, in as many lines as the width asks for."""
        cells = [text.rjust(self.cell) for text in texts]
        if (cut := self.cuts[-1]) is not None:
            cells.insert(cut, "...")
        line = "["
        for number, cell in enumerate(cells):
            more = cell + ("," if number < len(cells) - 1 else "]")
            if len(line) > 1 and depth + len(line) + 1 + len(more) > self.width:
                yield line
                line = ""
            line += more if line == "[" else f" {more}"
        yield line if cells else "[]"
