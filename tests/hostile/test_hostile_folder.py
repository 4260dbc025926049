"""A stranger's folder is the current one: whatever its modules are called, no command and no process of one runs them."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

import ckpt_tools
from docs import pyz
from tests.operations.test_passed_over import hook
from tests.support.keys import write_keys
from tests.support.samples import FIXTURES
from tests.support.without import run as many

ROOT = Path(ckpt_tools.__file__).parent.parent
MANY = 200  # files from which on processes share the work
SCRIPT = str(Path(sys.executable).with_name("ckpt"))

# The ways to start ckpt.
STARTS = {"ckpt": [SCRIPT], "python -m": [sys.executable, "-m", "ckpt_tools"], "the one file": [sys.executable, "PYZ"]}
# The other spellings of `python -m`: torchrun's comes first; with -S nothing has imported __future__ yet.
SPELLINGS = ("-u -m ckpt_tools", "-mckpt_tools", "-Bum ckpt_tools", "-S -m ckpt_tools", "-m ckpt_tools.__main__",
             "-X utf8 -m ckpt_tools", "-E -m ckpt_tools", "-P -m ckpt_tools")  # fmt: skip

LINEAR = '{"in_features":3,"out_features":2}'
# What other processes have a part in. OUT is a folder elsewhere, KEYS another.
SHARED = (
    "scan .", "inspect --jobs 2 ddp.pth single.pth", "check --jobs 2 large.safetensors larger.safetensors",
)  # fmt: skip
# What is typed, by its exit code.
TYPED = {
    0: (
        *SHARED, "convert ddp.pth single.pth --to-dir OUT/to", "ddp.pth",
        "inspect --json tiny.weights.h5 ddp.pth", "show ddp.pth module.fc2.bias",
        "convert ddp.pth OUT/a.pth --strip-module", "convert ddp.pth OUT/b.safetensors --dtype bf16",
        "convert ddp.pth OUT/dcp --format dcp", f"convert linear.pth OUT/c.pth --like torch.nn:Linear --like-args {LINEAR}",
        "match ddp.pth --like single.pth", "check --format junit single.pth", "scan ddp.pth",
        "scan --format github whole_module.pth", "repair ddp.pth OUT/d.pth", "stats ddp.pth", "report ddp.pth -o OUT/f.html",
        "average ddp.pth single.pth OUT/e.pth --unwrap", "extract-lora linear.pth tuned.pth OUT/lora --rank 1",
        f"prove linear.pth linear.pth --model torch.nn:Linear --model-args {LINEAR} --input 1x3",
        "sign ddp.pth --key KEYS/key.pem -o OUT/ddp.sig", "verify ddp.pth --key KEYS/key.pub --signature ddp.sig",
        "help convert", "--version --verbose",
    ),
    1: ("check --values --digest ddp.pth", "diff --values ddp.pth single.pth"),
    3: ("inspect memory://none.pth",),
}  # fmt: skip
EXIT_CODES = {line: code for code, lines in TYPED.items() for line in lines}
# What is typed for the other ways to start: what is imported later is the same.
FEW = ("scan .", "convert ddp.pth OUT/dcp --format dcp", "diff --values ddp.pth single.pth")


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file to which a module of the folder appends its name when it is run."""
    return tmp_path_factory.mktemp("elsewhere") / "marker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> Path:
    """Checkpoints, and a module by the name of all that ckpt, Python, or an installed package could ask for."""
    folder = tmp_path_factory.mktemp("downloads")
    code = f"import sys\nopen({str(marker)!r}, 'a').write(__name__ + ' in ' + ' '.join(sys.orig_argv) + '\\n')\n"
    names = {*sys.stdlib_module_names, *packages_distributions(), *_asked_for(), "sitecustomize", "usercustomize", "plug_in"}
    for name in names:
        (folder / f"{name.partition('/')[0]}.py").write_text(code)
    for name in ("ckpt_tools", "torch", "safetensors", "multiprocessing"):  # a package goes before a module
        (folder / name).mkdir()
        for file in ("__init__.py", "__main__.py", "spawn.py", "serialization.py"):
            (folder / name / file).write_text(code)
    about = folder / "stranger-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nx = plug_in:f\n[fsspec.specs]\nx = plug_in.F\n")
    for name in ("ddp.pth", "single.pth", "whole_module.pth"):
        shutil.copy(FIXTURES / name, folder)
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "linear.pth")
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "tuned.pth")
    shutil.copy(FIXTURES / "frameworks" / "tiny.weights.h5", folder)
    private, _ = write_keys(marker.parent, "key")
    ckpt_tools.sign(folder / "ddp.pth", key=private, output=folder / "ddp.sig")
    for number in range(MANY):
        os.link(folder / "single.pth", folder / f"single.{number}.pth")
    header = b'{"w":{"dtype":"U8","shape":[35000000],"data_offsets":[0,35000000]}}'
    for name in ("large", "larger"):  # together more than what one process checks
        with (folder / f"{name}.safetensors").open("wb") as sparse:
            sparse.write(len(header).to_bytes(8, "little") + header)
            sparse.truncate(8 + len(header) + 35_000_000)
    return folder


