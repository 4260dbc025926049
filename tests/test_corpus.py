"""Every real file of the corpus: read with exactly the catalogue's facts, or refused with the right sentence; and made plain.

The files are strangers': they are never loaded but with weights_only=True. CKPT_CORPUS names the folder; without it all skip.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpt_tools
from ckpt_tools.errors import NotACheckpointError, NothingMatchedError, ObjectsError
from tests.support.graphs import element_bytes, live_tensors, load_with_tags
from tests.support.samples import corpus

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
KINDS = ("torch-zip", "torch-legacy", "torch-tar", "torchscript", "safetensors", "other")
BUNDLE = "DLR-RM__stable-baselines3__ppo_frozenlakeplus.zip"
every_file = pytest.mark.parametrize("row", corpus(*KINDS))


def is_shard(row: dict[str, Any]) -> bool:
    """A part of a distributed checkpoint: several zips in one file, of which the catalogue saw the last."""
    return bool(row["file"].endswith(".distcp"))


def is_read(row: dict[str, Any]) -> bool:
    return row["container"] != "other" or row["file"] == BUNDLE


@every_file
def test_facts_of_every_file(row: dict[str, Any]) -> None:
    """Container, size, tensors, dtypes, tags, storages, views, ties are the catalogue's; what is no checkpoint is refused."""
    if not is_read(row):
        with pytest.raises(NotACheckpointError, match="is not a checkpoint") as caught:
            ckpt_tools.inspect(row["path"])
        assert "It begins with" in caught.value.why
        return
    found = ckpt_tools.inspect(row["path"])
    assert found.file_bytes == row["bytes"]
    if is_shard(row):
        assert (found.container, len(found.tensors)) == ("dcp-part", 4)
        return
    if row["file"] == BUNDLE:
        assert (found.container, len(found.tensors)) == ("zip-bundle", 12 + 36)
        return
    assert (found.container, len(found.tensors)) == (row["container"], row["n_tensors"])
    names = {code: str(dtype).removeprefix("torch.") for code, dtype in safetensors.torch._TYPES.items()}
    expected = {names.get(name, name): count for name, count in row["dtypes"].items()}
    if row["container"] != "torch-tar":  # the catalogue did not read what is in a tar
        assert Counter(tensor["dtype"] for tensor in found.tensors) == expected
    if "n_storages" in row and row["container"] != "torch-tar":
        assert Counter(tensor["device"] for tensor in found.tensors) == row["locations"]
        assert len({tensor["storage"] for tensor in found.tensors}) == row["n_storages"]
        globals_ = {name.replace("__builtin__", "builtins") for name in row["globals"]}
        assert globals_ - {"torch._utils._rebuild_tensor"} <= set(found.globals)
    if row["container"] in ("safetensors", "torch-tar"):  # there the catalogue counts no views and ties
        return
    tensors, odd = found.tensors, row["oddities"]
    strided = [torch.empty_strided(t["shape"], t["stride"], device="meta") for t in tensors]
    assert sum(not tensor.is_contiguous() for tensor in strided) == odd.get("non_contiguous", 0)
    assert sum(t["offset"] > 0 for t in tensors) == odd.get("nonzero_offset", 0)
    assert sum(t["shape"] == [] for t in tensors) == odd.get("scalars", 0)
    assert sum(0 in t["shape"] for t in tensors) == odd.get("zero_sized", 0)
    grads = sum(t["requires_grad"] or t["kind"] == "parameter" for t in tensors)
    assert grads == odd.get("parameters_or_requires_grad", 0)
    on_storages = Counter(tensor["storage"] for tensor in tensors if tensor["bytes"])
    assert sum(count > 1 for count in on_storages.values()) == odd.get("shared_storages", 0)


@every_file
def test_what_torch_loads_is_listed(row: dict[str, Any]) -> None:
    """Where weights_only loads a file, its tensors are ours: paths, dtypes, shapes, strides, offsets, tags."""
    if row["loads_weights_only"] is not True or row["container"] == "safetensors":
        pytest.skip("weights_only refuses it")
    loaded, tags = load_with_tags(row["path"], weights_only=True)
    expected = [
        (list(where), str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()), t.storage_offset(),
         tags[t.untyped_storage()._cdata])
        for where, t in live_tensors(loaded)
    ]  # fmt: skip
    rows = json.loads(json.dumps(ckpt_tools.inspect(row["path"]).tensors))
    assert [tuple(r[key] for key in ("where", "dtype", "shape", "stride", "offset", "device")) for r in rows] == expected


@every_file
def test_every_file_is_made_plain(row: dict[str, Any], tmp_path: Path) -> None:
    """`--objects plain` gives what weights_only loads, with the same tensors bit for bit; what a program hides is reported."""
    if not is_read(row):
        pytest.skip("no checkpoint")
    target = tmp_path / "plain.pth"
    try:
        report = ckpt_tools.convert(row["path"], target, objects="plain")
    except ObjectsError as error:
        report = ckpt_tools.convert(
            row["path"], target, objects="plain", drop=error.what.rpartition(": ")[2].rstrip(".").split(", ")
        )
    except NothingMatchedError as error:
        if "constants of its code" not in error.why or target.exists():
            raise
        return  # a frozen program: nothing is written without a tensor
    after = torch.load(target, map_location="cpu", weights_only=True)
    lost = [path for path, why in report.dropped if why == "`drop`"]
    found = [element_bytes(tensor) for _, tensor in live_tensors(after)]
    assert len(found) == len(ckpt_tools.inspect(row["path"]).tensors) - len(lost)
    if row["loads_weights_only"] is True and row["container"] != "safetensors":
        own = torch.load(row["path"], map_location="cpu", weights_only=True)
        assert found == [element_bytes(tensor) for _, tensor in live_tensors(own)]
