"""Terminal pictures of the docs: real commands on the fixtures, as they look on a terminal of 80 columns.

python -m docs.pictures      # writes docs/images/*.svg again
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from torch import nn

from ckpt_tools import diff, inspect, stats
from ckpt_tools.render.html import page
from tests.support.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 80
COMMANDS = {
    "inspect": "ckpt inspect training.pth",
    "convert": "ckpt convert training.pth weights.safetensors --select model --unwrap --dtype bf16",
    "diff": "ckpt diff --values --select model=. training.pth single.pth",
    "stats": "ckpt stats single.pth",
    "check": "ckpt check ddp.pth",
}
_TEXT = (215, 219, 224)
_COLOURS = [(62, 68, 81), (240, 113, 120), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194)]
_THEME = TerminalTheme((21, 24, 28), _TEXT, [*_COLOURS, _TEXT])
# rich's own frame has a font from the network in it; this one takes the reader's.
_FRAME = """\
<svg class="rich-terminal" viewBox="0 24 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="terminal">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect y="24" width="{width}" height="{height}" rx="8" fill="rgb(21,24,28)"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def shown(command: str) -> str:
    """What a command prints on a terminal, colours included; the time that it took is always the same."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (ROOT / "fixtures").glob("*.pth"):
            shutil.copy(path, folder)
        environment = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "COLORTERM")}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        environment |= {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-16color"}
        arguments = [sys.executable, "-m", "ckpt_tools", *shlex.split(command)[1:]]
        done = subprocess.run(arguments, capture_output=True, encoding="utf-8", cwd=folder, env=environment)  # 1 is an answer
    return re.sub(r"\d+\.\d\d s\b", "0.01 s", done.stdout)


def picture(name: str) -> str:
    """The command and what it prints, as SVG."""
    console = Console(record=True, width=WIDTH + 4, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text(f"$ {COMMANDS[name]}", style="bold"), soft_wrap=True)
    console.print(Text.from_ansi(shown(COMMANDS[name])), end="")
    return console.export_svg(theme=_THEME, code_format=_FRAME, unique_id=name)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(128), nn.MultiheadAttention(128, 4)
        self.ln2, self.mlp = nn.LayerNorm(128), nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


def _save_epochs(folder: Path) -> None:
    """Two checkpoints of a small transformer: the later one has another head, and a NaN."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"embed": nn.Embedding(2000, 128), "layers": nn.ModuleList(_Block() for _ in range(8))})
    layers["head"] = nn.Linear(128, 2000, bias=False)
    state = {f"module.{name}": tensor for name, tensor in layers.state_dict().items()}
    torch.save({"model": state, "epoch": 12, "lr": 0.0003}, folder / "epoch_12.pth")
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["module.head.weight"][:100] = 0
    changed["module.layers.3.mlp.0.weight"][0, 0] = float("nan")
    torch.save({"model": changed, "epoch": 13, "lr": 0.0001}, folder / "epoch_13.pth")


def report_picture() -> None:
    """What `ckpt report --values epoch_13.pth epoch_12.pth` makes, in a light theme."""
    with tempfile.TemporaryDirectory() as name, Browser(Path(name, "profile")) as browser:
        folder = Path(name)
        _save_epochs(folder)
        with contextlib.chdir(folder):
            description, difference = inspect("epoch_13.pth"), diff("epoch_13.pth", "epoch_12.pth", values=True)
            made = page(replace(description, path="/data/runs/epoch_13.pth"), stats("epoch_13.pth"), difference)
        (folder / "page.html").write_text(made, "utf-8")
        browser.open(folder / "page.html", width=1000, height=1120, dark=False)
        browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        browser.screenshot(IMAGES / "report-light.png")
        assert not browser.errors, browser.errors


def main() -> None:
    """Write all of them."""
    for name in COMMANDS:
        (IMAGES / f"{name}.svg").write_text(picture(name), "utf-8")
    if CHROMIUM is not None:
        report_picture()


if __name__ == "__main__":
    main()
