"""Archives of checkpoints, as stable-baselines3 and zip tools write them: each member is a subtree."""

import io
import json
import pickle
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_bytes
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError, UnsupportedContainerError
from ckpt_tools.limits import raised
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import assert_same, equal
from tests.support.legacy import legacy, saved
from tests.support.zips import big_endian, flip_byte

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")


POLICY, OPTIMIZER = {"net.weight": torch.arange(4.0), "net.bias": torch.ones(1)}, {"state": {}, "param_groups": [{"lr": 0.1}]}


def bundle(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive as stable-baselines3 writes it."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


LEGACY = legacy(POLICY)
AGENT = {
    "data": json.dumps({"gamma": 0.99, "policy_class": {":serialized:": "gAWV"}, "shape": [1, 2]}).encode(),
    "policy.pth": saved(POLICY), "policy.optimizer.pth": saved(OPTIMIZER),
    "pytorch_variables.pth": saved({"log_std": torch.zeros(3)}), "_stable_baselines3_version": b"2.6.0", "blob": b"\xff\x00",
}  # fmt: skip


def test_an_agent_is_one_checkpoint(tmp_path: Path) -> None:
    """Each member is a subtree under its name, JSON text; storages stay apart."""
    path = bundle(tmp_path / "agent.zip", AGENT)
    found = ckpt_tools.inspect(path)
    assert found.container == "zip-bundle"
    assert [row["where"] for row in found.state_dicts] == [["policy.pth"], ["pytorch_variables.pth"]]
    assert json.loads(found.values["data"])["gamma"] == 0.99
    assert found.weights_only["loads"] is False
    ckpt_tools.convert(path, tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)
    assert list(loaded) == list(AGENT)
    assert_same(loaded["policy.pth"], POLICY)
    assert_same(loaded["policy.optimizer.pth"], OPTIMIZER)
    assert loaded["pytorch_variables.pth"]["log_std"].tolist() == [0, 0, 0]
    assert loaded["blob"] == b"\xff\x00"


def test_damage_inside_a_member_is_found(tmp_path: Path) -> None:
    """A byte changed in a member's tensor is found, by the member's own checksum."""
    path = bundle(tmp_path / "agent.zip", AGENT)
    flip_byte(path, POLICY["net.weight"].numpy().tobytes())
    with pytest.raises(CkptError, match="CRC-32"):
        ckpt_tools.convert(path, tmp_path / "out.safetensors", select="policy.pth")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_members_of_every_kind(tmp_path: Path, compression: int) -> None:
    """Checkpoints of every container in an archive are found, packed or not, in folders or not, with the same bits."""
    arrays = io.BytesIO()
    np.savez(arrays, w=np.arange(6.0).reshape(2, 3))
    members = {
        "new.pth": saved(POLICY), "old/old.pth": LEGACY, "old/m.safetensors": safetensors_bytes(POLICY),
        "a.npz": arrays.getvalue(), "p.pkl": pickle.dumps({"x": torch.ones(2)}),
        "config.json": b'{"a": [1]}', "odd.pkl": b"\x80\x04odd",
    }  # fmt: skip
    path = bundle(tmp_path / "all.zip", members, compression)
    found = ckpt_tools.inspect(path)
    assert found.container == "zip-bundle"
    assert [row["where"] for row in found.state_dicts] == [[name] for name in members][:5]
    assert any("odd.pkl" in finding.found for finding in found.findings)
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(members)
    for name in ("new.pth", "old/old.pth", "old/m.safetensors"):
        assert equal(dict(sorted(loaded[name].items())), dict(sorted(POLICY.items())))
    assert torch.equal(loaded["a.npz"]["w"], torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert loaded["config.json"] == '{"a": [1]}'
    assert ckpt_tools.check(path).records >= len(members)


def test_a_packed_folder_of_weights(tmp_path: Path) -> None:
    """One checkpoint in one folder of a deflated archive is fitted into a model, and becomes one safetensors file."""
    path = bundle(tmp_path / "weights.zip", {"w/model.pth": saved(POLICY), "w/readme.txt": b"hello"}, zipfile.ZIP_DEFLATED)
    assert_same(load_state_dict(path), POLICY)
    ckpt_tools.convert(path, tmp_path / "out.safetensors")
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "out.safetensors").tensors] == list(POLICY)
    fixes = [finding.fix for finding in ckpt_tools.inspect(path).findings]
    assert any(fix.endswith("weights.fixed.pth --objects plain") for fix in fixes)


