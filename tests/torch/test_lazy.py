"""`ckpt_tools.open`: a mapping to tensors that are read when they are used; `ckpt_tools.steps`: a plan for `convert`."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import Steps
from ckpt_tools.errors import CkptError, ConvertError, NothingMatchedError, UsageError
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
    with ckpt_tools.open(FIXTURES / "single.pth") as file:
        kept = file["fc1.bias"].clone()
    assert "fc1.bias" in file
    assert kept.numel()
    with pytest.raises(UsageError, match=r"single\.pth is closed"):
        file["fc1.bias"]


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
