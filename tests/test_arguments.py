"""Arguments of public calls: what is natural in Python is taken, and anything else is one clear UsageError."""

import contextlib
import datetime
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt_tools
import ckpt_tools.torch as load_code
from ckpt_tools.errors import CkptError, UsageError
from tests.support.samples import FIXTURES

SINGLE = FIXTURES / "single.pth"
PUBLIC: dict[str, Callable[..., Any]] = {
    name: getattr(home, name)
    for home in (ckpt_tools, load_code)
    for name in home.__all__
    if inspect.isfunction(getattr(home, name))
}


class Rude:
    """A value that answers nothing it is asked."""

    def __repr__(self) -> str:
        raise ValueError("no")

    def __bool__(self) -> bool:
        raise ValueError("no")


WILD: list[Any] = [
    None, 3, -1, 10**30, 2.5, float("nan"), True, "", "nonsense", "a=b", "\0", "\udc80", b"bytes", object(), Rude(), [], [3],
    ["x"], [None], (1, 2), {}, {"a": "b"}, {1: 2}, {"a": 3}, {3}, range(2), datetime.date(2024, 1, 1), np.arange(2),
    np.float32(1), np.array(None), torch.ones(2), torch.bfloat16, torch.device("cpu"), nn.Linear(1, 1), lambda *_: None,
    io.BytesIO(b"x"), io.StringIO("x"),
]  # fmt: skip
ARGUMENTS = [(name, argument) for name, function in PUBLIC.items() for argument in inspect.signature(function).parameters]


def expect_ours(folder: Path, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Call a function with what it cannot do without, and one argument more; only our own errors come out."""
    out, state = folder / "out.pth", {"weight": torch.ones(1, 1)}
    needed = {
        "path": SINGLE, "source": SINGLE, "target": out, "left": SINGLE, "right": SINGLE, "sources": [SINGLE, SINGLE],
        "output": folder / "out.toml", "model": nn.Linear(1, 1), "state_dict": state, "model_or_mapping": state,
        "name": "fc1.bias", "old": SINGLE, "new": SINGLE, "key": folder / "key.pem", "inputs": "1x1",
    }  # fmt: skip
    wanted = inspect.signature(function).parameters
    keywords = {name: value for name, value in needed.items() if name in wanted} | given
    if function is load_code.save and "path" not in given:
        keywords["path"] = out
    if function is ckpt_tools.match:
        keywords.setdefault("like", SINGLE)
    if function is ckpt_tools.edit_in_place:
        keywords.setdefault("dry_run", True)
    with contextlib.suppress(CkptError):
        made = function(**keywords)
        if isinstance(made, ckpt_tools.Checkpoint):
            made.close()
    out.unlink(missing_ok=True)
    out.with_suffix(".toml").unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_whatever_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, argument: str) -> None:
    """Any value for any argument of any public call ends well or in an error of ours."""
    monkeypatch.chdir(tmp_path)
    for value in WILD:
        if argument in ("progress", "before") and isinstance(value, nn.Module):
            continue  # a function that takes other arguments: its error is the caller's
        expect_ours(tmp_path, PUBLIC[name], {argument: value})


def test_what_no_call_takes(tmp_path: Path) -> None:
    """An argument that there is not is Python's own TypeError; options are checked before anything is looked at."""
    with pytest.raises(TypeError, match="no_such"):
        ckpt_tools.inspect(SINGLE, no_such=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ckpt_tools.inspect(SINGLE, SINGLE)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ckpt_tools.convert(SINGLE)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"convert\(\) got an unexpected keyword argument 'no_such'"):
        ckpt_tools.convert(SINGLE, "out.pth", no_such=1)  # type: ignore[call-arg]
    (tmp_path / "out.pth").write_bytes(b"mine")
    with pytest.raises(UsageError, match="does not go with"):
        ckpt_tools.convert(tmp_path / "none.pth", tmp_path / "out.pth", strip_module=True, add_module=True)
    ckpt_tools.convert(target=tmp_path / "named.pth", source=SINGLE)
    report = ckpt_tools.inspect(tmp_path / "named.pth")
    assert pickle.loads(pickle.dumps(report)) == report


def test_numbers_of_other_kinds(tmp_path: Path) -> None:
    """NumPy's numbers, a size as a float, weights as a tensor, globs as a set."""
    ckpt_tools.convert(SINGLE, tmp_path / "shards", shard_size=1e6, overwrite=np.bool_(True))  # type: ignore[arg-type]
    weights: Any = torch.tensor([0.25, 0.75])
    assert ckpt_tools.average([SINGLE, str(SINGLE)], tmp_path / "mean.pth", weights=weights).weights == [0.25, 0.75]
    assert ckpt_tools.stats(SINGLE, depth=np.int64(1))  # type: ignore[arg-type]
    ckpt_tools.convert(SINGLE, tmp_path / "less.pth", drop={"fc1.*", "fc2.*"})  # type: ignore[arg-type]
    assert not any(name.startswith("fc") for name in torch.load(tmp_path / "less.pth"))


@pytest.mark.parametrize(("function", "paths"), [
    (PUBLIC["match"], (SINGLE, SINGLE)), (PUBLIC["convert"], (SINGLE, "out.pth", "model")),
    (ckpt_tools.steps(SINGLE).fit, (SINGLE,)),
])  # fmt: skip
def test_options_go_by_name(function: Callable[..., Any], paths: tuple[Any, ...]) -> None:
    """An option without its name is a TypeError that says so, before any option is looked at."""
    with pytest.raises(TypeError, match="options go by name"):
        function(*paths)
