"""Imports fall one way, heavy libraries stay behind their doors, and the public names are pinned."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ckpt_tools
import ckpt_tools.torch

PACKAGE = Path(ckpt_tools.__file__).parent

# The rooms, floor by floor from the ground up: a module imports only from its own room and from lower floors.
FLOORS = [
    ["errors", "frozen", "_version"],
    ["limits", "text"],
    ["io"],  # bytes in, bytes out; knows no tensor
    ["tree"],  # a checkpoint decoded: no bytes
    ["pickling", "values"],  # the machine that runs nothing; the door to torch for numbers
    ["formats"],  # a module a format
    ["edit"],  # tree to tree
    ["matching"],  # who corresponds to whom: names and shapes, no file, no torch
    ["fit"],  # a checkpoint into a target
    ["operations"],  # a module, or a room, for every command
    ["torch", "render"],  # load code; reports as text, JSON, HTML
    ["cli"],
    ["__init__", "__main__"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MOST_MODULES = 15
LONGEST_CHAIN = 15  # `frozen`, of which all records are, is at the end of most


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below it; a package's own file under the package's name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" and len(names) > 1 else names)] = path
    return found


MODULES = modules()


def imported(module: str, *, top_only: bool = False) -> set[str]:
    """The modules of ckpt_tools that a module imports: anywhere in it, in functions and for types too, or at its top alone."""
    tree = ast.parse(MODULES[module].read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ckpt_tools":
            base = node.module.removeprefix("ckpt_tools").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                found.add(inner if inner in MODULES else base or "__init__")
        elif isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("ckpt_tools.") for alias in node.names if alias.name.startswith("ckpt_tools."))
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_fall_one_way(module: str) -> None:
    """A module imports only from its own room or from a floor below, wherever in it the import stands."""
    room = module.split(".")[0]
    assert room in FLOOR, f"{room} is on no floor: give it one"
    above = {name for name in imported(module) if (other := name.split(".")[0]) != room and FLOOR[other] >= FLOOR[room]}
    assert not above, f"{module} imports {above}: not from below"


def test_no_circle() -> None:
    """No module imports itself through others, inside a room either, typing and function-level imports counted."""
    circle: list[str] = []
    try:
        TopologicalSorter({module: imported(module) - {module} for module in MODULES}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, " -> ".join(circle)


def test_chains_are_short() -> None:
    """The longest chain of imports at the top of modules crosses few of them: start-up and reading follow it."""

    @cache
    def chain(module: str) -> list[str]:
        return [module, *max((chain(name) for name in imported(module, top_only=True) - {module}), key=len, default=[])]

    longest = max(map(chain, MODULES), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)


def test_the_front_door() -> None:
    """The package's folder holds the rooms and seven modules; a folder has so few modules that they can be seen at once."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__",
        "__main__",
        "_version",
        "errors",
        "frozen",
        "limits",
        "text",
    }
    counts = Counter(path.parent for path in MODULES.values() if path.stem != "__init__")
    crowded = {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MOST_MODULES}
    assert not crowded


