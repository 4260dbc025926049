"""The committed fixtures are what the script makes; files as other people have them (fixtures/found) with the first command."""

import json
import re
import shlex
from datetime import date
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.torch import load_state_dict
from fixtures import make
from tests.support.commands import ckpt
from tests.support.graphs import Same, assert_same, load_with_tags
from tests.support.samples import FIXTURES, PTH, SAFETENSORS
from tests.support.terminal import run
from train.__main__ import command as train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    make.main(folder)
    return folder


def test_every_fixture_is_made(made: Path) -> None:
    """No file is committed that the script does not make, and none is missing; all are small."""
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in (*PTH, *SAFETENSORS))
    assert sum(path.stat().st_size for path in FIXTURES.iterdir() if path.is_file()) < 3_000_000


@pytest.mark.parametrize("name", [path.name for path in PTH])
def test_fixtures_load_equal(made: Path, name: str) -> None:
    """A file made anew loads as the committed one: values, views, ties, tags. The last bit of a trained value is the CPU's."""
    (before, tags), (after, new_tags) = load_with_tags(FIXTURES / name), load_with_tags(made / name)
    if isinstance(before, torch.nn.Module):
        before, after = before.state_dict(), after.state_dict()
    assert_same(before, after, exact=False)
    assert list(tags.values()) == list(new_tags.values())


@pytest.mark.parametrize("name", [path.name for path in SAFETENSORS])
def test_safetensors_fixtures_load_equal(made: Path, name: str) -> None:
    assert_same(load_file(FIXTURES / name), load_file(made / name), exact=False)


def test_the_table_in_the_script_names_every_fixture() -> None:
    text = make.__doc__ or ""
    for path in (*PTH, *SAFETENSORS):
        assert path.name in text or (path.stem in text and path.suffix in text)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1}, {"a": 1.0}), ([float("nan")], [0.0]), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(2)]), (torch.ones(2, 2), torch.ones(2, 2).t().contiguous().t()),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2))), (torch.ones(4)[:2], torch.ones(2)), ([[]] * 2, [[], []]),
    ],
)  # fmt: skip
def test_the_comparison_sees_differences(one: object, two: object) -> None:
    with pytest.raises(AssertionError):
        Same().check(one, two)


def test_the_looser_comparison_sees_differences_too() -> None:
    """A last bit is forgiven where that was asked for, another value or another dtype is not."""
    one = torch.ones(2)
    assert_same(one, torch.nextafter(one, one * 2), exact=False)
    for other in (one + 1e-3, torch.ones(3), one.double()):
        with pytest.raises(AssertionError):
            assert_same(one, other, exact=False)


FOUND = Path(__file__).parents[1] / "fixtures" / "found"


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(FOUND / "reference.pth", weights_only=True)
    return weights


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whole-dp.pth", ["--objects", "plain", "--strip-module"]),
        ("whole-ddp.pth", ["--objects", "plain", "--strip-module"]),
        ("partial-dp.pth", ["--rename", r"^features\.module\.=features."]), ("mixed.pth", ["--strip-module"]),
        ("lightning.ckpt", ["--select", "state_dict", "--strip-prefix", "net."]), ("legacy.pth", []), ("dcp", []),
        ("shards", []), ("torchscript.pt", ["--objects", "plain"]),
    ],
)  # fmt: skip
def test_one_command_gives_the_weights(
    name: str, options: list[str], reference: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "out.pth"
    done = run("convert", FOUND / name, out, *options)
    assert done.exit_code in (0, None), done.output
    weights = torch.load(out, weights_only=True)
    assert weights.keys() == reference.keys()
    trained = name == "lightning.ckpt"  # a step further than the others
    assert trained or all(torch.equal(weights[key], reference[key]) for key in reference)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("whole-dp.pth", ["--strip-module"], "--objects plain"),
        ("partial-dp.pth", ["--strip-module"], r"--rename '^features\.module\.=features.'"),
        ("cut.pth", [], "ckpt repair"),
        ("run.pth", ["--strip-module", "--format", "safetensors"], "--select model"),
        ("lightning.ckpt", ["--format", "safetensors"], "--select state_dict"),
        ("objects.pth", ["--strip-module"], "--objects: 'plain'"),
    ],
)
def test_what_does_not_suffice_names_the_command_that_does(
    name: str, options: list[str], sentence: str, tmp_path: Path
) -> None:
    out = tmp_path / ("out.safetensors" if "safetensors" in options else "out.pth")
    assert sentence in " ".join(run("convert", FOUND / name, out, *options).output.split())


