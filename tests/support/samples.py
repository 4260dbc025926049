"""The checkpoints that tests run over: our fixtures, and the corpus of real files where CKPT_CORPUS names it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpt_tools

CODES = frozenset(json.loads((Path(ckpt_tools.__file__).parent / "operations" / "explained.json").read_text()))  # of findings
FIXTURES = Path(__file__).parents[2] / "fixtures"
PTH = sorted(FIXTURES.glob("*.pth"))
SAFETENSORS = sorted(FIXTURES.glob("*.safetensors"))


def _corpus() -> list[dict[str, Any]]:
    folder = os.environ.get("CKPT_CORPUS")
    if folder is None:
        return []
    rows: list[dict[str, Any]] = json.loads(Path(folder, "catalogue.json").read_text())
    return [row | {"path": Path(folder, "files", row["file"])} for row in rows]


CORPUS = _corpus()


def corpus(*containers: str) -> list[Any]:
    """Parameters: the catalogue's rows of these containers; one skipped parameter without a corpus."""
    skip = pytest.mark.skip(reason="CKPT_CORPUS is not set")
    rows = [row for row in CORPUS if row["container"] in containers]
    return [pytest.param(row, marks=pytest.mark.corpus, id=row["file"]) for row in rows] or [
        pytest.param({}, marks=[pytest.mark.corpus, skip], id="corpus")
    ]


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Save one of our own checkpoints again, with a change."""
    saved = torch.load(path, weights_only=False)
    change(saved)
    torch.save(saved, path)


def converted(state: object, folder: Path, **options: Any) -> Any:
    """What torch loads after a conversion of what torch saved."""
    torch.save(state, folder / "in.pth")
    ckpt_tools.convert(folder / "in.pth", folder / "out.pth", overwrite=True, **options)
    return torch.load(folder / "out.pth", weights_only=True)


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file as safetensors reads it."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def by_name(path: Path) -> str:
    """A test's id from a file."""
    return path.name


def shown(value: object) -> str:
    """A test's id from any value: one in all processes, which an address or the order of a set is not."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(shown, value)))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
