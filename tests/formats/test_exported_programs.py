"""Exported programs (`.pt2`): torch.export is the oracle; damage is done to its files' tables by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.pt2_archive import _package

import ckpt_tools
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError, TensorError, UnsupportedContainerError
from ckpt_tools.torch import load_state_dict
from tests.support.commands import ckpt
from tests.support.graphs import assert_same
from tests.support.zips import called_big, rewrite

pytestmark = [
    pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning"),
    pytest.mark.skipif(not hasattr(_package, "_package_state_dict"), reason="torch wrote another layout before 2.9"),
]
TABLE = "data/weights/model_weights_config.json"


class Net(nn.Module):
    """Tied, frozen and strided weights, dtypes, buffers in and out of the state dict, and a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("view", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffers: Any = self
        rest = buffers.hidden.sum() + buffers.view.sum()
        rest = rest + self.frozen.sum() + buffers.empty.sum() + torch.tensor([1.0, 2.0]).sum()
        return buffers.norm(self.first(x) + self.second(x)) + rest


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    """A model as torch.export sees it."""
    return torch.export.export(model.eval(), (torch.ones(2, 8),))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file of one model."""
    torch.export.save(exported(Net()), tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


def edited(path: Path, change: Callable[[dict[str, Any]], object], **members: bytes) -> Path:
    """The file with its table changed, and members under data/weights/ added."""

    def tables(name: str, data: bytes) -> bytes:
        if name != TABLE:
            return data
        content = json.loads(data)
        change(content["config"])
        return json.dumps(content).encode()

    made = path.with_name("edited.pt2")
    rewrite(path, made, change=tables, more={f"data/weights/{name}": data for name, data in members.items()})
    return made


def test_the_state_dict_is_the_one_that_torch_loads(program: Path, tmp_path: Path) -> None:
    """Names, order, Parameters, strides, ties and bits, through a .pth and through safetensors."""
    expected = dict(torch.export.load(program).state_dict)
    found = ckpt_tools.inspect(program)
    assert found.container == "torch-export"
    assert [row["name"] for row in found.tensors] == list(expected)
    assert found.tied == [["first.weight", "second.weight"]]
    ckpt_tools.convert(program, tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert_same(loaded, expected, storages=False)
    assert {name: type(tensor) for name, tensor in loaded.items()} == {name: type(t) for name, t in expected.items()}
    Net().load_state_dict(loaded)
    ckpt_tools.convert(program, tmp_path / "out.safetensors", objects="plain")
    Net().load_state_dict(load_state_dict(tmp_path / "out.safetensors"))


def test_what_stays_behind_is_said(program: Path, tmp_path: Path) -> None:
    """The graph and its constants; `check` reads every record and finds nothing else; a folder's programs are found."""
    finding = next(row for row in ckpt_tools.inspect(program).findings if row.code == "exported-program")
    assert finding.found == "an exported program: the graph of 'model', 2 constants of 20 bytes"
    assert finding.fix.endswith("net.fixed.pth --objects plain")
    report = ckpt_tools.convert(program, tmp_path / "out.pth", objects="plain", dry_run=True)
    assert ("code", "a state dict holds no program") in report.dropped
    assert [row.code for row in ckpt_tools.check(program).findings] == ["weights-only-refused", "exported-program"]
    shown = ckpt("inspect", "--json", tmp_path).stdout.splitlines()
    assert [json.loads(line)["path"] for line in shown] == [str(program)]


def test_several_models_are_several_state_dicts(tmp_path: Path) -> None:
    """Each under its name; storages keep apart."""
    models = {"small": nn.Linear(8, 2), "large": nn.Linear(8, 5)}
    _package.package_pt2(tmp_path / "two.pt2", exported_programs={name: exported(model) for name, model in models.items()})
    found = ckpt_tools.inspect(tmp_path / "two.pt2")
    assert sorted(row["where"][0] for row in found.state_dicts) == ["large", "small"]
    ckpt_tools.convert(tmp_path / "two.pt2", tmp_path / "out.pth", select="large", objects="plain")
    assert_same(torch.load(tmp_path / "out.pth"), dict(models["large"].state_dict(keep_vars=True)), storages=False)


def test_a_pickled_weight_is_refused(program: Path) -> None:
    """What torch.save made of a tensor subclass."""
    with pytest.raises(UnsupportedContainerError, match="'view' is a pickle in the program"):
        ckpt_tools.inspect(edited(program, lambda rows: rows["view"].update(use_pickle=True)))


@pytest.mark.parametrize("first", [True, False])
def test_a_buffer_on_the_record_of_a_parameter(program: Path, first: bool) -> None:
    """torch.export.load makes it require gradients where the first row on the record does."""

    def share(rows: dict[str, Any]) -> None:
        buffer = {**rows["first.weight"], "is_param": False}
        others = dict(rows)
        rows.clear()
        rows.update({"buffer": buffer, **others} if first else {**others, "buffer": buffer})
        rows["second.weight" if first else "buffer"]["tensor_meta"] = buffer["tensor_meta"] | {"requires_grad": False}

    path = edited(program, share)
    expected = {name: tensor.requires_grad for name, tensor in torch.export.load(path).state_dict.items()}
    assert expected["buffer"]
    assert {row["name"]: row["requires_grad"] for row in ckpt_tools.inspect(path).tensors} == expected


def test_a_program_has_no_byte_order(program: Path, tmp_path: Path) -> None:
    """torch.export.load takes the elements as they lie, whatever the record `byteorder` says."""
    called_big(program, path := tmp_path / "big.pt2")
    assert_same(dict(load_state_dict(path)), dict(torch.export.load(path).state_dict), storages=False)
    assert torch.equal(load_state_dict(path)["view"], torch.arange(12.0).view(3, 4).t())


def _meta(name: str, **change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda rows: rows[name]["tensor_meta"].update(change)


@pytest.mark.parametrize(("change", "error", "says"), [
    (lambda rows: rows["view"].update(path_name="../../etc/passwd"), DamagedFileError, "are not in the file"),
    (lambda rows: rows["view"].pop("path_name"), DamagedFileError, "is malformed"),
    (lambda rows: rows.update(more=7), DamagedFileError, "is malformed"),
    (lambda rows: rows["view"].update(is_param=1), DamagedFileError, "1 is not of the type bool"),
    (lambda rows: rows["view"].update(is_param="x"), DamagedFileError, "not of the type bool"),
    (lambda rows: rows["view"].update(use_pickle=0), DamagedFileError, "not of the type bool"),
    (_meta("view", requires_grad=None), DamagedFileError, "not of the type bool"),
    (_meta("view", dtype=99), TensorError, "unknown dtype 99"),
    (_meta("view", layout=1), TensorError, "layout 1"),
    (_meta("view", sizes=[{"as_int": 4}, {"as_int": 300}]), TensorError, "reaches outside its storage"),
    (_meta("view", sizes=[{"as_int": -4}, {"as_int": 3}]), TensorError, "negative"),
    (_meta("view", sizes=[{"as_int": 1 << 70}, {"as_int": 3}]), TensorError, "2\\*\\*59"),
    (_meta("view", sizes=[{"as_expr": "s0"}, {"as_int": 3}]), DamagedFileError, "is malformed"),
    (_meta("view", storage_offset={"as_int": 1.5}), DamagedFileError, "is malformed"),
    (_meta("view", device={"type": [], "index": None}), DamagedFileError, "is malformed"),
    (_meta("second.weight", dtype=4), TensorError, "used with two types"),
    (_meta("norm.num_batches_tracked", dtype=11), TensorError, "not a whole number of elements"),
])  # fmt: skip
def test_a_table_that_lies_is_refused(
    program: Path, change: Callable[[dict[str, Any]], object], error: type[CkptError], says: str
) -> None:
    """Every field is checked against the records; a name is only ever looked up in the archive."""
    with pytest.raises(error, match=says):
        ckpt_tools.inspect(edited(program, change))


@pytest.mark.parametrize(
    "table",
    [
        b"[" * 3_000_000, b'{"config":[' + b"[]," * 1_000_000 + b"[]]}", b"{", b"[]", b'{"config":7}',
        '{"config":{}}'.encode("utf-16"), b'{"config":{},"config":{}}',
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(program: Path, table: bytes) -> None:
    """Nested, endless, cut off, of another kind: one sentence, before memory is spent."""
    rewrite(program, program.with_name("edited.pt2"), change=lambda name, data: table if name == TABLE else data)
    with pytest.raises((DamagedFileError, LimitError)):
        ckpt_tools.inspect(program.with_name("edited.pt2"))


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    """Its weights have no values."""
    model = nn.Linear(3, 2).to("meta")
    torch.export.save(torch.export.export(model, (torch.ones(1, 3, device="meta"),)), tmp_path / "in.pt2")
    with pytest.raises(TensorError, match="meta device, where nothing has values"):
        ckpt_tools.inspect(tmp_path / "in.pt2")
