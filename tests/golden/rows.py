"""The rows of each group. Those that are written by hand stand in the kept file itself: a new one is a line `=== ROW` there."""

import os
from functools import cache
from pathlib import Path

from tests.golden.inputs import PAIRS
from tests.support.families import SIDES
from tests.support.samples import FIXTURES

PLACE = Path(__file__).parent / "kept"
MARK = "=== "
_ENDINGS = (".pth", ".pt", ".ckpt", ".safetensors", ".gguf", ".onnx", ".msgpack", ".keras", ".h5")
_COLLECTIONS = ("", "found", "frameworks", "quantised")
_BY_HAND = ("convert", "commands", "library")
_MADE = (
    "ddp.pth.gz", "ddp.pth.bz2", "ddp.pth.xz", "ddp.tar", "two.tar", "model.tar.gz", "bundle.zip", "empty.pth",
    "notes.txt", "page.pth", "pointer.pth",
    "cut.safetensors", "arrays.npz", "deflated.npz", "array.npy", "scripted.pt", "frozen.pt",
    "exported.pt2",
    *(f"arrays{protocol}.pkl" for protocol in range(6)), "evil.pkl", "values.pth", "sparse.pth", "quantised.pth",
    "wide.pth", "normed.pth",
    "adam.pth", "numbers.pth", "nans.pth", "two.tar!single.pth", "nothing.tar!x",
)  # fmt: skip
_OF_MADE = (
    "inspect X", "inspect --json X", "check X --values", "scan X", "convert X out.pth", "convert X out.safetensors",
    "convert X out.pth --objects plain",
    "repair X out.pth", "stats X", "diff X made/legacy.pth",
)  # fmt: skip
_OF_PAIRS = (
    "match made/A.pth --like made/B.pth --match structure",
    "match made/A.pth --like tests.support.networks:B --from tests.support.networks:A",
    "match made/A.pth --like tests.support.networks:B -o out.toml",
    "convert made/A.pth out.pth --like made/B.pth --match structure",
)  # fmt: skip
_OF_EACH = {
    "inspect": ["ckpt inspect X"], "inspect-json": ["ckpt inspect --json X"], "check": ["ckpt check X"],
    "scan": ["ckpt scan X", "ckpt scan --json X"], "convert-each": ["ckpt convert X out.pth", "ckpt convert X out.safetensors"],
    "stats-each": ["ckpt stats X"], "repair-each": ["ckpt repair X out.pth"],
}  # fmt: skip


def _places() -> list[str]:
    """Every checkpoint of the fixtures: files of the collections, and folders of parts and adapters."""
    files = [path for name in _COLLECTIONS for path in (FIXTURES / name).iterdir() if path.suffix in _ENDINGS]
    collections = [FIXTURES / name for name in _COLLECTIONS]
    folders = [
        Path(folder)
        for folder, _, names in os.walk(FIXTURES)
        if Path(folder) not in collections and any(name.endswith((*_ENDINGS, ".distcp", ".bin", ".json")) for name in names)
    ]
    return [f"fixtures/{path.relative_to(FIXTURES).as_posix()}" for path in sorted([*files, *folders])]


def command(group: str) -> str:
    """What mends the file of a group: rows that are written by hand are in it alone."""
    wanted = f"python -m tests.golden {group}"
    gone = group in _BY_HAND and not (PLACE / f"{group}.txt").exists()
    return f"git checkout tests/golden/kept/{group}.txt && {wanted}" if gone else wanted


@cache
def kept(group: str) -> dict[str, str]:
    """The blocks that a file keeps, by their rows; none where it is missing."""
    path = PLACE / f"{group}.txt"
    blocks = path.read_text("utf-8").rstrip("\n").split(f"\n\n{MARK}") if path.exists() else []
    rows = [block.removeprefix(MARK) for block in blocks]
    return {block.partition("\n")[0]: f"{MARK}{block}" for block in rows}


def _lora(places: list[str]) -> list[str]:
    adapters = [place for place in places if place.startswith("fixtures/lora/") and "." not in place]
    command = "ckpt convert fixtures/lora/base.safetensors out.safetensors --lora"
    return [row for place in adapters for row in (f"{command} {place}", f"ckpt inspect {place}/adapter_model.safetensors")]


def _quantised(places: list[str]) -> list[str]:
    found = [place for place in places if place.startswith("fixtures/quantised/") and "plain" not in place]
    return [f"ckpt convert {place} out.safetensors --dequantize {dtype}" for place in found for dtype in ("bf16", "fp32")]


def _plans() -> list[str]:
    rows = []
    for plan, (_, _, sizes) in SIDES.items():
        values = "".join(f" --plan-value {name}={size}" for name, size in sizes.items())
        rows += [
            f"ckpt convert made/{plan}.pth out.pth --plan {plan}{values}",
            f"ckpt convert made/{plan}.pth out.pth --plan {plan} -n",
        ]
    return rows


def groups() -> dict[str, list[str]]:
    """The rows of every group, by the name of the file that keeps what came."""
    places = _places()
    made = {name: [command.replace("X", place) for place in places for command in rows] for name, rows in _OF_EACH.items()}
    by_hand = {name: list(kept(name)) for name in _BY_HAND}
    made["made"] = [f"ckpt {row}".replace("X", f"made/{name}") for name in _MADE for row in _OF_MADE]
    pairs = [pair.split() for pair in PAIRS]
    made["pairs"] = [f"ckpt {row}".replace("B", other).replace("A", one) for one, other in pairs for row in _OF_PAIRS]
    return made | by_hand | {"lora": _lora(places), "quantised": _quantised(places), "plans": _plans()}
