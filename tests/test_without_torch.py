"""Every command and option where click and rich alone are installed, and as one file, dist/ckpt.pyz, without any package.

A sentence says what needs PyTorch, and the rest works.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ckpt_tools
from docs import pyz
from docs.release_check import readme_commands
from tests.support.every_option import asked, make_files, tried, without_times
from tests.support.without import OPTIONAL, ROOT, Done, hide, run

PATHS = {**os.environ, "PYTHONPATH": str(ROOT)}
PYTORCH = "This needs PyTorch: pip install torch"
BARE = ["-I", "-S"]  # Python without site-packages, the current folder and the environment's settings


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "here"
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def bare(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What came of every command line where no optional package is there."""
    return tried(place, hide(tmp_path_factory.mktemp("hidden")))


@pytest.fixture(scope="module")
def full(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What came of every command line where all that is installed here can be imported."""
    return tried(place, hide(tmp_path_factory.mktemp("nothing"), []))


def needing(done: dict[str, Done]) -> set[str]:
    """The names of what said that it needs PyTorch."""
    return {name for name, one in done.items() if one.err.startswith(f"Error: {PYTORCH}\n")}


def test_nothing_ends_in_a_traceback(bare: dict[str, Done]) -> None:
    """Every option of every command is tried, a new one too; each works, or says in a sentence what it needs."""
    wrong = {
        name: one.err for name, one in bare.items() if one.code in (-1, 2) or "Traceback" in one.err or "No module" in one.err
    }
    assert wrong == {}
    refused = {name for name, one in bare.items() if one.code == 3}
    assert {name for name in refused if "needs" not in bare[name].err} == set()
    assert needing(bare) <= refused


def test_each_says_what_for(bare: dict[str, Done]) -> None:
    """Behind the sentence stands what PyTorch is needed for; under --json the document has both."""
    for name in needing(bare):
        assert len(bare[name].err.splitlines()) == 2, name
        if name.endswith(" --json"):
            document = json.loads(bare[name].out)
            assert (document["what"], document["exit_code"]) == (PYTORCH, 3)
            assert document["why"] == bare[name].err.splitlines()[1]


def test_the_page_has_the_list(bare: dict[str, Done]) -> None:
    """docs/commands.md names each command and option that needs PyTorch, and no other."""
    needs, whole = needing(bare), {name for name in needing(bare) if " " not in name}
    for name, choices in by_option().items():
        if needs.issuperset(choices):
            needs = needs - choices | {name}
    beside = {f"diff --sort {key}" for key in ("max-abs", "max-rel", "l2", "cosine", "changed")}
    needs = {name for name in needs - beside if name in whole or name.split()[0] not in whole}
    table = (ROOT / "docs" / "commands.md").read_text("utf-8").partition("\n| needs PyTorch")[2].partition("\n\n")[0]
    assert set(re.findall(r"`ckpt ([^`]*)`", table)) == needs


def by_option() -> dict[str, set[str]]:
    """The choices that were tried of each option."""
    found: dict[str, set[str]] = {}
    for name, _ in asked():
        found.setdefault(" ".join(name.split()[:2]), set()).add(name)
    return found


def test_the_rest_is_the_same(bare: dict[str, Done], full: dict[str, Done]) -> None:
    """What does not need PyTorch or another package prints what it prints where all are installed, and ends alike."""
    checked = 0
    for name, one in bare.items():
        if "This needs" not in one.err:
            assert without_times(one) == without_times(full[name]), name
            checked += 1
        elif name in needing(bare) and "models.py" not in " ".join(dict(asked())[name].split()):
            assert full[name].code in (0, 1), (name, full[name].err)
    assert checked > 100


def test_numpy_and_others_are_not_missed(full: dict[str, Done], place: Path, tmp_path: Path) -> None:
    """With PyTorch, and without NumPy, safetensors, h5py and isal, every command does what it does with them (but GGUF)."""
    done = tried(place, hide(tmp_path / "hidden", ["numpy", "safetensors", "h5py", "isal"]))
    for name, one in done.items():
        assert without_times(one) == without_times(full[name]), name


OTHERS = {
    "inspect s3://bucket/model.pth": "needs fsspec",
    "sign ddp.pth --key key.pem": "This needs cryptography: pip install cryptography",
    "inspect frameworks/tiny.weights.h5": "pip install h5py",
    "convert frameworks/types.gguf x.pth": "This needs gguf: pip install gguf",
    "check --digest views.pth": PYTORCH, "convert views.pth x.safetensors": PYTORCH,
    "inspect some.zst": "pip install zstandard",
}  # fmt: skip


def test_other_packages(place: Path, tmp_path: Path) -> None:
    """What needs a package that is not there names it, in one sentence; nothing is written."""
    (place / "some.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    for line, one in zip(OTHERS, run([line.split() for line in OTHERS], place, hide(tmp_path / "hidden")), strict=True):
        assert OTHERS[line] in one.err, line
        assert (one.code, "Traceback" in one.err) == (3, False)
    assert not [name for name in ("x.pth", "x.safetensors") if (place / name).exists()]


BROKEN = {
    "raise OSError('libtorch_cpu.so: cannot open shared object file')": "OSError: libtorch_cpu.so",
    "import torch._C": "ModuleNotFoundError: No module named 'torch._C'",
    "name": "NameError: name 'name' is not defined",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_torch(code: str, place: Path, tmp_path: Path) -> None:
    """Where torch is installed and its import fails, one sentence says so and why; what needs no torch works."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    lines = [
        "stats ddp.pth", "check --values ddp.pth single.pth", f"convert ddp.pth {tmp_path}/x.pth --dtype bf16",
        f"convert ddp.pth {tmp_path}/folder --format dcp",
        f"convert ddp.pth single.pth --to-dir {tmp_path}/many --dtype bf16",
        "prove ddp.pth ddp.pth --model models.py:net --input 1x4",
    ]  # fmt: skip
    done = run([line.split() for line in [*lines, "inspect ddp.pth"]], place, hide(tmp_path, []))
    for line, one in zip(lines, done, strict=False):
        assert "PyTorch is installed and cannot be imported." in one.err, line
        assert BROKEN[code] in one.err
        assert one.code == 3
    assert done[-1].code == 0
    assert not (tmp_path / "x.pth").exists()


