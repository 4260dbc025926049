"""dist/ckpt.pyz: one file that is `ckpt`, for a Python without any package."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from docs import pyz
from docs.release_check import readme_commands
from tests.support.every_option import make_files, tried, without_times
from tests.support.without import OPTIONAL, ROOT, Done, hide, run

MOST = 4_000_000
BUNDLED = ("fsspec",)  # what is optional, and in the file
BARE = ["-I", "-S"]  # Python without site-packages, the current folder and the environment's settings


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, made of what is here."""
    place = tmp_path_factory.mktemp("dist") / "ckpt.pyz"
    pyz.write(place)
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name."""
    folder = tmp_path_factory.mktemp("files") / "here"
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the installed `ckpt` where there is no more than in the file."""
    return hide(tmp_path_factory.mktemp("hidden"), [name for name in OPTIONAL if name not in BUNDLED])


def start(one_file: Path, arguments: list[str], where: Path) -> Done:
    """What comes of one command, as a user starts the file."""
    command = [sys.executable, *BARE, str(one_file), *arguments]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=where, capture_output=True, encoding="utf-8", env=environment, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_it_is_small_pure_and_the_same_again(one_file: Path, tmp_path: Path) -> None:
    """Made twice, in another time zone and with another seed of hashes, it has the same bytes, and a digest beside it."""
    made = one_file.read_bytes()
    assert len(made) < MOST
    beside = one_file.with_name("ckpt.pyz.sha256").read_text()
    assert beside == f"{hashlib.sha256(made).hexdigest()}  ckpt.pyz\n"
    other = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-m", "docs.pyz", str(tmp_path / "again.pyz")], cwd=ROOT, env=other, check=True)
    assert (tmp_path / "again.pyz").read_bytes() == made


def test_what_is_in_it(one_file: Path) -> None:
    """Every file of the package, no compiled module, and for each package that is bundled its licence."""
    names = zipfile.ZipFile(one_file).namelist()
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ckpt_tools").rglob("*") if path.is_file()}
    assert {name for name in package if not name.endswith(".pyc")} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".pyd", ".pyc", ".exe")) or name.startswith((".", "/"))]
    for bundled in pyz.PACKAGES:
        folder = bundled.replace("-", "_")
        licences = [name for name in names if re.match(rf"{folder}-[\d.]+\.dist-info/LICENSE", name, re.IGNORECASE)]
        assert licences, bundled


def test_an_older_python_is_told(one_file: Path) -> None:
    """What every Python runs first is syntax that it knows; one that is too old gets a sentence, and imports nothing."""
    code = zipfile.ZipFile(one_file).read("__main__.py").decode()
    ast.parse(code, feature_version=(3, 4))
    old = "import collections, sys\nsys.version_info = collections.namedtuple('version_info', 'major minor')(3, 9)\n"
    done = subprocess.run([sys.executable, "-I", "-c", old + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "ckpt needs Python 3.11 or newer; this is 3.9.\n")


def test_every_command_and_option(one_file: Path, place: Path, installed: dict[str, str]) -> None:
    """Each prints what the installed `ckpt` prints where the same packages are missing, and ends alike."""
    ours, theirs = tried(place, installed), tried(place, dict(os.environ), [*BARE, str(one_file)])
    for name, one in theirs.items():
        assert "Traceback" not in one.err, one.err
        assert without_times(one) == without_times(ours[name]), name
    assert sum(one.code in (0, 1) for one in theirs.values()) > 100


def test_the_commands_of_the_readme(one_file: Path, place: Path, installed: dict[str, str], tmp_path: Path) -> None:
    """Each is run as a user runs it: exit code, both outputs and what is written are those of the installed `ckpt`."""
    for name in ("theirs", "ours"):
        shutil.copytree(place, tmp_path / name)
    commands = readme_commands()
    done = run(commands, tmp_path / "ours", {**installed, "COLUMNS": "100"})
    for arguments, ours in zip(commands, done, strict=True):
        theirs = start(one_file, arguments, tmp_path / "theirs")
        assert without_times(theirs) == without_times(ours), arguments
        assert theirs.code in (0, 1) or "Error: " in theirs.err
    written = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "theirs", tmp_path / "ours")
    ]
    assert written[0] == written[1]


def test_other_starts(one_file: Path, place: Path) -> None:
    """Its version names the project and what is in it; help, completion and a plan that is shipped are read from the zip."""
    said = start(one_file, ["--version", "-v"], place).out
    assert said.startswith("ckpt, version ")
    assert "(ckpt_tools)" in said.splitlines()[0]
    assert re.search(r"no torch, no safetensors, click [\d.]+, rich [\d.]+", said)
    assert start(one_file, ["convert", "ddp.pth", "x.pth", "--plan", "llama-meta-to-hf"], place).code == 3
    assert start(one_file, ["report", "ddp.pth", "-o", "page.html"], place).code == 0
    assert (place / "page.html").read_text().startswith("<!doctype html>")


def test_many_files_in_processes(one_file: Path, tmp_path: Path) -> None:
    """Workers find the package in the file: a folder of 250 checkpoints is scanned and inspected in several processes."""
    for number in range(250):
        shutil.copy(ROOT / "fixtures" / "single.pth", tmp_path / f"{number}.pth")
    scanned = start(one_file, ["scan", "--jobs", "2", "--json", "."], tmp_path)
    assert (scanned.code, scanned.err) == (0, "")
    assert scanned.out.count('"verdict":"plain"') == 250
    inspected = start(one_file, ["inspect", "."], tmp_path)
    assert (inspected.code, inspected.err) == (0, "")


def test_the_current_folder_is_not_imported(one_file: Path, tmp_path: Path) -> None:
    """Modules that lie where the user stands are not run, in workers neither, without -I too."""
    for name in ("rich", "click", "json", "ckpt_tools", "encodings"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')")
    for number in range(40):
        shutil.copy(ROOT / "fixtures" / "single.pth", tmp_path / f"{number}.pth")
    command = [sys.executable, "-S", str(one_file), "scan", "--jobs", "2", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("line", ["stats ddp.pth", "check --values ddp.pth", "convert ddp.pth x.pth --dtype bf16"])
def test_a_folder_left_behind_is_no_torch(line: str, one_file: Path, place: Path, tmp_path: Path) -> None:
    """A folder `torch` without a package in it, as uninstalling may leave one, is as none."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", str(one_file), *line.split()]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (3, "Error: This needs PyTorch: pip install torch")
