"""`ckpt_tools.open`: a mapping from names to tensors, of which each is read when it is used."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from tests.support.samples import FIXTURES

KINDS = ["ddp.pth", "single.safetensors", "training.pth", "views.pth", "whole_module.pth", "float8.pth"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_by_its_name(kind: str) -> None:
    """Names, shapes and dtypes are those of inspect; the tensors are those that torch loads."""
    path = FIXTURES / kind
    rows = {".".join(map(str, row["where"])): row for row in ckpt_tools.inspect(path).tensors}
    with ckpt_tools.open(path) as file:
        assert list(file) == list(rows)
        for name, tensor in file.items():
            assert tuple(rows[name]["shape"]) == file.shape(name) == tensor.shape
            assert rows[name]["dtype"] == str(file.dtype(name)).removeprefix("torch.")
            assert file.dtype(name) is tensor.dtype
    if kind == "ddp.pth":
        assert all(torch.equal(tensor, ckpt_tools.open(path)[name]) for name, tensor in torch.load(path).items())


def test_it_is_used_as_safe_open_is(tmp_path: Path) -> None:
    """The same names, tensors and metadata; after the file is closed a tensor stays."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"made by": "us"})
    with safe_open(tmp_path / "model.safetensors", "pt") as theirs, ckpt_tools.open(tmp_path / "model.safetensors") as ours:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.metadata() == theirs.metadata()
        kept = ours["a"]
        assert all(torch.equal(ours[name], theirs.get_tensor(name)) for name in theirs.keys())  # noqa: SIM118
    assert torch.equal(kept, tensors["a"])


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    """`select` names what is opened; a name that is not there is an error of ours and a KeyError, as `get` expects."""
    torch.save({"model": {"fc.weight": torch.ones(2)}, "epoch": 3}, tmp_path / "run.pth")
    assert list(ckpt_tools.open(tmp_path / "run.pth")) == ["model.fc.weight"]
    file = ckpt_tools.open(tmp_path / "run.pth", select="model")
    assert ("fc.weight" in file, "fc.weigth" in file, file.get("fc.weigth")) == (True, False, None)
    with pytest.raises(KeyError, match=r"fc\.weight"):
        file["fc.weigth"]
    with pytest.raises(NothingMatchedError):
        ckpt_tools.open(tmp_path / "run.pth", select="ema")


def test_what_is_no_view_on_bytes_is_refused(tmp_path: Path) -> None:
    """A sparse tensor: in one sentence, and the others are there."""
    torch.save({"a": torch.eye(3).to_sparse(), "b": torch.ones(1)}, tmp_path / "sparse.pth")
    with ckpt_tools.open(tmp_path / "sparse.pth") as file:
        assert file["b"].item() == 1
        with pytest.raises(ConvertError, match="'a' is sparse"):
            file["a"]


def test_only_what_is_used_is_read(tmp_path: Path) -> None:
    """Of a file of 2 GB, which holds nothing but zeros, one tensor takes no memory for the others."""
    size = 1 << 30
    rows = {name: {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]} for n, name in enumerate("ab")}
    head = json.dumps(rows).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 2 * size)
    opened = ckpt_tools.open(tmp_path / "big.safetensors")
    before = _peak()
    assert opened["b"][-1].item() == 0
    assert _peak() - before < 100 << 20


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_load_code_is_found_at_the_top() -> None:
    """`from ckpt_tools import load_into, load_state_dict, save, open` imports no torch; a call does."""
    code = (
        "import sys; from ckpt_tools import load_into, load_state_dict, save, open\n"
        "assert 'torch' not in sys.modules\n"
        f"assert open({str(FIXTURES / 'single.pth')!r}).shape('fc1.bias') and 'torch' not in sys.modules\n"
        f"assert len(load_state_dict({str(FIXTURES / 'single.pth')!r})) and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_tensors_of_one_dotted_name_are_refused(tmp_path: Path) -> None:
    """Neither would be the one that is meant; a name of another type is none."""
    torch.save({"model.w": torch.ones(2), "model": {"w": torch.zeros(2)}}, tmp_path / "two.pth")
    with pytest.raises(ConvertError, match="two tensors are called"):
        ckpt_tools.open(tmp_path / "two.pth")
    assert ckpt_tools.open(FIXTURES / "single.pth").get(3) is None  # type: ignore[call-overload]


def test_a_closed_file() -> None:
    """Names stay; a tensor is refused in a sentence."""
    with ckpt_tools.open(FIXTURES / "single.pth") as file:
        kept = file["fc1.bias"].clone()
    assert "fc1.bias" in file
    assert kept.numel()
    with pytest.raises(UsageError, match=r"single\.pth is closed"):
        file["fc1.bias"]
