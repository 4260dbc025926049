"""`ckpt_tools.steps`: steps are a plan, and what carries them out is `convert`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools import Steps
from ckpt_tools.errors import CkptError, NothingMatchedError
from tests.support.samples import FIXTURES

SINGLE, TRAINING, WHOLE = FIXTURES / "single.pth", FIXTURES / "training.pth", FIXTURES / "whole_module.pth"
Chain = Callable[[Steps], Steps]
CHAINS: list[tuple[Path, Chain, dict[str, Any]]] = [
    (TRAINING, lambda c: c.select("model").unwrap().cast("bf16"), {"select": "model", "unwrap": True, "dtype": "bf16"}),
    (WHOLE, lambda c: c.objects("plain").add_prefix("net."), {"objects": "plain", "add_prefix": "net."}),
    (TRAINING, lambda c: c.slim().drop("*.bias").strip_module(), {"slim": True, "drop": "*.bias", "strip_module": True}),
    (SINGLE, lambda c: c.keep("fc1.*").keep("fc2.*"), {"keep": ["fc1.*", "fc2.*"]}),
    (SINGLE, lambda c: c.rename("^fc=head").rename({"1": "one"}), {"rename": [("^fc", "head"), ("1", "one")]}),
    (SINGLE, lambda c: c.strip_prefix("fc1.").add_module(), {"strip_prefix": "fc1.", "add_module": True}),
    (FIXTURES / "cuda.pth", lambda c: c.map_location("cpu").cast("fp16", only="*weight"),
     {"map_location": "cpu", "dtype": "*weight=fp16"}),
    (TRAINING, lambda c: c.select("model").unwrap().fit(like=SINGLE), {"select": "model", "unwrap": True, "like": SINGLE}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "chain", "options"), CHAINS, ids=lambda value: "")
def test_steps_are_what_convert_does(tmp_path: Path, path: Path, chain: Chain, options: dict[str, Any]) -> None:
    """The file is the one that `convert` writes, byte for byte; the live tensors are those that torch loads from it."""
    steps = chain(ckpt_tools.steps(path))
    assert steps.save(tmp_path / "steps.pth", overwrite=True).tensors
    tensors = steps.state_dict()
    ckpt_tools.convert(path, tmp_path / "convert.pth", **options)
    assert (tmp_path / "steps.pth").read_bytes() == (tmp_path / "convert.pth").read_bytes()
    loaded = torch.load(tmp_path / "convert.pth")
    loaded = loaded.get("model", loaded)
    assert list(tensors) == [name for name, value in loaded.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(tensor, loaded[name]) and tensor.dtype is loaded[name].dtype for name, tensor in tensors.items())


def test_a_step_gives_a_new_plan(tmp_path: Path) -> None:
    """Nothing is read before the end, and a plan may go on in several ways."""
    base = ckpt_tools.steps(tmp_path / "in.pth").unwrap()
    half, named = base.cast("bf16"), base.add_prefix("net.")
    torch.save({"module.weight": torch.ones(2)}, tmp_path / "in.pth")
    assert half.state_dict()["weight"].dtype is torch.bfloat16
    assert list(named.state_dict()) == ["net.weight"]
    assert list(base.state_dict()) == ["weight"]
    with pytest.raises(AttributeError):
        base.said = ()  # type: ignore[misc]


def test_one_state_dict_is_left(tmp_path: Path) -> None:
    """Several state dicts, objects without a word on them, and a missing file are the errors of convert."""
    torch.save({"a": {"x.weight": torch.ones(1)}, "b": {"y.weight": torch.ones(1)}}, tmp_path / "two.pth")
    with pytest.raises(NothingMatchedError, match="2 state dicts"):
        ckpt_tools.steps(tmp_path / "two.pth").state_dict()
    for path in (WHOLE, tmp_path / "none.pth"):
        with pytest.raises(CkptError) as steps:
            ckpt_tools.steps(path).state_dict()
        with pytest.raises(CkptError) as convert:
            ckpt_tools.convert(path, tmp_path / "out.pth")
        assert str(steps.value) == str(convert.value)
