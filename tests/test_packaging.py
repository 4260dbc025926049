"""What is published: the source archive, the wheel that is built from it, and the wheel in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ckpt_tools
from tests.support.samples import FIXTURES

ROOT = Path(__file__).parents[1]
setuptools = pytest.importorskip("setuptools", minversion="77")


def build(kind: str, source: Path, target: Path) -> Path:
    """A wheel or a source archive, by setuptools as pyproject.toml asks for it; nothing is fetched."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    target.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked source archive of a copy of this repository."""
    folder = tmp_path_factory.mktemp("packaging")
    junk = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "runs", "shared")
    shutil.copytree(ROOT, folder / "copy", ignore=junk)
    archive = build("sdist", folder / "copy", folder / "dist")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return build("wheel", source, folder / "dist")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; a .pth file lends it torch and the other requirements of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "lent.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "--no-index", "--no-deps", "--quiet", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python.parent


def test_the_version_has_its_section() -> None:
    """CHANGELOG.md has a dated section of a released version behind what is not released; its text comes before its lists."""
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?\n\n(?=(.?))", text, re.MULTILINE)
    first, last, *_ = [name for name, _, _ in sections]
    assert first == "Unreleased"
    assert last == ckpt_tools.__version__ or ".dev" in ckpt_tools.__version__
    assert all(date and start != "#" for _, date, start in sections[1:])


def test_the_wheel_holds_the_package_only(wheel: Path) -> None:
    """`train/`, `fixtures/`, `tests/` stay in the repository; the page's files, the shipped plans and py.typed are there."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"ckpt_tools"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ckpt_tools").rglob("*.py")}
    assert modules <= {name.replace("/", os.sep) for name in names}
    assert {f"ckpt_tools/render/page/report.{kind}" for kind in ("html", "css", "js")} | {"ckpt_tools/py.typed"} <= set(names)
    assert {
        f"ckpt_tools/fit/families/{path.name}" for path in (ROOT / "ckpt_tools" / "fit" / "families").glob("*.toml")
    } <= set(names)


def test_the_installed_command(environment: Path, tmp_path: Path) -> None:
    """In the new environment `ckpt --version`, inspect, convert and report run, from the wheel and not from here."""
    shutil.copy(FIXTURES / "ddp.pth", tmp_path / "ddp.pth")

    def ckpt(*arguments: str) -> str:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        done = subprocess.run([str(environment / "ckpt"), *arguments], cwd=tmp_path, capture_output=True, text=True, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ckpt("--version").startswith("ckpt, version 0.")
    assert "wrapped in 'module.'" in ckpt("inspect", "ddp.pth")
    assert "11 of 11 renamed" in ckpt("convert", "ddp.pth", "plain.safetensors", "--strip-module")
    assert "wrote page.html" in ckpt("report", "ddp.pth", "plain.safetensors", "-o", "page.html")
    where = [str(environment / "python"), "-c", "import ckpt_tools; print(ckpt_tools.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}).stdout
    assert Path(found.strip()).is_relative_to(environment.parent)


def test_the_conda_recipe_wants_what_the_project_wants() -> None:
    """Packages with their oldest versions, and both scripts; PyTorch has another name there."""
    recipe = (ROOT / ".github" / "conda" / "meta.yaml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = re.findall(r"\n  run:\n((?:    - .*\n)+)", recipe)
    rows = {line.removeprefix("    - ").replace(" ", "") for line in wanted.splitlines()}
    theirs = {"torch": "pytorch", "isal": "python-isal"}
    plain = [line.partition(";")[0] for line in project["dependencies"]]
    assert rows == {re.sub(r"^\w+", lambda name: theirs.get(name[0], name[0]), line) for line in plain} | {
        f"python{project['requires-python']}"
    }
    assert set(re.findall(r"    - (\S+ = \S+:main)\n", recipe)) == {
        f"{name} = {place}" for name, place in project["scripts"].items()
    }
    assert project["description"] in recipe
