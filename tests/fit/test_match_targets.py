"""Targets of every kind, and `ckpt match` on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, TargetError, UsageError
from ckpt_tools.fit.plan_files import read_plan
from ckpt_tools.fit.targets import read_target
from tests.support import networks as nets
from tests.support.commands import main
from tests.support.samples import FIXTURES

MODULE = """
import torch
from torch import nn

def net(classes=2, wrapped=False):
    made = nn.Sequential(nn.Linear(3, classes), nn.BatchNorm1d(classes))
    return nn.DataParallel(made) if wrapped else made

def computes():
    return nn.Linear(int(torch.tensor(3.0).item()), 2)

def state():
    return net().state_dict()

def broken():
    raise ValueError("no such network")

def number():
    return 3

def leaves():
    raise SystemExit(0)

def lazy():
    return nn.Sequential(nn.LazyLinear(2))

def talks():
    print("building")
    return net()

constant = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, which is not on Python's path."""
    name = f"target_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_callable_is_built_on_the_meta_device(module: str) -> None:
    """Names, shapes, dtypes, module types in order; no memory; what computes with values is built on the CPU."""
    target = read_target(f"{module}:net", args='{"classes": 5}')
    assert target.on_meta
    assert target.names[:2] == ("0.weight", "0.bias")
    first = target.params[0]
    assert (first.shape, first.dtype, first.module) == ((5, 3), "float32", "Linear")
    assert target.build is not None
    assert not next(target.build().parameters()).is_meta
    assert not read_target(f"{module}:computes").on_meta
    assert read_target(f"{module}:net", args={"wrapped": True}).names[0] == "module.0.weight"


def test_modules_state_dicts_and_files_are_targets(tmp_path: Path) -> None:
    """The same tensors from a live module, its state dict, and a file of it; ties are kept in each."""
    model = nets.LanguageA()
    torch.save({"model": model.state_dict(), "epoch": 1}, tmp_path / "file.pth")
    for spec in (model, model.state_dict(), tmp_path / "file.pth", str(tmp_path / "file.pth")):
        target = read_target(spec)
        ties = {param.name: param.tie for param in target.params}
        assert list(ties) == list(model.state_dict())
        assert ties["wte.weight"] == ties["lm_head.weight"] != ties["ln_f.weight"]


@pytest.mark.parametrize("what", ["broken", "number", "constant", "absent", "net.absent", "leaves"])
def test_what_is_no_target_is_refused(module: str, what: str) -> None:
    """Not there, not callable, raising, or giving something else: one sentence each."""
    with pytest.raises(TargetError, match=f"{module}:{what}"):
        read_target(f"{module}:{what}")


def test_a_lazy_target_is_refused_by_name(module: str) -> None:
    """A parameter that has no shape before the first run is named."""
    with pytest.raises(TargetError, match=r"'0\.weight' of the target is lazy"):
        read_target(f"{module}:lazy")


def test_a_script_that_ends_when_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that exits while it is imported does not end the command without a word."""
    monkeypatch.chdir(tmp_path)
    Path("ends_at_once.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(TargetError, match="cannot be imported") as caught:
        read_target("ends_at_once:net")
    assert "__main__" in caught.value.fix


def test_what_a_target_prints_is_no_part_of_the_report(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the target's code prints goes to standard error, beside the JSON on standard output."""
    read_target(f"{module}:talks")
    captured = capsys.readouterr()
    assert "building" not in captured.out
    assert "building" in captured.err


def test_odd_targets_are_refused(module: str, tmp_path: Path) -> None:
    """A module that is not there, arguments that are not a JSON object or for a file, a state dict without tensors."""
    torch.save({"model": nn.Linear(2, 2).state_dict(), "ema": nn.Linear(2, 2).state_dict()}, tmp_path / "two.pth")
    cases: list[tuple[Any, dict[str, Any], type[CkptError]]] = [
        ("no_such_package:thing", {}, TargetError), (f"{module}:net", {"args": "[1]"}, UsageError),
        (f"{module}:net", {"args": "{"}, UsageError), (f"{module}:net", {"args": '{"a": 1}'}, TargetError),
        (tmp_path / "two.pth", {"args": "{}"}, UsageError), (tmp_path / "two.pth", {}, CkptError), ({}, {}, TargetError),
        (3, {}, TargetError), (nn.Linear(2, 2), {"args": {}}, UsageError), (tmp_path / "none.pth", {}, CkptError),
    ]  # fmt: skip
    for spec, options, error in cases:
        with pytest.raises(error):
            read_target(spec, **options)
    assert read_target(tmp_path / "two.pth", select="ema").names == ("weight", "bias")


# --- the command