def test_what_is_no_checkpoint_and_large_is_left_out(tmp_path: Path) -> None:
    """A member that is too large to be a value is not kept, and that is said; so is what comes after too many of them."""
    members = {"policy.pth": AGENT["policy.pth"], "big": bytes(9 << 20)} | {f"{i}": bytes(7 << 20) for i in range(3)}
    found = ckpt_tools.inspect(bundle(tmp_path / "agent.zip", members, zipfile.ZIP_DEFLATED))
    left = [finding.found for finding in found.findings if finding.code == "left-out"]
    assert ["'big', 9437184 bytes" in text for text in left] == [True, False, False]
    assert "'1'" in left[1]


def test_a_json_of_many_nodes_stays_text(tmp_path: Path) -> None:
    """A JSON member that would make more nodes than its text is worth is kept as the text that it is."""
    text = "[" + "[]," * (1 << 20) + "[]]"
    path = bundle(tmp_path / "agent.zip", {"policy.pth": AGENT["policy.pth"], "data": text.encode()}, zipfile.ZIP_DEFLATED)
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["data"] == text


def test_a_bomb_of_a_member_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deflated member is inflated up to a multiple of the file and no further; a disk that is full is one sentence."""
    path = bundle(tmp_path / "bomb.zip", {"a.pth": saved({"w.w": torch.zeros(30 << 20)})}, zipfile.ZIP_DEFLATED)
    with raised(memory=1 << 20), pytest.raises(LimitError, match=r"deflated records come to 1258\d+ bytes"):
        ckpt_tools.inspect(path)
    path = bundle(tmp_path / "fine.zip", {"a.pth": saved({"w.w": torch.zeros(1 << 20)})}, zipfile.ZIP_DEFLATED)
    assert len(ckpt_tools.inspect(path).tensors) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(LimitError, match="temporary file") as caught:
        ckpt_tools.inspect(path)
    assert "TMPDIR" in caught.value.fix


def test_a_zip_of_other_zips_is_refused(tmp_path: Path) -> None:
    """Members that are programs or no checkpoints at all are named."""
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer := io.BytesIO())
    with pytest.raises(UnsupportedContainerError, match=r"'net\.pt'"):
        ckpt_tools.inspect(bundle(tmp_path / "a.zip", {"net.pt": buffer.getvalue()}))
    with pytest.raises(UnsupportedContainerError, match=r"not one that torch\.save wrote"):
        ckpt_tools.inspect(bundle(tmp_path / "b.zip", {"readme.txt": b"text"}))


def test_members_of_both_byte_orders_are_refused(tmp_path: Path) -> None:
    """Bytes of one member would have to be swapped and those of another not: said by name, not mixed."""
    little = saved({"a.w": torch.arange(3.0)})
    big_endian(io.BytesIO(little), big := io.BytesIO(), {"0": 4})
    members = {"little.pth": little, "big.pth": big.getvalue()}
    with pytest.raises(DamagedFileError, match="of both byte orders"):
        ckpt_tools.inspect(bundle(tmp_path / "both.zip", members))
    found = ckpt_tools.convert(bundle(tmp_path / "one.zip", {"big.pth": members["big.pth"]}), tmp_path / "out.pth")
    assert found.tensors == 1
    assert torch.load(tmp_path / "out.pth", weights_only=True)["a.w"].tolist() == [0, 1, 2]
