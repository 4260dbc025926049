"""Runs one row in this process: what is printed on a terminal of 100 columns, the exit code, digests of what is written."""

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
import ckpt_tools.torch
from tests.golden.rows import MARK
from tests.support.commands import main
from tests.support.samples import FIXTURES
from tests.support.schemas import hold

COLUMNS = 100
EDITED = {  # files that rows edit in place, as they are before each row
    "copy.pth": "fixtures/ddp.pth",
    "copy2.pth": "fixtures/ddp.pth",
    "copy2.safetensors": "fixtures/single.safetensors",
}
# what differs from run to run, and its stand-in
MASKS = [
    (re.compile(r"\x1b\[[\d;]*m"), ""),
    (re.compile(r"\b\d+\.\d+\.\d+\+(?:cpu|cu\d+)"), "<torch>"),
    (re.compile(r"(?<=[ (])\d+\.\d+ s\b(?:, [\d.]+ [KMG]?i?B/s)?"), "<time>"),
    (re.compile(r"(\bseconds(?:[\"']: ?|=))[\d.e-]+"), r"\g<1>0"),
    (re.compile(r'\btime="[\d.]+"'), 'time="0"'),
    (re.compile(r"(?<=\.html, )[\d.]+ KiB"), "<size>"),  # a page has the path of its file in it
    (re.compile(r"(?<=\.html', bytes=)\d+"), "<bytes>"),
    (re.compile(r"(\d\.\d{6})\d{6,}"), r"\1"),  # sums of another CPU end in other digits
    (re.compile(r'(?<="python": ")[\d.]+'), "<version>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:<port>"),
    (re.compile(r"0x[0-9a-f]{8,}"), "0x<address>"),
    (re.compile(r"torch[ =]+\d+\.\d+\.\d+(\+\w+)?"), "torch <version>"),
    (re.compile(r"PyTorch \d+\.\d+\.\d+(\+\w+)?"), "PyTorch <version>"),
]


class Terminal(io.StringIO):
    """Standard output as a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """It is one."""
        return True


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[None]:
    """A current folder with a copy of the fixtures, and the environment of every row."""
    shutil.copytree(FIXTURES, folder / "fixtures", ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.md"))
    before, variables = Path.cwd(), dict(os.environ)
    for name in [name for name in os.environ if name.startswith("CKPT_")]:
        del os.environ[name]
    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "1000", "TERM": "xterm", "NO_COLOR": "1", "NO_PAGER": "1"}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def run(row: str, names: dict[str, Any]) -> str:
    """The block of one row: `ckpt` alone or with arguments, else Python. What is written is told, and removed."""
    for name, source in EDITED.items():
        shutil.copyfile(source, name)
    there = set(os.listdir())
    out, errors = (Terminal() if "--json" not in row and " | " not in row else io.StringIO()), io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = command(row) if row.split()[0] == "ckpt" else _python(row, names)
    lines = [f"{MARK}{row}", *_text(out, row), *(f"2> {line}" for line in _lines(errors.getvalue())), f"exit {code}"]
    for name in sorted(set(os.listdir()) - there):
        lines.append(f"wrote {name}: {_written(Path(name), values='--lora' not in row)}")
        shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)
    return "\n".join(lines)


def command(row: str) -> int:
    """Run a line that begins with `ckpt`; the exit code."""
    before, sys.argv = sys.argv, ["ckpt", *shlex.split(row.removesuffix(" | cat"))[1:]]
    try:
        main(prog_name="ckpt")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def _python(row: str, names: dict[str, Any]) -> str:
    scope = {"ckpt_tools": ckpt_tools, "torch": torch, "Path": Path, **names}
    try:
        exec(compile(row, "<row>", "single"), scope)
    except ckpt_tools.CkptError as error:
        return f"{type(error).__name__}: {_masked(str(error))}"
    except Exception as error:  # of an argument that is not possible
        return f"{type(error).__name__}: {_masked(str(error))}"
    return "no error"


def _text(out: io.StringIO, row: str) -> list[str]:
    if "--json" in row:
        documents = [json.loads(line) for line in out.getvalue().splitlines()]
        for document in documents:
            hold(row.split()[1], document)
        return [_masked(json.dumps(document, ensure_ascii=True)) for document in documents]
    return _lines(out.getvalue())


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in _masked(text).splitlines()]


def _masked(text: str) -> str:
    for pattern, stand_in in MASKS:
        text = pattern.sub(stand_in, text)
    return text.replace(os.getcwd(), "<here>").replace(ckpt_tools.__version__, "<ckpt>")


def _written(path: Path, *, values: bool) -> str:
    """Tensors of a checkpoint by number and digest; of another file that it is there. Products differ between processors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = ckpt_tools.torch.load(path)
        except ckpt_tools.CkptError:
            return "a folder" if path.is_dir() else f"a file of {'text' if path.suffix in ('.toml', '.sig') else 'bytes'}"
    digest, count = hashlib.sha256(), 0
    for place, tensor in _tensors(loaded, ()):
        plain = tensor.detach().resolve_conj().resolve_neg()
        digest.update(repr((place, str(plain.dtype), tuple(plain.shape))).encode())
        if values and plain.numel() and plain.layout == torch.strided and not plain.is_quantized:
            digest.update(bytes(plain.contiguous().reshape(-1).view(torch.uint8).tolist()))
        count += 1
    return f"{count} tensors, {digest.hexdigest()[:16]}"


def _tensors(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, (*place, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(inner, (*place, index))
