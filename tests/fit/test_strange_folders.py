"""In a stranger's folder nothing of it runs unless it is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import TargetError
from ckpt_tools.fit.targets import read_target

MARK = "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules called as installed ones are, which tell when they run; it is the current one."""
    for name in ("colorsys", "rich", "click", "struct", "textwrap"):
        (tmp_path / f"{name}.py").write_text(MARK)
    (tmp_path / "helper_of_models.py").write_text("WIDTH = 3\n")
    (tmp_path / "models.py").write_text(
        "import torch\nfrom helper_of_models import WIDTH\ndef net(): return torch.nn.Linear(WIDTH, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.ran")]


def test_installed_modules_come_first(folder: Path) -> None:
    """A module that is installed is imported from there, whatever the folder holds; and the path is as it was."""
    before = list(sys.path)
    with pytest.raises(TargetError, match="has no"):
        read_target("colorsys:resnet18")
    assert ran(folder) == []
    assert sys.path == before


@pytest.mark.parametrize("spec", ["models:net", "models.py:net", "./models.py:net", "{}/models.py:net"])
def test_the_folder_where_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """A module of one's own is still found by name, or named as the file that it is, with what lies beside it."""
    for name in ("models", "helper_of_models", "models of --like"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    target = read_target(spec.format(folder))
    assert [(param.name, param.shape) for param in target.params] == [("weight", (1, 3)), ("bias", (1,))]
    assert isinstance(target.module, torch.nn.Linear)
    for name in ("models", "helper_of_models", "models of --like"):
        sys.modules.pop(name, None)


def test_a_file_that_is_not_there(folder: Path) -> None:
    """A file that is missing is said to be; nothing else is tried."""
    with pytest.raises(TargetError, match="cannot be imported") as caught:
        read_target("./nowhere.py:net")
    assert "there is no file ./nowhere.py" in caught.value.why
    assert ran(folder) == []


def test_an_installed_target_takes_nothing_from_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed, and tries to import one that is not, does not find it in the folder."""
    site = folder / "site"
    site.mkdir()
    (site / "installed_net.py").write_text(
        "import torch\ntry:\n    import faster\nexcept ImportError:\n    pass\ndef net(): return torch.nn.Linear(3, 1)\n"
    )
    (folder / "faster.py").write_text(MARK)
    monkeypatch.setattr(sys, "path", [str(site), *(place for place in sys.path if place not in ("", str(folder)))])
    try:
        assert len(read_target("installed_net:net").params) == 2
    finally:
        sys.modules.pop("installed_net", None)
    assert ran(folder) == []
