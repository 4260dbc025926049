"""What `ckpt check` and `ckpt scan` found as SARIF, GitHub's lines and JUnit XML; and the recipes that use them."""

import json
import os
import pickle
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import ckpt
from tests.support.terminal import ROOT, installed, run

HOOKS = ROOT / ".pre-commit-hooks.yaml"


class Evil:
    """What runs when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """A command with what a log must not take as its own."""
        return os.system, ("echo ']]>&<\r\n::error::%",)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A healthy file, one with a warning, one with NaN, one that is cut, one that runs a command."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("single.pth", "ddp.pth"):
        shutil.copy(ROOT / "fixtures" / name, folder)
    torch.save({"a.weight": torch.tensor([float("nan")])}, folder / "nan,1:2%.pth")
    (folder / "cut.pth").write_bytes((folder / "single.pth").read_bytes()[:-300])
    with (folder / "evil.pkl").open("wb") as file:
        pickle.dump(Evil(), file)
    return folder


def sarif(*arguments: str) -> dict[str, Any]:
    """The one run of a log, whose results have rules and levels that exist."""
    log = json.loads(run(*arguments, "--format", "sarif").stdout)
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    only: dict[str, Any] = log["runs"][0]
    rules = only["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for row in only["results"]:
        assert rules[row["ruleIndex"]]["id"] == row["ruleId"]
        assert row["level"] in ("error", "warning", "note")
        assert row["message"]["text"]
    return only


def test_check_as_sarif(models: Path) -> None:
    """A result for each finding, at the file's own address, with the tensor, and a rule with what its code means."""
    log = sarif("check", "--values", "models")
    found = {(row["ruleId"], row["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]): row for row in log["results"]}
    names = ("cut.pth", "ddp.pth", "evil.pkl", "nan%2C1%3A2%25.pth")
    assert {place[1] for place in found} == {f"models/{name}" for name in names}
    nan = found["not-finite", "models/nan%2C1%3A2%25.pth"]
    assert nan["level"] == "error"
    assert nan["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "a.weight"
    texts = {rule["id"]: rule["shortDescription"]["text"] for rule in log["tool"]["driver"]["rules"]}
    assert texts["not-finite"].startswith("NaN or infinite values (--values)")


def test_scan_as_github(models: Path) -> None:
    """A line a finding; what would end the line or the command is escaped."""
    (line,) = run("scan", "--format", "github", "models/evil.pkl").stdout.splitlines()
    assert line.startswith("::error file=models/evil.pkl,title=dangerous::loading this without weights_only runs posix.system(")
    assert "::error::%25" in line
    assert "%0" not in line  # the command's own line feed is text within quotation marks


def test_check_as_github(models: Path) -> None:
    """Levels are GitHub's, file names are escaped as its properties want, lines of a message stay one line."""
    result = ckpt("check", "--values", "--format", "github", "models", code=3)
    lines = result.stdout.splitlines()
    assert all(re.match(r"::(error|warning|notice) file=[^:,]*,title=[^:,]*::", line) for line in lines)
    assert any(line.startswith("::error file=models/nan%2C1%3A2%25.pth,title=not-finite in a.weight::") for line in lines)
    assert any("%0Ackpt convert models/ddp.pth" in line for line in lines)
    assert not any("single.pth," in line for line in lines)


@pytest.mark.parametrize("form", ["github", "junit", "sarif"])
def test_hostile_names(form: str, models: Path) -> None:
    """A name with a line feed, a command of GitHub's, what XML cannot hold: it stays a name, in a line or case of its own."""
    name = "a\n::stop-commands::x\x01]]>&<\"'\udc80.pth"
    torch.save({"\r\n::set-env::": torch.tensor([float("nan")])}, (models / "x.pth"))
    (models / "x.pth").rename(models / name)
    result = run("check", "--values", "--format", form, "models")
    assert result.exit_code == 3
    if form == "github":
        assert all(
            re.match(r"::(error|warning|notice) file=[^:,]*,title=[^:,]*::", line) for line in result.stdout.splitlines()
        )
        assert sum("stop-commands" in line for line in result.stdout.splitlines()) == 1
    elif form == "junit":
        (suite,) = ET.fromstring(result.stdout)
        assert sum("stop-commands" in str(case.get("name")) for case in suite) == 1
    else:
        assert "stop-commands" in json.dumps(json.loads(result.stdout))


def test_check_as_junit(models: Path) -> None:
    """A test case a file: failures, errors, output; the counts are true."""
    result = run("check", "--values", "--format", "junit", "models")
    root = ET.fromstring(result.stdout)
    (suite,) = root
    cases = {case.get("name"): case for case in suite}
    said = {name: [part.tag for part in case] for name, case in cases.items()}
    failing = {name: tags[0] for name, tags in said.items() if tags and tags[0] != "system-out"}
    assert failing == {
        "models/cut.pth": "error", "models/evil.pkl": "failure", "models/ddp.pth": "failure",
        "models/nan,1:2%.pth": "failure",
    }  # fmt: skip
    tags = list(failing.values())
    for element in (root, suite):
        assert [element.get(name) for name in ("tests", "failures", "errors")] == [
            str(count) for count in (len(cases), tags.count("failure"), tags.count("error"))
        ]
    (failure,) = cases["models/ddp.pth"]
    assert failure.get("type") == "wrapper-prefix"
    assert "--strip-module" in str(failure.text)
    assert said["models/single.pth"] == []


def test_scan_as_junit(models: Path) -> None:
    """What is dangerous fails; a file that holds nothing to run is a test that passes."""
    (suite,) = ET.fromstring(run("scan", "--format", "junit", "models").stdout)
    assert [case.get("name") for case in suite if len(case) and case[0].tag == "failure"] == ["models/evil.pkl"]


@pytest.mark.parametrize("form", ["sarif", "github", "junit"])
def test_the_exit_code_is_the_same(form: str, models: Path) -> None:
    for command in ("check", "scan"):
        assert run(command, "--format", form, "models").exit_code == run(command, "models").exit_code
    ckpt("check", "--format", form, "models/single.pth")


def recipes() -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="comes with the extra `docs`")
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    return [yaml.safe_load(block) for block in blocks]


def commands() -> list[str]:
    """Every line of a recipe that runs ckpt, by the installed command: the one file is tried in test_without_torch.py."""
    found = []
    for recipe in recipes():
        jobs = [*recipe.get("jobs", {}).values(), recipe.get("checkpoints", {})] if isinstance(recipe, dict) else []
        for job in jobs:
            found += [step["run"] for step in job.get("steps", []) if "run" in step] + list(job.get("script", []))
    start = "python ckpt.pyz "
    return [f"ckpt {line.removeprefix(start)}" for line in found if line.startswith(start)]


def test_recipes_run_as_written(models: Path) -> None:
    """The commands of docs/ci.md for GitHub and GitLab, in a shell, write what the next step takes."""
    environment = installed(models.parent / "bin")
    lines = commands()
    assert len(lines) == 3
    for line in lines:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode in (1, 3), done.stderr
    assert json.loads(Path("scan.sarif").read_text())["version"] == "2.1.0"
    assert ET.parse("checkpoints.xml").getroot().tag == "testsuites"


def test_hooks_of_pre_commit(models: Path) -> None:
    """Each hook has what pre-commit asks for, and its command judges them; docs/ci.md has all."""
    yaml = pytest.importorskip("yaml", reason="comes with the extra `docs`")
    hooks = {hook["id"]: hook for hook in yaml.safe_load(HOOKS.read_text())}
    (shown,) = [recipe for recipe in recipes() if "repos" in recipe]
    assert [hook["id"] for hook in shown["repos"][0]["hooks"]] == list(hooks)
    for hook in hooks.values():
        assert {"id", "name", "entry", "language"} <= set(hook)
        names = [str(path) for path in sorted(models.iterdir()) if re.search(hook.get("files", ""), path.name)]
        assert names
        command = [*hook["entry"].split()[1:], *hook.get("args", [])]
        assert run(*command, *names).exit_code in (1, 3)
        ckpt(*command, models / "single.pth")
