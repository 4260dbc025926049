"""Imports fall one way, heavy libraries stay behind their doors, what is imported is declared, public names are pinned."""

import ast
import functools
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
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
    ["formats"],  # a module a format of one file
    ["parts"],  # checkpoints in several files; opens whatever a path is
    ["edit"],  # tree to tree
    ["matching"],  # who corresponds to whom: names and shapes, no file, no torch
    ["fit"],  # a checkpoint into a target
    ["operations"],  # a module, or a room, for every command
    ["torch", "render"],  # load code; reports as text, JSON, HTML
    ["cli"],
    ["__init__", "__main__"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below it; a package's own file under the package's name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" and len(names) > 1 else names)] = path
    return found


MODULES = modules()


@functools.cache
def imported(module: str) -> set[str]:
    """The modules of ckpt_tools that a module imports: anywhere in it, in functions and for types too."""
    tree = ast.parse(MODULES[module].read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ckpt_tools":
            base = node.module.removeprefix("ckpt_tools").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                found.add(inner if inner in MODULES else base or "__init__")
        elif isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("ckpt_tools.") for alias in node.names if alias.name.startswith("ckpt_tools."))
    return found


def test_imports_fall_one_way() -> None:
    """A module imports only from its own room or from a floor below, wherever in it the import stands."""
    above = {
        f"{module} imports {name}"
        for module in MODULES
        for name in imported(module)
        if (room := module.split(".")[0]) != (other := name.split(".")[0]) and FLOOR[other] >= FLOOR[room]
    }
    assert not above


def test_no_circle() -> None:
    """No module imports itself through others, inside a room either, typing and function-level imports counted."""
    circle: list[str] = []
    try:
        TopologicalSorter({module: imported(module) - {module} for module in MODULES}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, " -> ".join(circle)


def test_train_is_never_imported_back() -> None:
    """The package does not know the training core, which is not in the wheel."""
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"\b(?:from|import) train\b", path.read_text())


NAMES = """
Averaged Checked Checkpoint CkptError Converted Description Difference Explanation Extracted LazyFile Matched Proved Repaired
Reported Scanned Shown Signed Stats Steps Verified __version__ average check convert diff edit_in_place explain extract_lora
inspect latest_good load_into load_state_dict match open open_checkpoint prove repair report save scan show sign stats steps
verify
"""


def test_public_names() -> None:
    """What `from ckpt_tools import *` gives is pinned, sorted and there; `dir()`, and with it completion, has it all."""
    assert ckpt_tools.__all__ == NAMES.split()
    assert all(getattr(ckpt_tools, name) is not None for name in ckpt_tools.__all__)
    assert set(dir(ckpt_tools)) >= set(ckpt_tools.__all__)
    assert set(dir(ckpt_tools.torch)) >= set(ckpt_tools.torch.__all__)


def private_names(path: Path) -> set[str]:
    """What of ckpt_tools a test file imports, or names to patch it, beyond the public face."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("ckpt_tools.")} - FACE.keys()
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ckpt_tools":
            module = str(node.module)
            for alias in node.names:
                known = FACE.get(module, set()) | {name.removeprefix(f"{module}.") for name in FACE}
                if module not in FACE or alias.name.startswith("_") or (FACE[module] and alias.name not in known):
                    found.add(f"{module}.{alias.name}")
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"ckpt_tools\.(?:{'|'.join(ROOMS)})\.[\w.]+", str(node.value)):
            found.add(str(node.value))
    return found


# What tests import: all names of errors and limits, of the two packages those in `__all__`.
FACE: dict[str, set[str]] = {
    "ckpt_tools": set(ckpt_tools.__all__), "ckpt_tools.torch": set(ckpt_tools.torch.__all__), "ckpt_tools.errors": set(),
    "ckpt_tools.limits": set(),
}  # fmt: skip
ROOMS = sorted(FLOOR.keys() - {"errors", "limits", "torch"})
TESTS = Path(__file__).parent
# The command line, which all tests take from there; a container and a family that are made up, of what any is made of.
ELSEWHERE = {"support/commands.py", "formats/test_a_new_container.py", "formats/test_a_new_family.py"}
NOT_YET = {"fuzz/beside.py", "fuzz/cases.py", "fuzz/readers.py"}


def test_tests_know_the_public_face_alone() -> None:
    """No test file imports or patches what is not public: the code below may change. The list only gets shorter."""
    reaching = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if private_names(path)} - ELSEWHERE
    assert reaching == NOT_YET


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BY_HAND = ROOT / "fixtures" / "makers"  # each runs in an environment of its own, which it describes
OURS = {"ckpt_tools", "train", "tests", "fixtures", "docs"}
HOMES = packages_distributions()


def declared(*extras: str) -> set[str]:
    """The distributions that are installed with these extras, by their normal names."""
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {normal(re.split(r"[\[<>=~!; ]", line)[0]) for line in wanted}


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def foreign(folder: str) -> list[tuple[str, str]]:
    """The packages that the modules of a folder import from elsewhere, and where."""
    found = []
    for path in sorted(set((ROOT / folder).rglob("*.py")) - set(BY_HAND.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in (name.partition(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name not in OURS:
                    found.append((name, str(path.relative_to(ROOT))))
    return found


def test_no_class_is_a_generic_of_click() -> None:
    """`class X(click.Choice[str])` fails at import with click 8.1, which pyproject.toml allows."""
    for path in (ROOT / "ckpt_tools").rglob("*.py"):
        code = path.read_text("utf-8")
        for node in ast.walk(ast.parse(code)) if "import click" in code else []:
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                assert not (isinstance(base, ast.Subscript) and "click." in ast.unparse(base.value)), path


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("ckpt_tools", ["keras", "dev"]), ("train", ["train"]), ("fixtures", ["dev"]),
        ("tests", ["dev", "train"]),
        ("docs", ["dev", "docs"]),
    ],
)  # fmt: skip
def test_what_is_imported_is_declared(folder: str, extras: list[str]) -> None:
    """Each package that a folder imports is a dependency, or in the extra that the folder is for."""
    known = declared(*extras)
    assert foreign(folder)
    for name, where in foreign(folder):
        assert known & {normal(home) for home in HOMES.get(name, [name])}, f"{where} imports {name}"


def test_the_library_needs_no_extra() -> None:
    """Without extras all is there but h5py and gguf (with NumPy), cryptography, pytest (a plugin)."""
    missing = {name for name, _ in foreign("ckpt_tools") if not declared() & {normal(home) for home in HOMES.get(name, [name])}}
    assert missing == {"h5py", "gguf", "numpy", "cryptography", "pytest"}
