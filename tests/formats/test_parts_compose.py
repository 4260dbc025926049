"""Every edit of a folder of parts, in any combination, gives the bytes that merging it first and editing the one file gives."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.support.rank_files import fsdp1, fsdp2, fsdp_tp, hsdp, save_ranks, tp
from tests.support.zero_files import save_zero, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "parts"
CUTS = {"fsdp1": (fsdp1, 3), "fsdp2": (fsdp2, 3), "hsdp": (hsdp, 4), "tp": (tp, 2), "fsdp-tp": (fsdp_tp, 4)}
FAMILIES = (*CUTS, "zero1", "zero3", "consolidated", "loose", "dcp")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the folders of all examples are."""
    return tmp_path_factory.mktemp("compose")


@functools.cache
def made(family: str, place: Path) -> tuple[Path, Path, Path]:
    """A folder of a family, the one file that it merges to, and a folder of shards with the target's names and shapes."""
    root = place / family
    root.mkdir()
    source = root / "in"
    if family in CUTS:
        cut, world = CUTS[family]
        save_ranks(source, wrapped(cut), world)
    elif family.startswith("zero"):
        save_zero(source, trained(), int(family[-1]), 3)
    else:
        shutil.copytree(FIXTURES / family, source, ignore=shutil.ignore_patterns("reference.pth", "params.json"))
    ckpt_tools.convert(source, root / "one.pth")
    whole = torch.load(root / "one.pth", weights_only=True)
    weights = {name.removeprefix("_orig_mod."): value.clone() for name, value in whole.get("model", whole).items()}
    (root / "like").mkdir()
    save_file(weights, root / "like.safetensors")
    ckpt_tools.convert(root / "like.safetensors", root / "like", shard_size="200B", overwrite=True)
    return source, root / "one.pth", root / "like"


def wrapped(cut: Callable[[nn.Module, int, int], Mapping[str, Any]]) -> Callable[[nn.Module, int, int], Mapping[str, Any]]:
    """What a compiled model's training script saves: a wrapper in the names, the epoch beside the model."""

    def save(model: nn.Module, rank: int, world: int) -> Mapping[str, Any]:
        return {"model": {f"_orig_mod.{name}": value for name, value in cut(model, rank, world).items()}, "epoch": 3}

    return save


def written(path: Path) -> dict[str, Any]:
    """The bytes of a file, or of each file of a folder; of what torch pickles the content, since records have other numbers."""
    if (path / ".metadata").exists():
        dcp_to_torch_save(path, path.with_name("loaded.pth"))
        return {"dcp": content(path.with_name("loaded.pth"))}
    files = path.rglob("*") if path.is_dir() else [path]
    return {file.name: content(file) for file in files}


def content(file: Path) -> Any:
    """The bytes, or every value by its path and which tensors share a storage."""
    if file.suffix not in (".pth", ".bin"):
        return file.read_bytes()
    leaves = flat(torch.load(file, weights_only=True))
    storages = [value.untyped_storage().data_ptr() for _, value in leaves if isinstance(value, torch.Tensor)]
    return [(name, data_of(value)) for name, value in leaves], [storages.index(storage) for storage in storages]


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Leaves by their path."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in flat(item, f"{name}.{key}")]
    return [(name, value)]


def data_of(value: Any) -> Any:
    """A tensor's dtype, shape and bytes; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(source: Path, target: Path, options: dict[str, Any]) -> Any:
    """What is written, or the class of the refusal."""
    try:
        report = ckpt_tools.convert(source, target, **options)
    except CkptError as error:
        assert not target.exists()
        return type(error)
    return written(target), report.aliases, report.tensors


@settings(max_examples=60)
@given(
    family=st.sampled_from(FAMILIES),
    output=st.sampled_from(["out.safetensors", "out.pth", "shards", "pth-shards", "dcp"]),
    edits=st.fixed_dictionaries(
        {},
        optional={
            "unwrap": st.just(True), "rename": st.sampled_from(["^=net.", "weight$=w", r"\.(\w+)\.=.inner.\1."]),
            "dtype": st.sampled_from(["bf16", "fp16", "fp64"]), "select": st.just("model"),
            "drop": st.sampled_from(["*emb*", "*emb*weight"]), "like": st.just(True),
        },
    ),
)  # fmt: skip
def test_editing_parts_is_merging_and_then_editing(place: Path, family: str, output: str, edits: dict[str, Any]) -> None:
    """Bytes, aliases and refusals are the same; only a folder's note differs."""
    source, one, like = made(family, place)
    options = edits | ({"like": str(like), "reinit": "zeros"} if "like" in edits else {})
    if family not in CUTS:
        options.pop("select", None)
    options |= {"shards": {"shard_size": "200B"}, "pth-shards": {"shard_size": "200B", "format": "pth"}}.get(output, {})
    options |= {"format": "dcp"} if output == "dcp" else {}
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Path(folder, way, output) for way in ("parts", "merged")]
        for path in pairs:
            path.parent.mkdir()
        assert outcome(source, pairs[0], options) == outcome(one, pairs[1], options)