def test_a_wrapped_part_is_found(tmp_path: Path) -> None:
    """inspect names the part and the command that unwraps it; a sub-module that is called so by its author is none."""
    (finding,) = ckpt_tools.inspect(FOUND / "partial-dp.pth").findings
    assert (finding.code, finding.severity) == ("inner-module", "info")
    assert finding.fix.endswith(r"--rename '^features\.module\.=features.'")
    for names in (["norm.module.weight", "fc.w"], ["a.module.0.w", "a.w"], ["a.b.module.0.w"], ["a.module", "w"]):
        torch.save(dict.fromkeys(names, torch.ones(1)), tmp_path / "other.pth")
        assert "inner-module" not in [row.code for row in ckpt_tools.inspect(tmp_path / "other.pth").findings]


def test_objects_become_state(reference: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """`{"model": model, "optimizer": optimizer}`: the weights of the one, the state of the other, for a plain load."""
    out = tmp_path / "out.pth"
    ckpt("convert", FOUND / "objects.pth", out, "--objects", "plain")
    state = torch.load(out, weights_only=True)
    assert state["model"].keys() == reference.keys()
    assert state["epoch"] == 3
    assert torch.optim.AdamW([torch.nn.Parameter(state["model"][name]) for name in reference if "running" not in name and
                              "tracked" not in name]).load_state_dict(state["optimizer"]) is None  # fmt: skip


def test_damage_is_found_and_what_is_whole_saved(reference: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A cut file gives up its last tensors; a flipped bit is found by the checksum, and mended where it is the only one."""
    ckpt("check", FOUND / "flipped.pth", code=1)
    mended = tmp_path / "mended.pth"
    ckpt("repair", FOUND / "flipped.pth", mended)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in load_state_dict(mended).items())
    saved = tmp_path / "saved.pth"
    ckpt("repair", FOUND / "cut.pth", saved, code=1)
    left = load_state_dict(saved)
    assert 0 < len(left) < len(reference)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in left.items())


def test_packed_weights_are_said_and_not_made_up(tmp_path: Path) -> None:
    done = ckpt("convert", FOUND / "quantized.pth", tmp_path / "out.safetensors", code=3)
    assert "_packed_params" in done.output


def test_a_trained_network_is_as_accurate_after_the_conversion(tmp_path: Path) -> None:
    """A run under DataParallel on digits, in the bare network: the accuracy that the run printed."""
    out = tmp_path / "lenet.safetensors"
    ckpt("convert", FOUND / "run.pth", out, "--select", "model", "--strip-module")
    accuracy = json.loads((FOUND / "run.json").read_text())["accuracy"]
    for arguments in ([str(FOUND / "run.pth")], [str(out), "--model", "lenet"]):
        said = CliRunner().invoke(train, ["--evaluate", *arguments])
        assert f"test accuracy {accuracy:.2%}" in said.output


def test_a_run_of_today_goes_on_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "epoch_008.pth").write_bytes((FOUND / "run.pth").read_bytes())
    said = CliRunner().invoke(train, ["--resume", str(tmp_path / "epoch_008.pth"), "--epochs", "9"])
    assert said.exit_code == 0, said.output
    assert "epoch   9/9" in said.output


def test_the_readme_names_every_fixture() -> None:
    """Folders in its first table, the files of found in its second; and nothing that is not there."""
    first, second = (FOUND.parent / "README.md").read_text().split("## found")
    folders = {path.name for path in FOUND.parent.iterdir() if path.is_dir()} - {"makers", "__pycache__"}
    assert cells(first) - {"*.pth", "*.safetensors"} == folders
    assert cells(second) == {path.name for path in FOUND.iterdir()}
    assert {f"makers/{path.name}" for path in (FOUND.parent / "makers").glob("*.py")} <= set(re.findall(r"`([^`]+)`", first))


def cells(text: str) -> set[str]:
    """What is named in the first column of a table."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_command_that_fixes_all_takes_lightning_s_weights_out(tmp_path: Path) -> None:
    """A run with an object in it: the one command gives the network's own tensors, which torch loads."""
    run_of_lightning = {
        "pytorch-lightning_version": "2.6.2",
        "state_dict": {"net.weight": torch.ones(2)},
        "when": date(2026, 1, 1),
    }
    torch.save(run_of_lightning, tmp_path / "run.ckpt")
    found = {row.code: row for row in ckpt_tools.inspect(tmp_path / "run.ckpt").findings}
    _, *options = shlex.split(found["together"].fix)
    ckpt(*options)
    assert torch.load(options[2], weights_only=True).keys() == {"weight"}
