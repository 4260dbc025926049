"""`diff`, `stats`, `average` and `report` over every container that `inspect` reads, and over what nobody can read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tools import average, diff, inspect, stats
from tests.support.commands import ckpt
from tests.support.containers import MAKERS, state
from tests.support.samples import FIXTURES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
every_container = pytest.mark.parametrize("name", MAKERS)
# What holds more than the state dict, or holds it under no name.
OBJECTS = {"torchscript", "pickled model"}
PROGRAMS = {"torchscript", "torch-export"}
UNNAMED = {"dcp-part"}
PARTS = {"deepspeed", "megatron", "consolidated"}  # cut by their frameworks' rules, with tests of their own
FRAMEWORKS = {"gguf", "onnx", "flax", "keras"}  # other libraries' files, with tests of their own


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The same state, one larger, in a torch-zip."""
    torch.save({key: value + 1 for key, value in state().items()}, tmp_path / "plain.pth")
    return tmp_path / "plain.pth"


@every_container
def test_tensors_are_compared_across_containers(name: str, tmp_path: Path, plain: Path) -> None:
    """`diff` finds the partner of every tensor in a torch-zip, and that all numbers are 1 apart; a model is one object."""
    report = diff(MAKERS[name](tmp_path), plain, values=True)
    if name in UNNAMED:
        assert (len(report.added), len(report.removed)) == (3, 3)
        return
    assert [(row.gap or {})["max_abs"] for row in report.changed] == [1.0] * 3
    assert [report.added, report.removed, report.renamed, report.dtypes, report.shapes] == [[]] * 5
    assert [row.kind for row in report.objects] == (["removed"] if name in OBJECTS else [])
    assert [row.where for row in report.values] == (["data.gamma"] if name == "zip-bundle" else [])


@every_container
def test_numbers_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """`stats` measures the same three tensors in every container."""
    report = stats(MAKERS[name](tmp_path))
    found = sorted((row.dtype, row.shape, (row.numbers or {})["mean"]) for row in report.tensors)
    expected = ((str(t.dtype).removeprefix("torch."), list(t.shape), float(t.double().mean())) for t in state().values())
    assert found == sorted(expected)


@every_container
def test_every_container_has_a_mean(name: str, tmp_path: Path, plain: Path) -> None:
    """`average` with a torch-zip gives what torch computes, whichever of the two comes first; unnamed tensors are refused."""
    path = MAKERS[name](tmp_path)
    arguments = ["--integers", "max", *(["--objects", "plain"] if name in OBJECTS | PROGRAMS else [])]
    select = ["--select", "policy.pth"] if name == "zip-bundle" else []
    code = 3 if name in UNNAMED else 0
    output = ckpt("average", path, path, tmp_path / "one.safetensors", *arguments, *select, code=code).output
    if name in UNNAMED:
        assert "holds no state dict" in output
        return
    found = load_file(tmp_path / "one.safetensors")
    assert {key: value.tolist() for key, value in found.items()} == {key: value.tolist() for key, value in state().items()}
    if not select:
        average([plain, path], tmp_path / "two.pth", integers="max", objects="plain")
        loaded = torch.load(tmp_path / "two.pth", weights_only=True)
        assert loaded["fc.weight"].tolist() == (state()["fc.weight"] + 0.5).tolist()
        assert loaded["fc.steps"].tolist() == [8]


def test_every_container_is_there() -> None:
    """The samples are of all the containers that docs/containers.md lists."""
    page = (FIXTURES.parent / "docs" / "containers.md").read_text()
    table = page.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in row.split("|")[1].strip().split(", ")}
    assert listed - PARTS - FRAMEWORKS <= set(MAKERS)


@every_container
def test_the_container_is_what_it_is_called(name: str, tmp_path: Path) -> None:
    """`inspect` finds the container that the sample stands for."""
    names = {"pickled model": "torch-legacy", "index": "sharded", "dcp-safetensors": "dcp", "packed": "torch-zip"}
    assert inspect(MAKERS[name](tmp_path)).container == names.get(name, name)


# --- what nobody can read


def _cut(path: Path) -> None:
    path.write_bytes((FIXTURES / "training.pth").read_bytes()[:3000])


BAD: dict[str, Any] = {
    "nothing": lambda path: None,
    "text": lambda path: path.write_bytes(b"hello, world\n"),
    "cut zip": _cut,
    "folder": lambda path: path.mkdir(),
}
COMMANDS = {
    "diff": lambda bad, good, out: ("diff", bad, good), "diff, second": lambda bad, good, out: ("diff", good, bad),
    "stats": lambda bad, good, out: ("stats", bad), "average": lambda bad, good, out: ("average", bad, good, out),
    "average, second": lambda bad, good, out: ("average", good, bad, out),
    "report": lambda bad, good, out: ("report", bad, "-o", out),
    "report, second": lambda bad, good, out: ("report", good, bad, "-o", out),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_bad_input_is_refused_as_elsewhere(command: str, bad: str, tmp_path: Path) -> None:
    """Exit code 3, the sentences that `inspect` has for the file, and nothing written."""
    path, out = tmp_path / "bad.pth", tmp_path / ("out.html" if command.startswith("report") else "out.pth")
    BAD[bad](path)
    expected = ckpt("convert", path, tmp_path / "converted.pth", code=3).output
    made = COMMANDS[command](path, FIXTURES / "single.pth", out)  # type: ignore[no-untyped-call]
    assert ckpt(*made, code=3).output == expected
    assert not out.exists()


def test_an_edit_that_an_older_version_did_not_finish(tmp_path: Path) -> None:
    """Until 0.1 a file that was being edited in place began with a mark; the version that mends it is named."""
    (tmp_path / "half.pth").write_bytes(b"\xffCKP" + bytes(100))
    said = ckpt("inspect", tmp_path / "half.pth", code=3).output
    assert "is half edited" in said
    assert "pip install 'ckpt-tools<0.2'" in said
