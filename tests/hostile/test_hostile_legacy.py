"""torch-legacy streams that break a promise: rows 49 and 77 to 80, and what a legacy pickle shares with any other."""

import pickle as pickle_module
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.hostile.pickles import call, dict_of, tensor, text
from tests.hostile.refusals import expect_warned, write
from tests.support.legacy import MAGIC, floats, legacy, persistent, stream

SIX = floats(0, 1, 2, 3, 4, 5)
ONE = dict_of(w=tensor(on=persistent()))


def test_77_cut_anywhere(tmp_path: Path) -> None:
    """Wherever it is cut, the file is refused by inspect and convert alike, and never misread."""
    whole = legacy({"a.w": torch.arange(6.0), "b.w": torch.arange(4.0), "epoch": 3})
    for length in range(len(MAGIC), len(whole)):
        path = write(tmp_path, whole[:length])
        with pytest.raises(CkptError) as caught:
            ckpt_tools.inspect(path)
        assert str(caught.value).count("\n") <= 3


def test_80_trailing_bytes(tmp_path: Path) -> None:
    """Bytes behind the last storage are said, and not kept."""
    found = expect_warned(write(tmp_path, stream(ONE, ("0", SIX)) + b"more"), "trailing-bytes")
    assert found.findings[0].found == "4 bytes after the last storage"


def test_unknown_classes_run_nothing(tmp_path: Path) -> None:
    """A call in the pickle is an inert record, listed."""
    marker = tmp_path / "ran"
    root = dict_of(w=tensor(on=persistent()), x=call("os", "mkdir", text(str(marker))))
    path = write(tmp_path, stream(root, ("0", SIX)))
    assert [row["global"] for row in ckpt_tools.inspect(path).objects] == ["os.mkdir"]
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
    assert not marker.exists()


def test_flips_of_memo_indexes(tmp_path: Path) -> None:
    """A flip in the memo index of a function makes a call of a text, a dict or a class of storages: refused, as by torch."""
    data = legacy({"a.w": torch.rand(3, 4), "b.w": torch.rand(4)})
    at = data.index(b"((h") - 1  # the second tensor's function
    refused = 0
    for bit in range(8):
        path = write(tmp_path, data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :])
        try:
            torch.load(path, weights_only=True)
        except (pickle_module.UnpicklingError, TypeError, KeyError):
            with pytest.raises(CkptError):
                ckpt_tools.repair(path, tmp_path / "out.pth")
            refused += 1
    assert refused > 3
