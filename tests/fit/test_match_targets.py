"""Targets of every kind, prefixes that are named, and `ckpt match` on the command line."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, ConvertError, UsageError
from tests.support import networks as nets
from tests.support.commands import ckpt
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


def names_of(spec: Any, **options: Any) -> tuple[str, ...]:
    """The names that a target has, as a match with a checkpoint of other names tells them."""
    found = ckpt_tools.match(FIXTURES / "dtypes.pth", like=spec, match="exact+wrappers", **options).matching
    assert not found.matched
    return found.missing


def test_a_callable_is_built_on_the_meta_device(module: str) -> None:
    """Names in order; what computes with values is built all the same; arguments are JSON or a mapping."""
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert names_of(f"{module}:net", like_args='{"classes": 5}') == names
    assert names_of(f"{module}:net", like_args={"wrapped": True}) == tuple(f"module.{name}" for name in names)
    assert names_of(f"{module}:computes") == ("weight", "bias")
    assert names_of(f"{module}:state") == names


def test_modules_state_dicts_and_files_are_targets(tmp_path: Path) -> None:
    """The same tensors from a live module, its state dict, and a file of it; a tied head may be missing from the checkpoint."""
    model = nets.LanguageA()
    torch.save({"model": model.state_dict(), "epoch": 1}, tmp_path / "file.pth")
    torch.save({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}, tmp_path / "in.pth")
    for spec in (model, model.state_dict(), tmp_path / "file.pth", str(tmp_path / "file.pth")):
        found = ckpt_tools.match(tmp_path / "in.pth", like=spec).matching
        assert [row.new for row in found.matched] == list(model.state_dict())
        assert {row.new: row.old for row in found.matched}["lm_head.weight"] == "wte.weight"


@pytest.mark.parametrize("what", ["broken", "number", "constant", "absent", "net.absent", "leaves"])
def test_what_is_no_target_is_refused(module: str, what: str) -> None:
    """Not there, not callable, raising, or giving something else: one sentence each."""
    with pytest.raises(ConvertError, match=f"{module}:{what}"):
        names_of(f"{module}:{what}")


def test_a_lazy_target_is_refused_by_name(module: str) -> None:
    with pytest.raises(ConvertError, match=r"'0\.weight' of the target is lazy"):
        names_of(f"{module}:lazy")


def test_a_script_that_ends_when_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that exits while it is imported does not end the command without a word."""
    monkeypatch.chdir(tmp_path)
    Path("ends_at_once.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConvertError, match="cannot be imported") as caught:
        names_of("ends_at_once:net")
    assert "__main__" in caught.value.fix


def test_what_a_target_prints_is_no_part_of_the_report(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the target's code prints goes to standard error, beside the JSON on standard output."""
    names_of(f"{module}:talks")
    captured = capsys.readouterr()
    assert ("building" in captured.out, "building" in captured.err) == (False, True)


def test_odd_targets_are_refused(module: str, tmp_path: Path) -> None:
    """A module that is not there, arguments that are not a JSON object or for a file, a state dict without tensors."""
    torch.save({"model": nn.Linear(2, 2).state_dict(), "ema": nn.Linear(2, 2).state_dict()}, tmp_path / "two.pth")
    cases: list[tuple[Any, Any, type[CkptError]]] = [
        ("no_such_package:thing", None, ConvertError), (f"{module}:net", "[1]", UsageError),
        (f"{module}:net", "{", UsageError), (f"{module}:net", '{"a": 1}', ConvertError),
        (tmp_path / "two.pth", "{}", UsageError), (tmp_path / "two.pth", None, CkptError), ({}, None, ConvertError),
        (3, None, ConvertError), (nn.Linear(2, 2), {"a": 1}, UsageError), (tmp_path / "none.pth", None, CkptError),
    ]  # fmt: skip
    for spec, args, error in cases:
        with pytest.raises(error):
            names_of(spec, like_args=args)


MARK = "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules called as installed ones are, which tell when they run; it is the current one."""
    for name in ("colorsys", "rich", "click", "struct", "textwrap", "faster"):
        (tmp_path / f"{name}.py").write_text(MARK)
    (tmp_path / "helper_of_models.py").write_text("WIDTH = 3\n")
    (tmp_path / "models.py").write_text(
        "import torch\nfrom helper_of_models import WIDTH\ndef net(): return torch.nn.Linear(WIDTH, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_installed_modules_come_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is imported from there, and takes nothing from the folder; a missing file is told."""
    before = list(sys.path)
    with pytest.raises(ConvertError, match="has no"):
        names_of("colorsys:resnet18")
    with pytest.raises(ConvertError, match="cannot be imported") as caught:
        names_of("./nowhere.py:net")
    assert "there is no file ./nowhere.py" in caught.value.why
    assert sys.path == before
    (folder / "site").mkdir()
    (folder / "site" / "installed_net.py").write_text(
        "import torch\ntry:\n    import faster\nexcept ImportError:\n    pass\ndef net(): return torch.nn.Linear(3, 1)\n"
    )
    others = [place for place in sys.path if place not in ("", str(folder))]
    monkeypatch.setattr(sys, "path", [str(folder / "site"), *others])
    try:
        assert names_of("installed_net:net") == ("weight", "bias")
    finally:
        sys.modules.pop("installed_net", None)
    assert not list(folder.glob("*.ran"))


@pytest.mark.parametrize("spec", ["models:net", "models.py:net", "./models.py:net", "{}/models.py:net"])
def test_the_folder_where_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """A module of one's own is still found by name, or named as the file that it is, with what lies beside it."""
    for name in ("models", "helper_of_models", "models of --like"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert names_of(spec.format(folder)) == ("weight", "bias")
    for name in ("models", "helper_of_models", "models of --like"):
        sys.modules.pop(name, None)


# --- the command


@pytest.mark.parametrize("name", ["patch_embed.proj.weight", "sr.weight"])
@pytest.mark.parametrize("step", ['step = "reshape"', 'step = "permute"\naxes = "out (14 width 3) -> out 3 14 width"'])
def test_patches_are_reshaped_by_a_plan_only(tmp_path: Path, name: str, step: str) -> None:
    """[32, 588] holds as many numbers as [32, 3, 14, 14], channels first or last: refused, until a plan says which."""
    first = torch.randn(32, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    rows = first.reshape(32, -1) if "reshape" in step else first.permute(0, 2, 3, 1).reshape(32, -1)
    torch.save({name: rows}, tmp_path / "old.pth")
    torch.save({name: torch.zeros_like(first)}, tmp_path / "new.pth")
    sides: list[str | Path] = [tmp_path / "old.pth", "--like", tmp_path / "new.pth", "--allow-reshape"]
    for stages in ("structure", "values", "position"):
        result = ckpt("match", *sides, "--match", stages, code=1)
        assert 'same number of elements, other shape: step = "reshape" or "permute" in a plan' in result.output
    refused = ckpt("convert", sides[0], tmp_path / "out.pth", *sides[1:], code=3)
    assert "or a step of a --plan" in refused.output
    plan = tmp_path / "plan.toml"
    text = f'format = "ckpt-plan-1"\n[[tensor]]\nold = "{name}"\nnew = "{name}"\nshape = [32, 588]\n{step}\n'
    plan.write_text(text + "to = [32, 3, 14, 14]\n")
    ckpt("convert", tmp_path / "old.pth", tmp_path / "out.pth", "--plan", plan)
    torch.testing.assert_close(torch.load(tmp_path / "out.pth")[name], first, rtol=0, atol=0)


def test_the_call_is_the_command(tmp_path: Path) -> None:
    """`ckpt_tools.match` gives the command's report and writes the command's plan; what it cannot do without is asked for."""
    source, like = FIXTURES / "ddp.pth", FIXTURES / "single.pth"
    report = ckpt_tools.match(source, like=like, match="structure", output=tmp_path / "call.toml")
    shown = ckpt("match", source, "--like", like, "--match", "structure", "-o", tmp_path / "command.toml", "--json")
    assert json.loads(shown.output) == json.loads(json.dumps(report.to_json()))
    assert (tmp_path / "call.toml").read_text() == (tmp_path / "command.toml").read_text()
    assert report.matching.complete_with_offers
    with pytest.raises(UsageError, match="`like` is missing"):
        ckpt_tools.match(source)
    with pytest.raises(UsageError, match="`overwrite` needs `output=PLAN`"):
        ckpt_tools.match(source, like=like, overwrite=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def saved(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def test_a_prefix_that_is_in_the_names_too(tmp_path: Path) -> None:
    """Where the model has an attribute of that name itself, the advice takes one off and not both."""
    inner = nn.ModuleDict({"model": network(), "head": nn.Linear(2, 2)})
    source, like = saved(nn.ModuleDict({"model": inner}), tmp_path / "in.pth"), saved(inner, tmp_path / "like.pth")
    command = ["convert", str(source), str(tmp_path / "out.pth"), "--like", str(like)]
    said = ckpt(*command, code=3).stderr
    option = said[said.index("--strip-prefix") :].partition(" too")[0]
    ckpt(*command, *shlex.split(option))
    inner.load_state_dict(torch.load(tmp_path / "out.pth"))
    (finding,) = [row for row in ckpt_tools.inspect(source).findings if row.code == "common-prefix"]
    ckpt(*shlex.split(finding.fix)[1:])
    inner.load_state_dict(torch.load(tmp_path / "in.fixed.pth"))