def ckpt(*arguments: str | Path) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two implementations of an encoder: q, k, v in one matrix, and apart."""
    torch.save(nets.EncoderA().state_dict(), tmp_path / "theirs.pth")
    torch.save(nets.EncoderB().state_dict(), tmp_path / "ours.pth")
    return tmp_path / "theirs.pth", tmp_path / "ours.pth"


def test_match_folds_what_repeats(files: tuple[Path, Path]) -> None:
    """Blocks, numbers and siblings share a line; the exit code says that nothing is left over."""
    result = ckpt("match", files[0], "--like", files[1], "--match", "structure")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [
        "layers.{0,1}.linear{1,2}.{weight,",
        "bias}",
        "block.{0,1}.mlp.{0,2}.{weight,",
        "bias}",
        "structure",
        "0.98",
    ] in lines
    assert "4 by a plan (split)" in result.output


def test_what_is_left_over_is_listed_and_exits_with_1(files: tuple[Path, Path]) -> None:
    """By names alone nothing fits: everything is missing or unexpected."""
    result = ckpt("match", *files[:1], "--like", files[1])
    assert result.exit_code == 1
    assert "missing     34" in result.output
    assert "something is left over" in result.output
    document = json.loads(ckpt("match", files[0], "--like", files[1], "--json").output)
    assert (document["complete"], len(document["missing"]), len(document["unexpected"])) == (False, 34, 26)


def test_a_plan_that_is_written_converts(files: tuple[Path, Path], tmp_path: Path) -> None:
    """`ckpt match -o`, then `ckpt convert --plan`: the other implementation loads the result and gives equal outputs."""
    plan, out, sample = tmp_path / "plan.toml", tmp_path / "out.pth", torch.randn(2, 5, 8)
    assert ckpt("match", files[0], "--like", files[1], "--match", "structure", "-o", plan).exit_code == 0
    assert {step.step for step in read_plan(plan).steps} == {"copy", "split"}
    assert ckpt("convert", files[0], out, "--plan", plan).exit_code == 0
    one, other = nets.EncoderA().eval(), nets.EncoderB().eval()
    one.load_state_dict(torch.load(files[0]))
    other.load_state_dict(torch.load(out))
    torch.testing.assert_close(one(sample), other(sample), rtol=1e-4, atol=1e-5)
    assert ckpt("match", files[0], "--like", files[1], "-o", plan).exit_code == 3
    assert ckpt("match", files[0], "--like", files[1], "-o", plan, "--overwrite").exit_code == 1
    assert ckpt("convert", files[1], tmp_path / "no.pth", "--plan", plan).exit_code == 3


@pytest.mark.parametrize("name", ["patch_embed.proj.weight", "visual.conv1.weight", "sr.weight"])
@pytest.mark.parametrize("step", ['step = "reshape"', 'step = "permute"\naxes = "out (14 width 3) -> out 3 14 width"'])
def test_patches_are_reshaped_by_a_plan_only(tmp_path: Path, name: str, step: str) -> None:
    """[32, 588] holds as many numbers as [32, 3, 14, 14], channels first or last: refused, until a plan says which."""
    first = torch.randn(32, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    rows = first.reshape(32, -1) if "reshape" in step else first.permute(0, 2, 3, 1).reshape(32, -1)
    torch.save({name: rows}, tmp_path / "old.pth")
    torch.save({name: torch.zeros_like(first)}, tmp_path / "new.pth")
    sides: list[str | Path] = [tmp_path / "old.pth", "--like", tmp_path / "new.pth", "--allow-reshape"]
    for stages in ("structure", "values", "position"):
        result = ckpt("match", *sides, "--match", stages)
        assert result.exit_code == 1, result.output
        assert 'as many numbers in another shape: step = "reshape" or "permute" in a plan' in result.output
    refused = ckpt("convert", sides[0], tmp_path / "out.pth", *sides[1:])
    assert refused.exit_code == 3
    assert "a plan's step for as many numbers in another shape" in refused.output
    plan = tmp_path / "plan.toml"
    text = f'format = "ckpt-plan-1"\n[[tensor]]\nold = "{name}"\nnew = "{name}"\nshape = [32, 588]\n{step}\n'
    plan.write_text(text + "to = [32, 3, 14, 14]\n")
    done = ckpt("convert", tmp_path / "old.pth", tmp_path / "out.pth", "--plan", plan)
    assert done.exit_code == 0, done.output
    torch.testing.assert_close(torch.load(tmp_path / "out.pth")[name], first, rtol=0, atol=0)


def test_wrong_options_are_refused(files: tuple[Path, Path]) -> None:
    """No target, two, unknown stages, rules that cannot be read, a file that is not there, lists that disagree."""
    one, other = files
    assert ckpt("match", one).exit_code == 2
    assert ckpt("match", one, "--like", other, "--like", one).exit_code == 2
    assert ckpt("match", one, "--like", other, "--match", "best").exit_code == 2
    assert ckpt("match", one, "--like", other, "--rename", "x").exit_code == 2
    assert ckpt("match", one, "--like", other, "--overwrite").exit_code == 2
    assert ckpt("match", one, "--like", other, "--rename", "nothing=x").exit_code == 3
    assert ckpt("match", "absent.pth", "--like", other).exit_code == 3
    assert ckpt("match", one, "--like", other, "--match", "position").exit_code == 3


def test_names_from_files_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """Control characters in names are escaped in every part of the table."""
    torch.save({"a\x1b[31m.weight": torch.ones(2), "b\x1b.weight": torch.ones(3)}, tmp_path / "a.pth")
    torch.save({"module.a\x1b[31m.weight": torch.ones(2), "c\x1b.weight": torch.ones(4)}, tmp_path / "b.pth")
    shown = ckpt("match", tmp_path / "a.pth", "--like", tmp_path / "b.pth").output
    assert "\x1b" not in shown
    assert "a\\x1b[31m.weight" in shown


def test_the_call_is_the_command(tmp_path: Path) -> None:
    """`ckpt_tools.match` gives the command's report and writes the command's plan; what it cannot do without is asked for."""
    source, like = FIXTURES / "ddp.pth", FIXTURES / "single.pth"
    report = ckpt_tools.match(source, like=like, match="structure", output=tmp_path / "call.toml")
    shown = ckpt("match", source, "--like", like, "--match", "structure", "-o", tmp_path / "command.toml", "--json")
    assert json.loads(shown.output) == json.loads(json.dumps(report.to_json()))
    assert (tmp_path / "call.toml").read_text() == (tmp_path / "command.toml").read_text()
    assert report.matching.complete_with_offers
    with pytest.raises(UsageError, match="`like` names the target"):
        ckpt_tools.match(source)
    with pytest.raises(UsageError, match="`overwrite` is about a plan"):
        ckpt_tools.match(source, like=like, overwrite=True)