LIBRARY = """
import ckpt_tools, ckpt_tools.torch

print(ckpt_tools.inspect("ddp.pth").container)
print(ckpt_tools.steps("ddp.pth").strip_module().save("opened.pth").tensors)
calls = [
    lambda: ckpt_tools.stats("ddp.pth"),
    lambda: ckpt_tools.prove,
    lambda: ckpt_tools.torch.load,
    lambda: ckpt_tools.steps("ddp.pth").state_dict(),
    lambda: ckpt_tools.steps("ddp.pth").cast("bf16").save("cast.pth"),
]
for call in calls:
    try:
        call()
    except ImportError as error:
        print(isinstance(error, ckpt_tools.CkptError) and error.what)
"""


def test_the_library(place: Path, tmp_path: Path) -> None:
    """In Python it is an error of ours and an ImportError; reading, and steps that work on no numbers, need nothing."""
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY], cwd=place, env=hide(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["torch-zip", "11", *[PYTORCH] * 5]


def test_what_is_not_needed_is_not_imported(place: Path) -> None:
    """Where they are installed, `inspect` of a local file imports neither torch nor what addresses need."""
    code = (
        "import sys\nfrom tests.support.commands import main\n"
        "try:\n    main(['inspect', 'ddp.pth'])\nexcept SystemExit:\n    print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True, env=PATHS)
    loaded = done.stdout.splitlines()[-1].split()
    assert "ckpt_tools" in loaded
    assert {"torch", "numpy", "safetensors", "fsspec", "cryptography", "h5py"}.isdisjoint(loaded)


NO_NETWORK = """
import socket

def refuse(*_, **__):
    raise AssertionError("a network call")

class Refused(socket.socket):
    __init__ = refuse

socket.socket = Refused
for name in ("create_connection", "getaddrinfo", "gethostbyname"):
    setattr(socket, name, refuse)
"""


def test_no_network(place: Path, tmp_path: Path) -> None:
    """`inspect`, `check`, `scan` and `convert` of local files open no socket: one that raises is in the place of all."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    lines = [
        "inspect ddp.pth", "check ddp.pth", "check --values ddp.pth", "scan .",
        f"convert ddp.pth {tmp_path}/x.safetensors --strip-module",
    ]  # fmt: skip
    refusing = {**PATHS, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = run([line.split() for line in [*lines, "inspect https://localhost:1/x.pth"]], place, refusing)
    assert [one.code for one in done[:-1]] == [0, 1, 1, 1, 0], [one.err for one in done]
    assert "a network call" in done[-1].err


@pytest.mark.parametrize("installed", [True, False])
def test_crcs_are_zlibs_with_isal_and_without(installed: bool, place: Path, tmp_path: Path) -> None:
    """isal brings another CRC-32: used where it is installed, and the same number either way."""
    counting = "import zlib\ncalls = 0\ndef crc32(*args):\n    global calls\n    calls += 1\n    return zlib.crc32(*args)\n"
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal" / "__init__.py").touch()
    (tmp_path / "isal" / "isal_zlib.py").write_text(counting if installed else "raise ImportError")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ckpt_tools\n"
        "ckpt_tools.convert('ddp.pth', sys.argv[1] + '/out.pth', dtype='bf16')\n"
        "print(getattr(sys.modules.get('isal.isal_zlib'), 'calls', 0) > 0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    made = subprocess.run(command, cwd=place, check=True, capture_output=True, text=True, env=PATHS)
    assert made.stdout == f"{installed}\n"
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.testzip() is None


def test_another_system(place: Path, tmp_path: Path) -> None:
    """Where there is neither copy_file_range nor preadv nor pread (macOS, Windows), the result is the same file."""
    names = "('copy_file_range', 'preadv', 'pread', 'statvfs', 'fchmod')"
    code = f"import os\nfor name in {names}:\n    vars(os).pop(name, None)\nimport ckpt_tools, sys\n"
    code += "ckpt_tools.convert('ddp.pth', sys.argv[1], strip_module=True)"
    command = [sys.executable, "-c", code, str(tmp_path / "there.pth")]
    subprocess.run(command, cwd=place, check=True, env=PATHS)
    ckpt_tools.convert(place / "ddp.pth", tmp_path / "here.pth", strip_module=True)
    with zipfile.ZipFile(tmp_path / "there.pth") as one, zipfile.ZipFile(tmp_path / "here.pth") as other:
        assert [row.CRC for row in one.infolist()] == [row.CRC for row in other.infolist()]


# --- dist/ckpt.pyz


def start(one_file: Path, arguments: list[str], where: Path, options: list[str] = BARE) -> Done:
    """What comes of one command, as a user starts the file."""
    command = [sys.executable, *options, str(one_file), *arguments]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=where, capture_output=True, encoding="utf-8", env=environment, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dist") / "ckpt.pyz"
    pyz.write(place)
    return place


def test_it_is_small_pure_and_the_same_again(one_file: Path, tmp_path: Path) -> None:
    """Made twice, in another time zone and with another seed of hashes, it has the same bytes, and a digest beside it."""
    made = one_file.read_bytes()
    assert len(made) < 4_000_000
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


def test_every_command_and_option(one_file: Path, place: Path, bare: dict[str, Done]) -> None:
    """Each prints what the installed `ckpt` prints where the same packages are missing, and ends alike."""
    theirs = tried(place, dict(os.environ), [*BARE, str(one_file)])
    for name, one in theirs.items():
        assert "Traceback" not in one.err, one.err
        assert without_times(one) == without_times(bare[name]), name
    assert sum(one.code in (0, 1) for one in theirs.values()) > 100


def test_the_commands_of_the_readme(one_file: Path, place: Path, tmp_path: Path) -> None:
    """Exit code, both outputs and what is written are those of the installed `ckpt` with no more packages than the file has."""
    missing = hide(tmp_path / "hidden", [name for name in OPTIONAL if name != "fsspec"])  # which is in the file
    found = []
    for name, environment, begin in (("ours", missing, []), ("theirs", dict(os.environ), [*BARE, str(one_file)])):
        where = tmp_path / name
        shutil.copytree(place, where)
        done = run(readme_commands(), where, {**environment, "COLUMNS": "100"}, begin)
        assert all(one.code in (0, 1) or "Error: " in one.err for one in done)
        written = {path.relative_to(where): path.read_bytes() for path in where.rglob("*") if path.is_file()}
        found.append((list(map(without_times, done)), written))
    assert found[0] == found[1]


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
    """Workers find the package in the file; modules that lie where the user stands are not run there, without -I too."""
    for name in ("rich", "click", "json", "ckpt_tools", "encodings"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')")
    for number in range(210):  # of fewer none is worth a process
        shutil.copy(ROOT / "fixtures" / "single.pth", tmp_path / f"{number}.pth")
    scanned = start(one_file, ["scan", "--jobs", "2", "--json", "."], tmp_path, ["-S"])
    assert (scanned.code, scanned.err) == (0, "")
    assert scanned.out.count('"verdict":"plain"') == 210
    inspected = start(one_file, ["inspect", "--jobs", "2", "."], tmp_path)
    assert (inspected.code, inspected.err) == (0, "")


def test_a_folder_left_behind_is_no_torch(one_file: Path, place: Path, tmp_path: Path) -> None:
    """A folder `torch` without a package in it, as uninstalling may leave one, is as none."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    lines = ["stats ddp.pth", "check --values ddp.pth", "convert ddp.pth x.pth --dtype bf16"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for one in run([line.split() for line in lines], place, environment, ["-S", str(one_file)]):
        assert (one.code, one.err.splitlines()[0]) == (3, f"Error: {PYTORCH}")
