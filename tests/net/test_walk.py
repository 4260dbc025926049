"""What a checkpoint holds, and what --select, --keep and --drop take of it, where dicts and tensors stand in several places."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError


def twice() -> dict[str, Any]:
    """One state dict under two names."""
    state = {"a.w": torch.arange(2.0), "b.w": torch.arange(3.0)}
    return {"model": state, "best": state, "epoch": 3}


def ties() -> dict[str, Any]:
    """Tensors that two dicts share: one whole, one by its storage; and one that is equal only."""
    base = torch.arange(6.0)
    return {"model": {"a.w": base, "b.w": base[:3]}, "ema": {"a.w": base, "c.w": base[3:], "d.w": torch.arange(6.0)}}


def deep() -> dict[str | int, Any]:
    """Lists, tuples, keys with dots and numbers, an OrderedDict with `_metadata`, an empty dict."""
    state: Any = OrderedDict({"x.w": torch.ones(1), "x.b": torch.zeros(1)})
    state._metadata = OrderedDict({"": {"version": 1}, "x": {"version": 2}})
    return {
        "nets": [state, {"y.w": torch.ones(2)}], "a.b": {"c": torch.ones(3)}, "pair": (torch.ones(4), {}),
        7: {"z": torch.ones(5)},
    }  # fmt: skip


def ring() -> dict[str, Any]:
    """A dict that holds itself, under the state dict and above it."""
    made: dict[str, Any] = {"model": {"a.w": torch.ones(2)}}
    made["self"] = made
    return made


MADE: dict[str, Any] = {"twice": twice, "ties": ties, "deep": deep, "ring": ring}
# the paths of the tensors that are listed, in order
LISTED = {
    "twice": ["model.a.w", "model.b.w", "best.a.w", "best.b.w"],
    "ties": ["model.a.w", "model.b.w", "ema.a.w", "ema.c.w", "ema.d.w"],
    "deep": ["nets.0.x.w", "nets.0.x.b", "nets.1.y.w", "a.b.c", "pair.0", "7.z"],
    "ring": ["model.a.w"],
}
# what comes out: {dotted path: elements}
OUT: list[tuple[str, dict[str, Any], dict[str, int] | None]] = [
    ("twice", {}, {"model.a.w": 2, "model.b.w": 3, "best.a.w": 2, "best.b.w": 3}),
    ("twice", {"select": "model"}, {"a.w": 2, "b.w": 3}), ("twice", {"select": "best"}, {"a.w": 2, "b.w": 3}),
    ("twice", {"select": "model.a.w"}, {"": 2}),
    ("twice", {"drop": "a.w"}, {"model.b.w": 3, "best.b.w": 3}),
    ("twice", {"keep": "b.*"}, {"model.b.w": 3, "best.b.w": 3}),
    ("twice", {"drop": "best"}, {"model.a.w": 2, "model.b.w": 3}),
    ("twice", {"rename": r"^a\.=n."}, {"model.n.w": 2, "model.b.w": 3, "best.n.w": 2, "best.b.w": 3}),
    ("twice", {"add_prefix": "p."}, {"model.p.a.w": 2, "model.p.b.w": 3, "best.p.a.w": 2, "best.p.b.w": 3}),
    ("twice", {"select": "ema"}, None), ("twice", {"keep": "zzz"}, None), ("twice", {"drop": "*"}, None),
    ("twice", {"select": "epoch"}, None), ("twice", {"rename": r"^[ab]=x"}, None),
    ("ties", {"select": "ema"}, {"a.w": 6, "c.w": 3, "d.w": 6}),
    ("ties", {"drop": "model.a.w"}, {"model.b.w": 3, "ema.a.w": 6, "ema.c.w": 3, "ema.d.w": 6}),
    ("ties", {"keep": ["b.w", "c.w"]}, {"model.b.w": 3, "ema.c.w": 3}),
    ("ties", {"drop": "ema.*"}, {"model.a.w": 6, "model.b.w": 3}),
    ("ties", {"keep": "*.w", "drop": "a.w"}, {"model.b.w": 3, "ema.c.w": 3, "ema.d.w": 6}),
    ("deep", {"select": "nets.0"}, {"x.w": 1, "x.b": 1}), ("deep", {"select": "nets.1"}, {"y.w": 2}),
    ("deep", {"select": "a.b"}, {"c": 3}), ("deep", {"select": "pair.0"}, {"": 4}), ("deep", {"select": "nets.2"}, None),
    ("deep", {"select": "7"}, {"z": 5}), ("deep", {"select": "pair.1"}, None),
    ("deep", {"keep": "y.w"}, {"nets.1.y.w": 2, "pair.0": 4}),
    ("ring", {"select": "model"}, {"a.w": 2}), ("ring", {"select": "self"}, {"model.a.w": 2}),
]  # fmt: skip


def flat(value: Any, path: str = "", above: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Every tensor with its dotted path; a container inside itself is left out."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if id(value) in above or not isinstance(value, dict | list | tuple):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, torch.Tensor] = {}
    for key, part in items:
        found |= flat(part, f"{path}.{key}" if path else str(key), (*above, id(value)))
    return found


@pytest.mark.parametrize("name", MADE)
def test_what_is_listed(name: str, tmp_path: Path) -> None:
    """Each tensor is listed at its places, in order, with its storage; what is tied has one storage."""
    torch.save(MADE[name](), tmp_path / "in.pth")
    rows = ckpt_tools.inspect(tmp_path / "in.pth").tensors
    assert [".".join(map(str, row["where"])) for row in rows] == LISTED[name]
    live = flat(torch.load(tmp_path / "in.pth"))
    places = {row: live[path].untyped_storage().data_ptr() for row, path in enumerate(LISTED[name])}
    for one in places:
        for two in places:
            assert (rows[one]["storage"] == rows[two]["storage"]) == (places[one] == places[two])


@pytest.mark.parametrize(("name", "options", "wanted"), OUT, ids=[f"{name}-{options}" for name, options, _ in OUT])
def test_what_options_take(name: str, options: dict[str, Any], wanted: dict[str, int] | None, tmp_path: Path) -> None:
    """The tensors with their values and ties, once for every place that is left; or an error and no file."""
    torch.save(MADE[name](), tmp_path / "in.pth")
    if wanted is None:
        with pytest.raises(CkptError):
            ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", **options)
        assert not (tmp_path / "out.pth").exists()
        return
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", **options)
    out = torch.load(tmp_path / "out.pth")
    found = flat(out)
    assert {path: value.numel() for path, value in found.items()} == wanted
    by_storage: dict[int, torch.Tensor] = {}
    for value in found.values():  # what shares a storage are views of the same numbers; nothing is stored twice
        by_storage.setdefault(value.untyped_storage().data_ptr(), value)
    sources = flat(MADE[name]())
    assert len(by_storage) <= len({value.untyped_storage().data_ptr() for value in sources.values()})
    if name == "twice" and "model.b.w" in wanted and "best.b.w" in wanted:
        assert out["model"] is out["best"]


def test_values_beside_go_where_they_belong(tmp_path: Path) -> None:
    """The epoch stays with the whole, and goes with a selection; `_metadata` follows names and selection."""
    torch.save(deep() | {"epoch": 3}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "all.pth", drop="a.b")
    assert torch.load(tmp_path / "all.pth")["epoch"] == 3
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "one.pth", select="nets.0", add_prefix="p.")
    found: Any = torch.load(tmp_path / "one.pth")
    assert found._metadata["p.x"] == {"version": 2}