def _asked_for() -> set[str]:
    """The modules that were looked for, found or not, by what imports most."""
    code = f"""
import contextlib, sys
asked = set()
sys.addaudithook(lambda event, about: event == "import" and asked.add(about[0].split(".")[0]))
import click, cryptography, fsspec, h5py, numpy, rich.console, safetensors.torch, torch.distributed.checkpoint
from tests.support.commands import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    main(["check", "--values", {str(FIXTURES / "ddp.pth")!r}])
print(*asked)
"""
    return set(run([sys.executable, "-c", code], ROOT).stdout.split())


def run(command: Sequence[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def without_pythons_own(folder: Path, command: Sequence[str], to: Path) -> Path:
    """The folder, by links to its files, but for what `python -m` imports of it before anything of ours: ckpt_tools itself
    above all. Nothing but `python -P` keeps Python from that.
    """
    other = to / "empty" / "nothing"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("import sys\nprint(*{name.split('.')[0] for name in sys.modules})")
    (other / "__main__.py").touch()
    done = run([word.replace("ckpt_tools", "nothing") for word in command], other.parent)
    names = {"ckpt_tools", *done.stdout.split()}
    ignored = shutil.ignore_patterns(*names, *(f"{name}.py" for name in names))
    return Path(shutil.copytree(folder, to / "here", copy_function=os.link, ignore=ignored))


def test_the_folder_would_run(folder: Path, marker: Path) -> None:
    """A Python that has the folder on its path runs it: the tests below would see that."""
    run([sys.executable, "-c", "import multiprocessing"], folder)
    assert ran(marker).startswith("multiprocessing in ")


def ran(marker: Path) -> str:
    """What was run since this was last asked."""
    text = marker.read_text() if marker.exists() else ""
    marker.unlink(missing_ok=True)
    return text


@pytest.mark.parametrize("start", STARTS)
def test_no_command_runs_the_folder(start: str, folder: Path, marker: Path, tmp_path: Path) -> None:
    """Each command, alone and with processes that share its work, does what it is for, and runs nothing of the folder."""
    command = [word.replace("PYZ", str(tmp_path / "ckpt.pyz")) for word in STARTS[start]]
    if start == "the one file":
        (tmp_path / "ckpt.pyz").write_bytes(pyz.archive())
    here = without_pythons_own(folder, command, tmp_path) if "-m" in command else folder

    def words(line: str) -> list[str]:
        return [word.replace("OUT", str(tmp_path)).replace("KEYS", str(marker.parent)) for word in line.split()]

    own = [*SHARED, "ddp.pth"] if start == "ckpt" else FEW  # each in a process of its own
    # Python says on standard error what each of its processes imports
    done = {line: run([*command, *words(line)], here, PYTHONPROFILEIMPORTTIME="1") for line in own}
    assert {line: each.returncode for line, each in done.items()} == {line: EXIT_CODES[line] for line in own}
    shared = {line: done[line].stderr.count("| multiprocessing.spawn\n") for line in SHARED if line in done}
    assert min(shared.values()) > 1, shared  # else it had no other process
    assert ran(marker) == ""
    if start == "ckpt":  # the others one after another: the folder is not on the path of that process either
        rest = [line for line in EXIT_CODES if line not in own]
        codes = [one.code for one in many([words(line) for line in rest], here, dict(os.environ), ["-P", str(ROOT)])]
        assert dict(zip(rest, codes, strict=True)) == {line: EXIT_CODES[line] for line in rest}
        assert ran(marker) == ""


def test_the_hook_runs_nothing_of_the_folder(folder: Path, marker: Path) -> None:
    """What pre-commit calls in a repository, with all its files."""
    for name in ("ckpt-scan", "ckpt-check"):
        arguments, wanted = hook(name)
        files = [
            path.name for path in folder.iterdir() if path.is_file() and path.name != "ddp.pth" and wanted.search(path.name)
        ]
        done = run([SCRIPT, *arguments, *files], folder)
        assert done.returncode == (0 if name == "ckpt-scan" else 1), done.stdout + done.stderr  # the whole module is a finding
    assert ran(marker) == ""


@pytest.mark.parametrize("options", SPELLINGS)
def test_every_spelling_of_python_m(options: str, folder: Path, marker: Path, tmp_path: Path) -> None:
    """However Python is told to run the module, torchrun's way too: its folder is off the path before anything is imported."""
    command = [sys.executable, *options.split()]
    here = without_pythons_own(folder, command, tmp_path)
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])} if "-S" in options else {}
    done = run([*command, "scan", "single.pth"], here, **path)
    assert done.returncode == 0, done.stderr
    assert ran(marker) == ""


SCRIPT_OF_ONES_OWN = """
import beside_it
import ckpt_tools
if __name__ == "__main__":
    print(len(ckpt_tools.scan(".", jobs=2)), "PYTHONSAFEPATH" in beside_it.environ)
"""


def test_a_script_that_uses_the_library(folder: Path, marker: Path, tmp_path: Path) -> None:
    """Its processes run nothing of the folder, and find what lies beside the script; the environment is left as it was."""
    (tmp_path / "script.py").write_text(SCRIPT_OF_ONES_OWN)
    (tmp_path / "beside_it.py").write_text("from os import environ")
    done = run([sys.executable, str(tmp_path / "script.py")], folder)
    count, known = done.stdout.split()
    assert (int(count) > MANY, known) == (True, "False"), done.stderr
    assert ran(marker) == ""