def test_train_is_never_imported_back() -> None:
    """The package does not know the training core, which is not in the wheel."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "from train" not in text
        assert "import train" not in text


def test_public_names() -> None:
    """What `from ckpt_tools import *` gives is pinned, sorted and there."""
    assert ckpt_tools.__all__ == [
        "Averaged",
        "Checked",
        "Checkpoint",
        "CkptError",
        "Converted",
        "Description",
        "Difference",
        "Explanation",
        "Extracted",
        "Matched",
        "Proved",
        "Repaired",
        "Reported",
        "Scanned",
        "Shown",
        "Signed",
        "Stats",
        "Steps",
        "Verified",
        "__version__",
        "average",
        "check",
        "convert",
        "diff",
        "edit_in_place",
        "explain",
        "extract_lora",
        "inspect",
        "latest_good",
        "match",
        "open",
        "open_checkpoint",
        "prove",
        "repair",
        "report",
        "scan",
        "show",
        "sign",
        "stats",
        "verify",
    ]
    assert all(getattr(ckpt_tools, name) is not None for name in ckpt_tools.__all__)
    assert callable(ckpt_tools.convert)


def test_completion_shows_the_public_names() -> None:
    """`dir()`, and with it completion and `help()`, has the names that are imported when they are first used."""
    assert set(dir(ckpt_tools)) >= set(ckpt_tools.__all__)
    assert set(dir(ckpt_tools.torch)) >= set(ckpt_tools.torch.__all__)


def fresh(code: str, *arguments: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


TORCH_FREE = [
    "import ckpt_tools; ckpt_tools.convert, ckpt_tools.inspect",
    "import ckpt_tools.cli",
    "from ckpt_tools.cli import main; main(['--help'], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['inspect', FILE], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['inspect', '--json', FILE], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['convert', FILE, OUT, '--strip-module'], standalone_mode=False)",
    "from ckpt_tools.cli import main; main(['convert', FILE, OUT + '.safetensors', '--unwrap'], standalone_mode=False)",
]


@pytest.mark.parametrize("code", TORCH_FREE)
def test_torch_is_not_imported(code: str, wrapped_file: Path, tmp_path: Path) -> None:
    """Importing, --help, inspect and a convert without value work leave torch and numpy alone."""
    before = f"import sys; FILE, OUT = {str(wrapped_file)!r}, {str(tmp_path / 'out')!r}\ntry:\n    "
    after = "\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
    output = fresh(before + code + after + "print(*[m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])")
    assert output.splitlines()[-1] == ""


# What a command on one plain file has no use for; each costs about half a millisecond, and there were thirty of them.
PARTS = {f"formats.parts.{name}" for name in ("rank_parts", "siblings", "grouping", "zero.names")} | {"formats.folders"}
WRITING = {"io.temporaries", "io.attributes", "io.writer", "io.cloning", "io.in_place.journal", "operations.convert.run"}
OTHERS = {"io.in_place.rollback", "operations.in_folders", "shutil", "click.shell_completion"}
UNUSED = {
    "inspect FILE": PARTS | WRITING | OTHERS | {"json", "rich"},
    "inspect --json FILE": PARTS | WRITING | OTHERS | {"rich", "render.description"},
    "convert FILE OUT --strip-module": PARTS | OTHERS | {"formats.safetensors", "values.numeric", "json"},
}


@pytest.mark.parametrize("command", UNUSED)
def test_a_plain_file_imports_little(command: str, wrapped_file: Path, tmp_path: Path) -> None:
    """Inspecting or converting one file loads nothing that reads parts of many ranks, folders or journals."""
    loaded = printed_after(command, "print(*sys.modules)", wrapped_file, tmp_path)
    assert not UNUSED[command].intersection(name.removeprefix("ckpt_tools.") for name in loaded)


SLOW = """
for name, module in list(sys.modules.items()):
    for kind in vars(module).values() if name.startswith("ckpt_tools") else ():
        if hasattr(kind, "__dataclass_params__") and kind.__dataclass_params__.frozen:
            print(f"{kind.__module__}.{kind.__name__}", end=" ")
"""


@pytest.mark.parametrize("command", ["inspect FILE", "check FILE", "convert FILE OUT --strip-module"])
def test_records_are_quick_to_make(command: str, wrapped_file: Path, tmp_path: Path) -> None:
    """What a command on one plain file imports has no `@dataclass(frozen=True)`: `ckpt_tools.frozen` makes those faster."""
    assert not printed_after(command, SLOW, wrapped_file, tmp_path)


def printed_after(command: str, code: str, wrapped_file: Path, tmp_path: Path) -> list[str]:
    """The words that `code` prints in a fresh interpreter behind a command."""
    arguments = command.replace("FILE", str(wrapped_file)).replace("OUT", str(tmp_path / "out.pth")).split()
    run = f"import sys; from ckpt_tools.cli import main\ntry: main({arguments!r}, standalone_mode=False)"
    return (
        fresh(f"{run}\nexcept SystemExit as stop: assert stop.code in (None, 0, 1)\nprint()\n{code}").splitlines()[-1].split()
    )
